"""Settings of the Batch API, and its routes. Flags exist for the settings that an operator decides
(extension.py)."""

from dataclasses import dataclass

_MIB, _GIB = 1 << 20, 1 << 30
_DAY_S = 86_400
# Path and method.
ROUTES = (
    ("/v1/files", "POST"),
    ("/v1/files", "GET"),
    ("/v1/files/{id}", "GET"),
    ("/v1/files/{id}", "DELETE"),
    ("/v1/files/{id}/content", "GET"),
    ("/v1/batches", "POST"),
    ("/v1/batches", "GET"),
    ("/v1/batches/{id}", "GET"),
    ("/v1/batches/{id}/cancel", "POST"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """
    at_once: lines that run at the same time, at most.
    max_key_bytes: files of one key, results of its running batches included.
    max_key_files: files of one key.
    max_key_batches: batches of one key that have not ended.
    max_key_uploads: uploads of one key at the same time.
    max_file_bytes: one input file. max_line_bytes: one line of it. max_lines: of one input file.
    max_faults: faults of one input file that are listed.
    max_attempts: servers that may end while they run a line, before it fails.
    max_tries: tries of a line that fails by a fault of the server.
    line_s: time for one line, all tries included.
    retry_s: time between tries of a full disk; the longest time between tries of a line.
    suspect_s: time between tries of a line that an engine was processing when it died.
    window_s: OpenAI's completion window.
    kept_s: lifetime of files for which a client names none, and of batches that have ended.
    """

    at_once: int = 64
    max_key_bytes: int = 16 * _GIB
    max_key_files: int = 10_000
    max_key_batches: int = 64
    max_key_uploads: int = 2
    max_file_bytes: int = 200 * _MIB
    max_line_bytes: int = 32 * _MIB
    max_lines: int = 50_000
    max_faults: int = 100
    max_attempts: int = 5
    max_tries: int = 3
    line_s: float = 6 * 3600.0
    retry_s: float = 15.0
    suspect_s: float = 60.0
    window_s: int = _DAY_S
    kept_s: int = 30 * _DAY_S

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
