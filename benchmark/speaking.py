"""Requests to speak a text on a modelled device: first audio and streams in time, by rate.

    python -m benchmark.speaking --json out.json

VoxServe's process (section 4.1): for 60 s requests come with exponential intervals, each with a
text as long as LibriTTS' are. Engine, vocoder and policies are those of the simulator
(benchmark/notes/simulation.md); a text is one piece, or the first words and the rest where pieces
are decoded whole. What a device model lacks is in HostTimes. Two arms are naive: one request at a
time, and a language model in batches before a decoder without. Engine and decoder are processes of
one GPU, which gives them slices of time; with `all` they have turns if the decoder runs in graphs,
as in the server.
"""

import argparse
import json
import math
import random
from collections import deque
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmark.load.provenance import facts
from benchmark.speaking_models import SHAPES
from sglang_live.bridge.rounds import rounds_of
from sglang_live.extensions.planner.device_model.model import SpeechModel, load_speech_model
from sglang_live.extensions.planner.simulation.engine.engine import Consumer, Engine, EngineSpec
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.engine.vocoder import Decoding, Vocoder
from sglang_live.extensions.planner.simulation.events import ArbitratedDevice, Device, Events
from sglang_live.extensions.planner.simulation.sharing import SharedDevice
from sglang_live.extensions.planner.simulation.spec import HostTimes
from sglang_live.ids import SPEAK_PREFIX
from sglang_live.messages import HeardOfMany
from sglang_live.models.codecs.flow import AHEAD, CHUNK, LONGEST_CHUNK
from sglang_live.policy.arbiter import lead_s
from sglang_live.policy.chunks import Ahead, ChunkRule
from sglang_live.policy.config import TALKER
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import FRAME_S
from sglang_live.stages.vocoder.config import VocoderConfig

