"""Settings of the gateway. Flags exist for those that an operator decides (config.py)."""

from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.gateway.flex.gate import FlexConfig
from sglang_live.interaction.vad import VadSettings
from sglang_live.kv.retention import RetentionConfig
from sglang_live.sound.decoder import MAX_CLIP_S

_MIB = 1024 * 1024

# For the WebSocket server (uvicorn's ws_max_size). 15 MiB of audio are 20 MiB of base64 plus an
# envelope; with the margin, somewhat larger appends get an error instead of a closed socket.
MAX_FRAME_BYTES = 24 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What the gateway accepts, keeps and refuses.

    has_language_model: False: the server only speaks text, and refuses conversations.
    api_keys: accepted keys; empty: no key is needed.
    batch_only_keys: those of them whose requests are all flex, and which open no session.
    flex: bound on flex requests of clients.
    own_pages_only: without keys, accept only names of this machine and its own pages.
    max_sessions_per_key: open sessions of one key and the secrets made with it; None: no limit.
    max_sessions_per_secret: open sessions of one client secret.
    idle_session_s: seconds without any event or audio after which a session is closed; None:
        never.
    max_loop_lag_s: mean delay of the event loop at which new sessions are refused; None: no limit.
    max_responses_per_minute: responses of one key and the secrets made with it; None: no limit.
    max_frame_bytes: one event, as text.
    max_append_bytes: audio in one event, decoded from base64.
    max_input_audio_s: seconds of uncommitted audio; with voice detection, of one turn.
    send_buffer_bytes: events that a client has not read; beyond it the connection is dropped.
    max_conversation_bytes: text and audio of all items of a session; the oldest leave first.
    max_conversation_bytes_of_all: the same for all sessions together.
    max_out_of_band_responses: out-of-band responses of a session that run at the same time.
    max_out_of_band_responses_in_all: the same for all sessions together.
    max_body_bytes: body of one HTTP request to SGLang's own API.
    default_instructions: system prompt of a session without instructions.
    about: what the page says of the model. suggestions: questions that it offers.
    recognises: the model has a recogniser of its own. hears: the one language of it; "": it detects
        the language of each utterance.
    hears_one_utterance: recordings are transcribed utterance by utterance.
    knows_voices: there is a speaker model, so that sessions ignore other voices by default.
    prefills_at_pauses: turn prefill of what a recogniser heard up to each pause of the user.
    turn_prefill_s: seconds of speech in each piece of a turn prefill; 0: no turn prefill.
    preheat: whether instructions and conversation are prefilled, where their KV is missing, when
        the user begins to speak.
    speculate_ms: milliseconds of silence before a speculative turn; None: no speculative turns.
    vad: defaults for server_vad; confirm_ms also for semantic_vad.
    retention: part of a long conversation that a session keeps; None: all of it, even if a client
        sets a smaller part.
    timeline_dir: folder for one file per session (interaction/timeline.py); None: no files.
    allow_local_media: HTTP requests may name files of this machine.
    allow_private_media_urls: HTTP requests may name hosts of the private network.
    operator_key: key of routes that affect all clients (/flush_cache); None: they return 403.
    max_native_sessions_per_key: open sessions of SGLang's own API per key.
    max_native_sessions: the same for all keys together.
    native_api_key: key of SGLang's own API; None: it has no key.
    native_socket: Unix socket of SGLang's own API; None: its URL is reached by TCP.
    native_connect_timeout_s: seconds to connect to SGLang's own API.
    """

    has_language_model: bool = True
    api_keys: tuple[str, ...] = ()
    batch_only_keys: tuple[str, ...] = ()
    flex: FlexConfig = field(default_factory=FlexConfig)
    own_pages_only: bool = False
    max_sessions_per_key: int | None = None
    max_sessions_per_secret: int = 4
    idle_session_s: float | None = None
    max_loop_lag_s: float | None = 0.2
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
    about: str = ""
    suggestions: tuple[str, ...] = ()
    recognises: bool = False
    hears: str = ""
    hears_one_utterance: bool = False
    knows_voices: bool = False
    prefills_at_pauses: bool = False
    turn_prefill_s: float = 0.0
    preheat: bool = False
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

    def __post_init__(self) -> None:
        if any(not key or key != key.strip() for key in self.api_keys):
            raise ValueError("api_keys must not be empty or have spaces around them")
        if not set(self.batch_only_keys) <= set(self.api_keys):
            raise ValueError("batch_only_keys are among api_keys")
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
        if self.max_loop_lag_s is not None and self.max_loop_lag_s <= 0:
            raise ValueError(f"max_loop_lag_s must be positive, got {self.max_loop_lag_s}")
        if self.idle_session_s is not None and self.idle_session_s <= 0:
            raise ValueError(f"idle_session_s must be positive, got {self.idle_session_s}")
        if self.turn_prefill_s < 0:
            raise ValueError(f"turn_prefill_s must not be negative, got {self.turn_prefill_s}")
        if self.speculate_ms is not None and self.speculate_ms < 1:
            raise ValueError(f"speculate_ms must be positive, got {self.speculate_ms}")
        if self.max_frame_bytes < self.max_append_bytes * 4 // 3:
            raise ValueError("max_frame_bytes must hold max_append_bytes in base64")
