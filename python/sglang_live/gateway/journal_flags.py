"""Flags of the journal, by which calls outlive their gateway (journal/)."""

from dataclasses import dataclass
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.settings import Positive, Settings, flag

_SCHEMES = ("sqlite:", "valkey://", "valkeys://")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig(Settings):
    """url: "": there is no journal, and nothing of it is imported."""

    url: str = flag(
        "",
        "write resumable sessions there for other gateways: sqlite:FILE, valkey://HOST:PORT, "
        "valkeys://… (docs/deploy.md)",
        name="journal",
        value="URL",
        env="SGLANG_LIVE_JOURNAL",
        unset="none",
    )
    key_file: Path | None = flag(
        None,
        "secret of all its gateways, which encrypts it",
        name="journal-key-file",
    )
    keep_s: Positive = flag(
        3600.0, "delete a session that ended unnoticed after this time", name="journal-s"
    )

    def check(self) -> None:
        # Without the URL, which may have a password.
        if self.url and not self.url.startswith(_SCHEMES):
            raise BadInputError(f"--journal is a URL of {', '.join(_SCHEMES)}")
        if bool(self.url) != bool(self.key_file):
            raise BadInputError("--journal and --journal-key-file need each other")