MODELS = Path(__file__).with_name("device_models")
FOR_S = 60.0
RATES = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0)
# The last two are `off`, and serve one request at a time, and decode chunks one by one.
ARMS = ("off", "all", "one-request", "one-chunk")
# P90 of the first audio as in VoxServe's comparison, and requests without a gap for a player that
# begins a little later, as players do.
FIRST_AUDIO_MS, SMOOTH, PLAYER_S = 500.0, 0.99, 0.1
# test-clean of LibriTTS: 8.56 h in 4,837 utterances (arXiv 1904.02882). The spread is an estimate.
MEAN_S, SPREAD, LEAST_S, MOST_S = 6.37, 0.7, 0.6, 30.0
_WORDS_PER_S, _TOKENS_PER_WORD = 2.7, 1.3
# As VoxServe's largest batch.
_MOST_RUNNING = 128
_CHUNK_TOKENS = 8192
_HOST = HostTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    file: of its device model; "": it is one of speaking_models.
    frame_s: seconds of a frame. steps_per_frame: of the engine.
    n_words, n_codes: ids of text before that number of frames, where a model writes both in turn.
    n_lag: first steps, with which no frame is complete.
    n_ahead: frames behind a frame that its sound needs.
    chunk_frames, decode_s: as of PieceTalker.
    has_graphs: whether the decoder runs in graphs; without, it takes no turns, nor with MPS, where
        policies are to be without `arbiter`.
    rule: see Decoding.
    n_prompt: codes of the voice, which the decoder computes before the first.
    n_prefix: ids of a prompt beside the text.
    first_words: of a text that is spoken in two pieces; 0: in one.
    with_mps: engine and decoder compute at once; otherwise they have slices of time.
    """

    file: str = ""
    frame_s: float
    steps_per_frame: int = 1
    n_words: int = 0
    n_codes: int = 1
    n_lag: int = 0
    n_ahead: int = 0
    chunk_frames: int = 4
    decode_s: float = 0.0
    has_graphs: bool = False
    rule: ChunkRule | None = None
    n_prompt: int = 0
    n_prefix: int = 10
    first_words: int = 0
    with_mps: bool = False

    def n_frames(self, n_steps: int) -> int:
        """That are complete."""
        block = self.n_words + self.n_codes * self.steps_per_frame
        n_blocks, rest = divmod(max(0, n_steps - self.n_lag), block)
        return n_blocks * self.n_codes + max(0, rest - self.n_words) // self.steps_per_frame

    def n_steps(self, n_frames: int) -> int:
        """Of the engine for a number of frames."""
        n_blocks = math.ceil(n_frames / self.n_codes)
        return self.n_lag + n_blocks * self.n_words + n_frames * self.steps_per_frame

    @property
    def step_s(self) -> float:
        """Speech of a step of the engine."""
        steps = self.n_words + self.n_codes * self.steps_per_frame
        return self.frame_s * self.n_codes / steps

    @property
    def chunk_steps(self) -> int:
        """Of which the decoder makes one chunk, as stages/talker/piece_stage.py says it."""
        return self.n_steps(self.chunk_frames + self.n_ahead)


# A recording of 6 s, so that the first chunk needs no padding; those of LJ Speech, of which
# VoxServe takes one, have 6.57 s on average (13,100 clips of 23.92 h).
_VOICE_CODES = 150
# As models/codecs/flow/decoder.py: cut where prompt and chunk are a multiple of 25 codes, and some
# ahead; HiFT holds back four more.
_FLOW = Family(
    frame_s=0.04,
    n_ahead=AHEAD + 4,
    chunk_frames=LONGEST_CHUNK - 4,
    decode_s=0.5,
    has_graphs=True,
    rule=ChunkRule(
        first=CHUNK + -_VOICE_CODES % CHUNK + AHEAD, second=2 * CHUNK, growth=2, most=LONGEST_CHUNK
    ),
    n_prompt=_VOICE_CODES,
    n_prefix=2 + 20 + _VOICE_CODES,
)
FAMILIES = {
    "orpheus": Family(
        file="h100_orpheus.toml", frame_s=2048 / 24_000, steps_per_frame=7, n_ahead=3
    ),
    "csm": Family(file="h100_csm.toml", frame_s=0.08, has_graphs=True),
    "qwen3_tts": Family(file="h100_qwen3_tts.toml", frame_s=0.08, has_graphs=True),
    "cosyvoice2": _FLOW,
    "cosyvoice2_eager": replace(_FLOW, has_graphs=False),
    "cosyvoice2_tf32": _FLOW,
    "cosyvoice2_graphs": _FLOW,
    "cosyvoice2_mps": replace(_FLOW, with_mps=True),
    "cosyvoice3": _FLOW,
    "chatterbox": Family(
        frame_s=0.04,
        has_graphs=True,
        chunk_frames=1000,
        rule=ChunkRule(first=1000, second=1000, most=1000),
        n_prompt=_VOICE_CODES,
        n_prefix=34 + 4,
        first_words=8,
    ),
    # Its prompt hears a question of 10 s; it writes an id of text and four codes in turn.
    "step_audio2": Family(
        frame_s=0.04,
        n_words=1,
        n_codes=4,
        n_ahead=AHEAD,
        chunk_frames=CHUNK,
        decode_s=0.5,
        rule=ChunkRule(first=CHUNK + AHEAD, second=CHUNK, most=CHUNK),
        n_prefix=100 + 125,
    ),
    "glm4_voice": Family(
        frame_s=0.08,
        n_words=13,
        n_codes=26,
        chunk_frames=25,
        decode_s=0.5,
        rule=ChunkRule(first=25, second=25, most=25),
        n_prefix=60 + 125,
    ),
    "higgs_v2": Family(frame_s=0.04, n_lag=7, n_ahead=10, n_prefix=60),
    "moss_tts": Family(frame_s=0.08, n_lag=31, decode_s=0.15, n_prefix=60),
    "zonos": Family(frame_s=512 / 44_100, n_lag=8, n_ahead=10, chunk_frames=16, n_prefix=10),
}


def model_of(name: str) -> SpeechModel:
    file = FAMILIES[name].file
    return load_speech_model(MODELS / file) if file else SHAPES[name].model


@dataclass(frozen=True, slots=True)
class Row:
    """
    rate: requests per second. n: requests of all runs.
    first_audio_p50_ms, ...: from the request to its first sound at the client.
    in_time: share of chunks that came before the sound ahead of them ended.
    smooth: share of requests all of whose chunks did, for a player that begins PLAYER_S later.
    most_running: requests at once in the engine.
    busy: share of the time in which the device computed.
    """

    family: str
    arm: str
    rate: float
    n: int
    first_audio_p50_ms: float
    first_audio_p90_ms: float
    first_audio_p99_ms: float
    in_time: float
    smooth: float
    most_running: int
    busy: float

    @property
    def is_within(self) -> bool:
        return self.first_audio_p90_ms <= FIRST_AUDIO_MS and self.smooth >= SMOOTH


class _Ahead(Ahead):
    """Counts what sounds, as the vocoder stage does: a decoder that looks ahead is some frames
    behind those that it has taken."""

    def __init__(self, family: Family):
        super().__init__()
        self._frame_s, self._n_silent = family.frame_s, family.n_ahead

    def made(self, now_s: float, audio_s: float) -> None:
        """audio_s: of the frames that were taken, as the simulator counts them."""
        n_frames = round(audio_s / FRAME_S)
        n_new = max(0, n_frames - self._n_silent)
        self._n_silent -= n_frames - n_new
        if n_new:
            super().made(now_s, n_new * self._frame_s)


class Speech:
    """A request: its pieces, each of some frames, and what its client has heard.

    n_piece, n_made: frames of the piece that is made, and those that were made.
    n_sounded: of all pieces. before_s: speech of the pieces that were made.
    first_s: from the request to its first sound. late: for each chunk but the first.
    delay_s: that a player needs so that no chunk is late.
    """

    def __init__(self, number: int, came_s: float, pieces: list[tuple[int, int]]):
        """pieces: frames and words of each."""
        self.rid = f"{SPEAK_PREFIX}{number}"
        self.came_s, self.pieces = came_s, deque(pieces)
        self.n_frames = sum(n for n, _ in pieces)
        self.n_made = self.n_piece = self.n_sounded = 0
        self.before_s = 0.0
        self.first_s = math.nan
        self.late: list[bool] = []
        self.delay_s = self._sounded_s = 0.0
        self._heard_until_s = 0.0
        self.request: Request
        self.decoding: Decoding
        self.ahead: _Ahead

    def hear(self, now_s: float, audio_s: float) -> None:
        if math.isnan(self.first_s):
            self.first_s, self._heard_until_s = now_s - self.came_s, now_s
        else:
            self.late.append(now_s > self._heard_until_s + 1e-9)
        first_s = self.came_s + self.first_s
        self.delay_s = max(self.delay_s, now_s - first_s - self._sounded_s)
        self._sounded_s += audio_s
        self._heard_until_s = max(self._heard_until_s, now_s) + audio_s

    def heard_s(self, now_s: float, frame_s: float) -> float:
        """Of what has come, behind the begin of the piece that is made."""
        left_s = max(0.0, self._heard_until_s - now_s)
        return self.n_sounded * frame_s - left_s - self.before_s


class Server(Consumer):
    """
    most_running: requests at once.
    """

    def __init__(self, name: str, arm: str):
        family, model = FAMILIES[name], model_of(name)
        self._family = family
        self.events, self.most_running = Events(), 0
        policies = Policies.from_flag("all" if arm == "all" else "off")
        self.device: Device = SharedDevice(self.events, by_slices=not family.with_mps)
        if policies.arbiter and family.has_graphs and not family.with_mps:
            self.device = ArbitratedDevice(self.events, lead_s([_HOST.launch_s]), self.device)
        self._one_by_one = arm == "one-request"
        self._queue: deque[Speech] = deque()
        self._n_served = 0
        steps = {
            "stage.step_s": family.step_s,
            "stage.chunk_steps": family.chunk_steps,
            "stage.pipeline_s": TALKER.stage.pipeline_s + family.decode_s,
        }
        self._engine = Engine(
            EngineSpec(
                name="talker",
                costs=model.talker,
                chunk_tokens=_CHUNK_TOKENS,
                launch_s=_HOST.launch_s,
            ),
            self.events,
            self.device,
            KvPool(name="talker", total=model.kv_tokens(model.memory_gb), rows=_MOST_RUNNING),
            rounds_of(policies, TALKER.changed(steps), _CHUNK_TOKENS, cpu_s=lambda: 0.0),
            self,
        )
        config = VocoderConfig()
        if arm == "one-chunk":
            config = VocoderConfig(max_batch=1, max_in_flight=1)
        self._vocoder = Vocoder(
            self.events,
            self.device,
            model.vocoder,
            config,
            launch_s=_HOST.launch_s,
            eager=model.eager,
        )

    def take(self, speech: Speech) -> None:
        """Its text has come."""
        speech.ahead = _Ahead(self._family)
        self._queue.append(speech)
        self._serve()

    def _serve(self) -> None:
        while self._queue and not (self._one_by_one and self._n_served):
            self._n_served += 1
            speech = self._queue.popleft()
            self.events.after(_HOST.to_talker_s, partial(self._begin_piece, speech))

    def _begin_piece(self, speech: Speech) -> None:
        family = self._family
        speech.n_piece, n_words = speech.pieces.popleft()
        speech.n_made = 0
        speech.request = Request(
            rid=speech.rid,
            prompt_tokens=family.n_prefix + round(_TOKENS_PER_WORD * n_words),
            cached_tokens=0,
            max_new=family.n_steps(speech.n_piece) + 1,  # the last id is the end
            reserve=family.n_steps(round((MOST_S + 4.0) / family.frame_s)),
            owner=speech,
        )
        is_last = not speech.pieces
        speech.decoding = Decoding(
            partial(self._decoded, speech, _Sounding(family.n_ahead)),
            partial(self._ended, is_last),
            family.rule,
            family.n_prompt,
        )
        speech.decoding.ahead = speech.ahead
        self._engine.post(lambda: self._engine.add(speech.request))

    def _ended(self, is_last: bool) -> None:
        if is_last:
            self._n_served -= 1
            self._serve()

    def outputs(self, reqs: list[Request]) -> None:
        self.most_running = max(self.most_running, len(reqs))
        for req in reqs:
            speech = req.owner
            n_new = min(self._family.n_frames(req.n_out), speech.n_piece) - speech.n_made
            if n_new:
                speech.n_made += n_new
                self._vocoder.feed(speech.decoding, n_new)

    def finished(self, req: Request) -> None:
        speech = req.owner
        if self._family.n_ahead:
            self._vocoder.feed(speech.decoding, self._family.n_ahead)
        self._vocoder.end(speech.decoding)
        speech.before_s += speech.n_piece * self._family.frame_s
        if speech.pieces:
            self._begin_piece(speech)

    def _decoded(self, speech: Speech, sounding: "_Sounding", n_frames: int) -> None:
        if n_new := sounding.of(n_frames):
            self.events.after(_HOST.to_client_s, partial(self._hear, speech, n_new))

    def _hear(self, speech: Speech, n_frames: int) -> None:
        now_s, frame_s = self.events.now_s(), self._family.frame_s
        speech.n_sounded += n_frames
        speech.hear(now_s, n_frames * frame_s)
        rounds = self._engine.rounds
        if rounds is not None and not speech.request.is_finished:
            heard_s = speech.heard_s(now_s, frame_s)
            news = HeardOfMany.of([speech.rid], heard_s=[heard_s], advancing=[True], speed=[1.0])
            self.events.after(
                _HOST.report_s, lambda: self._engine.post(lambda: rounds.progress(news))
            )


class _Sounding:
    """Frames of a piece that sound, of those that were decoded: the first ones that come are
    needed ahead."""

    def __init__(self, n_ahead: int):
        self._n_silent = n_ahead

    def of(self, n_frames: int) -> int:
        n_new = max(0, n_frames - self._n_silent)
        self._n_silent -= n_frames - n_new
        return n_new


def speeches(family: Family, rate: float, seed: int, for_s: float) -> list[Speech]:
    rng = random.Random(seed)
    found: list[Speech] = []
    at_s = rng.expovariate(rate)
    while at_s < for_s:
        mean = math.log(MEAN_S) - SPREAD**2 / 2
        length_s = min(MOST_S, max(LEAST_S, rng.lognormvariate(mean, SPREAD)))
        found.append(Speech(len(found), at_s, _pieces(family, length_s)))
        at_s += rng.expovariate(rate)
    return found


def _pieces(family: Family, length_s: float) -> list[tuple[int, int]]:
    """Frames and words of each."""
    n_frames, n_words = math.ceil(length_s / family.frame_s), round(_WORDS_PER_S * length_s)
    if not 0 < family.first_words < n_words:
        return [(n_frames, n_words)]
    first = math.ceil(n_frames * family.first_words / n_words)
    rest = n_frames - first, n_words - family.first_words
    return [(first, family.first_words), rest]


def simulate(
    name: str, arm: str, rate: float, seeds: range = range(3), for_s: float = FOR_S
) -> Row:
    family, heard, most = FAMILIES[name], [], 0
    busy_s = run_s = 0.0
    for seed in seeds:
        server = Server(name, arm)
        of_run = speeches(family, rate, seed, for_s)
        for speech in of_run:
            server.events.at(speech.came_s, partial(server.take, speech))
        server.events.run()
        assert all(one.n_sounded == one.n_frames for one in of_run), "all is said"
        heard += of_run
        most = max(most, server.most_running)
        busy_s += sum(server.device.busy_s.values())
        run_s += server.events.now_s()
    first = np.array([1000 * one.first_s for one in heard])
    p50, p90, p99 = (round(float(np.percentile(first, p)), 1) for p in (50, 90, 99))
    late = [late for one in heard for late in (False, *one.late)]
    smooth = np.mean([one.delay_s <= PLAYER_S for one in heard])
    in_time = 1 - np.mean(late)
    return Row(
        name,
        arm,
        rate,
        len(heard),
        p50,
        p90,
        p99,
        round(float(in_time), 4),
        round(float(smooth), 4),
        most,
        round(busy_s / run_s, 3),
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """
    kv_mb, decoder_mb: of a stream at the end of a text of average length.
    fit: streams for which there is memory.
    device_rate, launch_rate: requests per second for which the device has time, and the thread that
        launches its decoder, if all batches are full: no order of service goes beyond them.
    """

    kv_mb: float
    decoder_mb: float
    fit: int
    device_rate: float
    launch_rate: float


def stream_of(name: str) -> Stream:
    """Of a family of speaking_models."""
    family, model = FAMILIES[name], SHAPES[name].model
    talker, eager = model.talker, model.eager
    assert eager is not None
    decoder_mb = SHAPES[name].figures["stream_mb"].value
    n_tokens = family.n_prefix + family.n_steps(round(MEAN_S / family.frame_s))
    kv_mb = n_tokens * talker.kv_token_bytes / 1e6
    left_mb = 1e3 * (model.memory_gb - model.weights_gb - model.spare_gb)
    max_batch, device_s, launch_s = VocoderConfig().max_batch, 0.0, 0.0
    sample = speeches(family, 10.0, 0, FOR_S)
    for speech in sample:
        for n_frames, n_words in speech.pieces:
            n_steps = family.n_steps(n_frames)
            n_prompt = family.n_prefix + round(_TOKENS_PER_WORD * n_words)
            kv_tokens = _MOST_RUNNING * (n_prompt + n_steps // 2)
            device_s += n_steps * talker.decode_s(_MOST_RUNNING, kv_tokens) / _MOST_RUNNING
            device_s += n_prompt * talker.prefill_per_token_us / 1e6
            n_seen, n_chunks, left = family.n_prompt, 0, n_frames + family.n_ahead
            while left > 0:
                rule = family.rule
                n = min(
                    left, VocoderConfig().chunk_frames if rule is None else rule.frames(n_chunks)
                )
                left, n_seen, n_chunks = left - n, n_seen + n, n_chunks + 1
                batch_s = eager.decode_s(max_batch, n_seen) + model.vocoder.decode_s(max_batch)
                device_s += batch_s / max_batch
            launch_s += n_chunks * eager.launch_ms / 1e3 / max_batch
    return Stream(
        round(kv_mb, 1),
        decoder_mb,
        min(_MOST_RUNNING, int(left_mb / (kv_mb + decoder_mb))),
        round(len(sample) / device_s, 1),
        round(len(sample) / launch_s, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="families, with commas: " + ", ".join(FAMILIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--only: no family is called {', '.join(unknown)}")
    rows: list[Row] = []
    streams = {name: stream_of(name) for name in names if name in SHAPES}
    for name, stream in streams.items():
        print(f"{name}: {stream}", flush=True)
    for name in names:
        for arm in ARMS:
            for rate in RATES:
                rows.append(row := simulate(name, arm, rate))
                print(
                    f"{name:10} {arm:11} {rate:5.1f} requests/s: first audio P50 "
                    f"{row.first_audio_p50_ms:8.1f}, P90 {row.first_audio_p90_ms:8.1f}, P99 "
                    f"{row.first_audio_p99_ms:8.1f} ms, {100 * row.in_time:6.2f} % of chunks in "
                    f"time, {100 * row.smooth:6.2f} % smooth, {row.most_running} at once, "
                    f"{100 * row.busy:5.1f} % busy",
                    flush=True,
                )
                if row.in_time < 0.5 or row.first_audio_p90_ms > 2 * FIRST_AUDIO_MS:
                    break  # more is worse
            mine = [r for r in rows if (r.family, r.arm) == (name, arm) and r.is_within]
            most = max((r.rate for r in mine), default=0.0)
            print(f"{name} {arm}: within the limits up to {most:g} requests/s", flush=True)
    if args.json:
        models = {
            name: SHAPES[name].facts() if name in SHAPES else model_of(name).facts()
            for name in names
        }
        document = {"benchmark": "speaking", **facts(), "device_models": models}
        document["streams"] = {name: asdict(stream) for name, stream in streams.items()}
        document["rows"] = [asdict(row) for row in rows]
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
