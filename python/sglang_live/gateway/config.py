"""Settings of the gateway. Flags exist for those that an operator decides (config.py)."""

from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.gateway.auth import KeyConfig
from sglang_live.gateway.call.settings import TurnConfig
from sglang_live.gateway.flex.gate import FlexConfig
from sglang_live.gateway.http.body import InputLimits
from sglang_live.gateway.http.media_guard import MediaConfig
from sglang_live.gateway.live.text_server import TextServerConfig
from sglang_live.gateway.model import ServedModel
from sglang_live.gateway.native.upstream import NativeConfig
from sglang_live.gateway.rate_limits import ClientLimits
from sglang_live.gateway.telephony.config import TelephonyConfig
from sglang_live.gateway.webrtc.config import WebRtcConfig
from sglang_live.kv.retention import RetentionConfig
from sglang_live.settings import Count, Positive, Settings

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits(Settings):
    """
    max_loop_lag_s: mean delay of the event loop at which new sessions are refused; None: no limit.
    send_buffer_bytes: events that a client has not read; beyond it the connection is dropped.
    resume_log_bytes: sent events that a resumable session keeps for a client that lost its socket.
    resume_log_bytes_of_all: the same for all sessions together.
    max_conversation_bytes: text and audio of all items of a session; the oldest leave first.
    max_conversation_bytes_of_all: the same for all sessions together.
    max_out_of_band_responses: out-of-band responses of a session that run at the same time.
    max_out_of_band_responses_in_all: the same for all sessions together.
    """

    max_loop_lag_s: Positive | None = 0.2
    send_buffer_bytes: Count = 16 * _MIB
    resume_log_bytes: Count = 4 * _MIB
    resume_log_bytes_of_all: Count = 256 * _MIB
    max_conversation_bytes: Count = 256 * _MIB
    max_conversation_bytes_of_all: Count = 2048 * _MIB
    max_out_of_band_responses: Count = 4
    max_out_of_band_responses_in_all: Count = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(Settings):
    """What the gateway accepts, keeps and refuses.

    limits: of one client. inputs: of what it sends. sessions: of what the server keeps for it.
    is_loopback: the server is reached from its own machine alone.
    retention: part of a long conversation that a session keeps; None: all of it, even if a client
        sets a smaller part.
    timeline_dir: folder for one file per session (interaction/timeline.py); None: no files.
    """

    model: ServedModel = field(default_factory=ServedModel)
    keys: KeyConfig = field(default_factory=KeyConfig)
    limits: ClientLimits = field(default_factory=ClientLimits)
    media: MediaConfig = field(default_factory=MediaConfig)
    flex: FlexConfig = field(default_factory=FlexConfig)
    inputs: InputLimits = field(default_factory=InputLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    turns: TurnConfig = field(default_factory=TurnConfig)
    native: NativeConfig = field(default_factory=NativeConfig)
    text_server: TextServerConfig = field(default_factory=TextServerConfig)
    webrtc: WebRtcConfig = field(default_factory=WebRtcConfig)
    telephony: TelephonyConfig = field(default_factory=TelephonyConfig)
    is_loopback: bool = True
    retention: RetentionConfig | None = None
    timeline_dir: Path | None = None
