"""Settings of the gateway; config.py has flags for those that a server's owner decides."""

from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.interaction.vad import VadSettings
from sglang_live.kv.retention import RetentionConfig
from sglang_live.sound.decoder import MAX_CLIP_S

_MIB = 1024 * 1024

# For the WebSocket server (uvicorn's ws_max_size). 15 MiB of audio are 20 MiB of base64 plus an
# envelope; the margin lets somewhat larger appends be answered by an error instead of a close.
MAX_FRAME_BYTES = 24 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What the gateway accepts, keeps and refuses.

    api_keys: accepted keys; empty means that everybody may connect.
    own_pages_only: without keys, answer to names of this machine and to its own pages alone.
    max_sessions_per_key: calls that one key, and the secrets made with it, may have at once.
    max_sessions_per_secret: of them, with one client secret.
    idle_session_s: how long a client may send nothing, audio being something; None: as it likes.
    max_responses_per_minute: that one key, and the secrets made with it, may ask for.
    max_append_bytes: audio in one event, after base64.
    max_input_audio_s: audio that may wait for a commit.
    send_buffer_bytes: events a client has not read yet; beyond it the connection is dropped.
    max_conversation_bytes: text and audio of all items of a session; the oldest leave first.
    max_conversation_bytes_of_all: the same for all sessions together.
    max_out_of_band_responses: responses outside the conversation that may run at the same time.
    max_out_of_band_responses_in_all: the same for all sessions together.
    max_body_bytes: body of one HTTP request to SGLang's own API.
    default_instructions: system prompt of a session that gives none.
    turn_prefill_s: of how much speech each piece is that is taken in while its caller goes on
        speaking; 0: turns are taken in when they are over.
    speculate_ms: of silence after which an answer is begun; None: when the turn is over.
    vad: defaults of a session that asks for server_vad; confirm_ms also for semantic_vad.
    retention: what a session keeps of a long conversation; None: everything, whatever clients ask.
    timeline_dir: folder for a file per session (interaction/timeline.py), None for no files.
    allow_local_media: let HTTP requests name files of this machine.
    allow_private_media_urls: let them name hosts of this network.
    operator_key: for what concerns all callers (/flush_cache); None: such routes answer 403.
    max_native_sessions_per_key: sessions of SGLang's own API that one key may have open.
    max_native_sessions: the same for all keys together.
    native_api_key: key for SGLang's own API, if it wants one.
    native_socket: Unix socket of SGLang's own API; None: its URL is reached by TCP.
    """

    api_keys: tuple[str, ...] = ()
    own_pages_only: bool = False
    max_sessions_per_key: int | None = None
    max_sessions_per_secret: int = 4
    idle_session_s: float | None = None
    max_responses_per_minute: int | None = None
    max_frame_bytes: int = MAX_FRAME_BYTES
    max_append_bytes: int = 15 * _MIB
    max_input_audio_s: float = MAX_CLIP_S
    send_buffer_bytes: int = 16 * _MIB
    max_conversation_bytes: int = 256 * _MIB
    max_conversation_bytes_of_all: int = 2048 * _MIB
    max_out_of_band_responses: int = 4
    max_out_of_band_responses_in_all: int = 32
    max_body_bytes: int = 64 * _MIB
    default_instructions: str = ""
    turn_prefill_s: float = 0.0
    speculate_ms: int | None = None
    vad: VadSettings = field(default_factory=VadSettings)
    retention: RetentionConfig | None = None
    timeline_dir: Path | None = None
    allow_local_media: bool = False
    allow_private_media_urls: bool = False
    operator_key: str | None = None
    max_native_sessions_per_key: int = 16
    max_native_sessions: int = 32
    native_api_key: str | None = None
    native_socket: str | None = None
    native_connect_timeout_s: float = 5.0

    def __post_init__(self):
        if any(not key or key != key.strip() for key in self.api_keys):
            raise ValueError("api_keys must not be empty or have spaces around them")
        if self.max_sessions_per_key is not None and self.max_sessions_per_key < 1:
            raise ValueError("max_sessions_per_key must be positive")
        if self.max_responses_per_minute is not None and self.max_responses_per_minute < 1:
            raise ValueError("max_responses_per_minute must be positive")
        positive = (
            "max_sessions_per_secret",
            "max_frame_bytes",
            "max_append_bytes",
            "max_input_audio_s",
            "send_buffer_bytes",
            "max_conversation_bytes",
            "max_conversation_bytes_of_all",
            "max_out_of_band_responses",
            "max_out_of_band_responses_in_all",
            "max_body_bytes",
            "max_native_sessions_per_key",
            "max_native_sessions",
            "native_connect_timeout_s",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.idle_session_s is not None and self.idle_session_s <= 0:
            raise ValueError(f"idle_session_s must be positive, got {self.idle_session_s}")
        if self.turn_prefill_s < 0:
            raise ValueError(f"turn_prefill_s must not be negative, got {self.turn_prefill_s}")
        if self.speculate_ms is not None and self.speculate_ms < 1:
            raise ValueError(f"speculate_ms must be positive, got {self.speculate_ms}")
        if self.max_frame_bytes < self.max_append_bytes * 4 // 3:
            raise ValueError("max_frame_bytes must hold max_append_bytes in base64")
