"""The real gateway with an orchestrator whose responses are a recording.

    python -m benchmark.gateway_servers.gateway RESPONSE_S

For benchmark.gateway_cost and benchmark.turn_taking; launch_server does not import it.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable

from benchmark.gateway_servers.serving import serve, speech
from sglang_live.capacity.control import Capacity
from sglang_live.core import (
    FRAME_S,
    OUTPUT_RATE_HZ,
    AudioDelta,
    AudioPart,
    BegunTurn,
    HistoryItem,
    PromptContent,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
)
from sglang_live.gateway.app import build_app
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.http.health import SERVING, Health
from sglang_live.interaction.endpoint import SmartTurnModel, installed_model_path
from sglang_live.kv.retention import RetentionConfig

FIRST_AUDIO_S = 0.3
# The vocoder's first chunk and its later ones: 2 and 4 frames of 80 ms.
CHUNKS_S = (0.16, 0.32)
# Stages generate faster than real time; the factor only determines how deltas bunch.
SPEED = 2.0
WORDS_PER_S = 3.0
MOST_CALLS = 1000
_FRAME_CODES_BYTES = 32


class FakeSession:
    def __init__(self, session_id: str, response_pcm: bytes, epoch: int):
        self.session_id = session_id
        self._response_pcm = response_pcm
        self.n_turns, self.epoch = 0, epoch
        self.addresses = {"thinker": "tcp://127.0.0.1:1", "talker": "tcp://127.0.0.1:2"}
        self._said = ""
        self._codes: tuple[bytes, ...] = ()

    def begun(self) -> BegunTurn:
        """A token for each word, and 16 codes of two bytes for each frame."""
        ids = tuple(range(1, 1 + self._said.count(" ")))
        n_frames = sum(map(len, self._codes)) // _FRAME_CODES_BYTES
        made = {"codes": self._codes, "n_frames": n_frames, "speech_s": n_frames * FRAME_S}
        return BegunTurn(ids=ids, said=self._said, seed=1, **made)

    def restore(self, history: Iterable[HistoryItem], n_turns: int) -> None:
        """Does nothing: there is no KV."""

    async def respond(self, turn: TurnRequest) -> AsyncIterator[TurnEvent]:
        self.n_turns += 1
        self._said, self._codes = "", ()
        await asyncio.sleep(FIRST_AUDIO_S)
        first, later = (round(s * OUTPUT_RATE_HZ) * 2 for s in CHUNKS_S)
        begin, n_words = 0, 0
        while begin < len(self._response_pcm):
            pcm = self._response_pcm[begin : begin + (later if begin else first)]
            begin += len(pcm)
            heard_s = begin / (2 * OUTPUT_RATE_HZ)
            while n_words < heard_s * WORDS_PER_S:
                n_words += 1
                self._said += "word "
                yield TranscriptDelta("word ", n_words)
            n_codes = round(len(pcm) / (2 * OUTPUT_RATE_HZ) / FRAME_S) * _FRAME_CODES_BYTES
            self._codes = (*self._codes, bytes(n_codes))
            yield AudioDelta(pcm)
            await asyncio.sleep(len(pcm) / (2 * OUTPUT_RATE_HZ) / SPEED)
        text = TextPart("word " * n_words)
        response = HistoryItem(key=turn.turn_id, role="assistant", parts=(text,))
        yield TurnDone(
            status="completed", reason=None, item=response, usage=Usage(), gone=_gone(turn)
        )

    def watch(self, on_stream_event) -> None:
        """Does nothing: there are no stream events without policies."""

    def interrupt(self) -> bool:
        """Returns False: a recording has no KV to truncate."""
        return False

    def report_playback(self, heard_s: float, playing: bool, speed: float = 1.0) -> None:
        """Does nothing: there is no scheduler."""

    def report_underrun(self, silent_s: float) -> None:
        """Does nothing: there is no admission control."""

    def report_speech(self, speaks: bool = True) -> None:
        """Does nothing: there is no KV to load."""

    def leave_frames(self) -> None:
        """Does nothing: there is no frame mode."""

    def report_next_use(
        self, to_play_s: float, response_gap_s: float | None, observed_gap_s: float | None
    ) -> None:
        """Does nothing: there is no KV to evict."""

    async def close(self) -> None:
        """Does nothing: the session has no resources."""


class FakeOrchestrator:
    model_name = "recording"
    voices = ("reader",)
    duplex_s, own_voice = 0.0, False

    def __init__(self, response_s: float):
        self._response_pcm = speech(round(response_s * OUTPUT_RATE_HZ) * 2)

    async def open_session(
        self, session_id: str, *, epoch: int = 0, at: dict[str, str] | None = None
    ) -> FakeSession:
        return FakeSession(session_id, self._response_pcm, epoch)

    def capacity_now(self) -> Capacity:
        return Capacity(
            n_sessions=0, limit=MOST_CALLS, n_more=MOST_CALLS, why="", share=None, pools={}
        )

    async def measure(self, content: PromptContent) -> None:
        """Returns None: all that these users say fits."""


def _gone(turn: TurnRequest) -> tuple[str, ...]:
    """Keys of the items that a thinker's session would have dropped."""
    kept = turn.retention
    if kept is None:
        return ()
    sizes = [sum(_n_tokens(part) for part in item.parts) for item in turn.history]
    if sum(sizes) <= kept.window_tokens + kept.slack_tokens:
        return ()
    gone, left = [], sum(sizes)
    for item, size in zip(turn.history, sizes, strict=True):
        left -= size
        if left < kept.window_tokens:
            break
        gone.append(item.key)
    return tuple(gone)


def _n_tokens(part: AudioPart | TextPart) -> float:
    return part.duration_s / FRAME_S if isinstance(part, AudioPart) else len(part.text.split())


def main() -> None:
    orchestrator = FakeOrchestrator(response_s=float(sys.argv[1]))
    health = Health({"recording": SERVING})
    path = installed_model_path()
    serve(
        build_app(
            orchestrator,
            config=GatewayConfig(retention=RetentionConfig()),
            native_url=None,
            health=lambda: health,
            endpoint_model=SmartTurnModel(path) if path else None,
        )
    )


if __name__ == "__main__":
    main()
