"""Requests to speak a text on a modelled device: first audio and streams in time, by rate.

    python -m benchmark.speaking --json out.json

VoxServe's process (section 5.1): for 60 s requests come with exponential intervals, each with a
text as long as LibriTTS' are. Engine, vocoder and policies are those of the simulator
(benchmark/notes/simulation.md); a text is one piece. What a device model lacks is in HostTimes.
"""

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmark.load.provenance import facts
from sglang_live.bridge.rounds import rounds_of
from sglang_live.extensions.planner.device_model.model import SpeechModel, load_speech_model
from sglang_live.extensions.planner.simulation.engine.engine import Consumer, Engine, EngineSpec
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.engine.vocoder import Decoding, Vocoder
from sglang_live.extensions.planner.simulation.events import Device, Events
from sglang_live.extensions.planner.simulation.spec import HostTimes
from sglang_live.ids import SPEAK_PREFIX
from sglang_live.messages import HeardOfMany
from sglang_live.policy.chunks import Ahead
from sglang_live.policy.config import TALKER
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import FRAME_S
from sglang_live.stages.vocoder.config import VocoderConfig

MODELS = Path(__file__).with_name("device_models")
FOR_S = 60.0
RATES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0)
ARMS = ("off", "all")
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
    file: of its device model.
    frame_s: seconds of a frame. steps_per_frame: of the engine.
    n_ahead: frames behind a frame that its sound needs.
    n_prefix: ids of a prompt beside the text.
    """

    file: str
    frame_s: float
    steps_per_frame: int = 1
    n_ahead: int = 0
    n_prefix: int = 10

    @property
    def model(self) -> SpeechModel:
        return load_speech_model(MODELS / self.file)


FAMILIES = {
    "orpheus": Family(
        file="h100_orpheus.toml", frame_s=2048 / 24_000, steps_per_frame=7, n_ahead=3
    ),
    "csm": Family(file="h100_csm.toml", frame_s=0.08),
    "qwen3_tts": Family(file="h100_qwen3_tts.toml", frame_s=0.08),
}


@dataclass(frozen=True, slots=True)
class Row:
    """
    rate: requests per second. n: requests of all runs.
    first_audio_p50_ms, ...: from the request to its first sound at the client.
    in_time: share of chunks that came before the sound ahead of them ended.
    smooth: share of requests all of whose chunks did, for a player that begins PLAYER_S later.
    most_running: requests at once in the engine.
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
    """A request: its frames, and what its client has heard.

    first_s: from the request to its first sound. late: for each chunk but the first.
    delay_s: that a player needs so that no chunk is late.
    """

    def __init__(self, number: int, came_s: float, n_frames: int, n_words: int):
        self.rid = f"{SPEAK_PREFIX}{number}"
        self.came_s, self.n_frames, self.n_words = came_s, n_frames, n_words
        self.n_made = self.n_decoded = self.n_sounded = 0
        self.first_s = math.nan
        self.late: list[bool] = []
        self.delay_s = self._sounded_s = 0.0
        self._heard_until_s = 0.0
        self.request: Request
        self.decoding: Decoding

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
        """Of what has come."""
        return self.n_sounded * frame_s - max(0.0, self._heard_until_s - now_s)


class Server(Consumer):
    """
    most_running: requests at once.
    """

    def __init__(self, family: Family, arm: str):
        model, self._family = family.model, family
        self.events, self.most_running = Events(), 0
        device = Device(self.events)
        step_s = family.frame_s / family.steps_per_frame
        # As stages/talker/piece_stage.py says them; 4 frames are a chunk of every talker here.
        n_steps = (4 + family.n_ahead) * family.steps_per_frame
        steps = {"stage.step_s": step_s, "stage.chunk_steps": n_steps}
        policies = Policies.from_flag(arm)
        self._engine = Engine(
            EngineSpec(
                name="talker",
                costs=model.talker,
                chunk_tokens=_CHUNK_TOKENS,
                launch_s=_HOST.launch_s,
            ),
            self.events,
            device,
            KvPool(name="talker", total=model.kv_tokens(model.memory_gb), rows=_MOST_RUNNING),
            rounds_of(policies, TALKER.changed(steps), _CHUNK_TOKENS, cpu_s=lambda: 0.0),
            self,
        )
        self._vocoder = Vocoder(
            self.events, device, model.vocoder, VocoderConfig(), launch_s=_HOST.launch_s
        )
        self._speeches: dict[str, Speech] = {}

    def take(self, speech: Speech) -> None:
        """Its text has come."""
        family = self._family
        n_steps = speech.n_frames * family.steps_per_frame
        speech.request = Request(
            rid=speech.rid,
            prompt_tokens=family.n_prefix + round(_TOKENS_PER_WORD * speech.n_words),
            cached_tokens=0,
            max_new=n_steps + 1,  # the last id is the end
            reserve=round((MOST_S + 4.0) / family.frame_s) * family.steps_per_frame,
            owner=speech,
        )
        speech.decoding = Decoding(partial(self._decoded, speech), lambda: None)
        speech.decoding.ahead = _Ahead(family)
        self._speeches[speech.rid] = speech
        self.events.after(
            _HOST.to_talker_s,
            lambda: self._engine.post(lambda: self._engine.add(speech.request)),
        )

    def outputs(self, reqs: list[Request]) -> None:
        self.most_running = max(self.most_running, len(reqs))
        for req in reqs:
            speech = req.owner
            if req.n_out % self._family.steps_per_frame == 0 and speech.n_made < speech.n_frames:
                speech.n_made += 1
                self._vocoder.feed(speech.decoding, 1)

    def finished(self, req: Request) -> None:
        if self._family.n_ahead:
            self._vocoder.feed(req.owner.decoding, self._family.n_ahead)
        self._vocoder.end(req.owner.decoding)

    def _decoded(self, speech: Speech, n_frames: int) -> None:
        speech.n_decoded += n_frames
        n_new = speech.n_decoded - self._family.n_ahead - speech.n_sounded
        if n_new > 0:
            speech.n_sounded += n_new
            self.events.after(_HOST.to_client_s, partial(self._hear, speech, n_new))

    def _hear(self, speech: Speech, n_frames: int) -> None:
        now_s, frame_s = self.events.now_s(), self._family.frame_s
        speech.hear(now_s, n_frames * frame_s)
        rounds = self._engine.rounds
        if rounds is not None and not speech.request.is_finished:
            heard_s = speech.heard_s(now_s, frame_s)
            news = HeardOfMany.of([speech.rid], heard_s=[heard_s], advancing=[True], speed=[1.0])
            self.events.after(
                _HOST.report_s, lambda: self._engine.post(lambda: rounds.progress(news))
            )


def speeches(family: Family, rate: float, seed: int, for_s: float) -> list[Speech]:
    rng = random.Random(seed)
    found: list[Speech] = []
    at_s = rng.expovariate(rate)
    while at_s < for_s:
        mean = math.log(MEAN_S) - SPREAD**2 / 2
        length_s = min(MOST_S, max(LEAST_S, rng.lognormvariate(mean, SPREAD)))
        n_frames = math.ceil(length_s / family.frame_s)
        found.append(Speech(len(found), at_s, n_frames, round(_WORDS_PER_S * length_s)))
        at_s += rng.expovariate(rate)
    return found


def simulate(
    name: str, arm: str, rate: float, seeds: range = range(3), for_s: float = FOR_S
) -> Row:
    family, heard, most = FAMILIES[name], [], 0
    for seed in seeds:
        server = Server(family, arm)
        of_run = speeches(family, rate, seed, for_s)
        for speech in of_run:
            server.events.at(speech.came_s, partial(server.take, speech))
        server.events.run()
        assert all(one.n_sounded == one.n_frames for one in of_run), "all is said"
        heard += of_run
        most = max(most, server.most_running)
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
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="of the families: " + ", ".join(FAMILIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    for name in FAMILIES:
        for arm in ARMS if name.startswith(args.only) else ():
            for rate in RATES:
                rows.append(row := simulate(name, arm, rate))
                print(
                    f"{name:10} {arm:4} {rate:5.1f} requests/s: first audio P50 "
                    f"{row.first_audio_p50_ms:8.1f}, P90 {row.first_audio_p90_ms:8.1f}, P99 "
                    f"{row.first_audio_p99_ms:8.1f} ms, {100 * row.in_time:6.2f} % of chunks in "
                    f"time, {100 * row.smooth:6.2f} % smooth, {row.most_running} at once",
                    flush=True,
                )
                if row.in_time < 0.5:
                    break  # more is worse
            mine = [r for r in rows if (r.family, r.arm) == (name, arm) and r.is_within]
            most = max((r.rate for r in mine), default=0.0)
            print(f"{name} {arm}: within the limits up to {most:g} requests/s", flush=True)
    if args.json:
        models = {name: one.model.facts() for name, one in FAMILIES.items()}
        document = {"benchmark": "speaking", **facts(), "device_models": models}
        document["rows"] = [asdict(row) for row in rows]
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
