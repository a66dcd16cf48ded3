"""A stage process without an engine, for hosts of a real cluster:

    python fake_stages.py FOLDER

Its words follow from all that it is asked, the codes from the words, and the sound from the codes:
what is lost, doubled or changed on the way can be heard. In FOLDER it leaves the pid of the process
that began the latest job of each stage, and `call` when it is in a function call.
"""

import asyncio
import os
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import setproctitle

from sglang_live.errors import ItemsMissingError
from sglang_live.messages import (
    PROMPT_TOKENS_MOST,
    CodecFrames,
    FunctionCallProgress,
    Heard,
    Interrupt,
    Pcm,
    Ready,
    SegmentsNeeded,
    SoundPlace,
    TalkerDone,
    TalkerRequest,
    TalkerSegments,
    TextTokens,
    ThinkerDone,
    ThinkerRequest,
    UserSegment,
    VocoderDone,
    VocoderEnd,
    VocoderFrames,
    WireAudio,
    WireItem,
    WireSegment,
)
from sglang_live.stages.endings import die_with_parent
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.protocol import protocol_hash
from sglang_live.stages.transport.server import ServedJob, StageServer

N_WORDS = 30
STEP_S = 0.03  # of a word, a frame, a piece of sound
CALL_S = 0.6
FRAME_SAMPLES = 1920
CALL = '{"name": "look", "arguments": {"at": "it"}}'


class FakeStage:
    """sessions: what is known of each, by key. folder: see above."""

    def __init__(self, folder: Path):
        self.sessions: dict[str, dict[str, object]] = {}
        self._folder = folder
        self.server: StageServer

    async def run(self, job: ServedJob) -> None:
        name = type(self).__name__.removeprefix("Fake").lower()
        new = self._folder / f"{name}.{os.getpid()}"
        new.write_text(str(os.getpid()))
        new.rename(self._folder / name)
        await self.serve(job)

    async def serve(self, job: ServedJob) -> None:
        raise NotImplementedError

    async def close_session(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    def remember(self, session_id: str, new: dict, keys: list[str]) -> dict:
        known = self.sessions.get(session_id, {}) | new
        if missing := [key for key in keys if key not in known]:
            raise ItemsMissingError(f"{missing} unknown")
        kept = {key: known[key] for key in keys}
        if session_id:
            self.sessions[session_id] = kept
        return kept

    def load(self) -> dict[str, float]:
        return {
            "sessions": float(len(self.sessions)),
            "jobs": float(self.server.n_jobs),
            PROMPT_TOKENS_MOST: 1e6,
        }


class FakeThinker(FakeStage):
    async def serve(self, job: ServedJob) -> None:
        request = job.opener
        assert isinstance(request, ThinkerRequest)
        new = {item.key: self._content(item, job.frames) for item in request.items}
        history = self.remember(request.session_id, new, request.keys)
        for item in request.items:
            if item.role == "user":
                await job.send(UserSegment(job.job_id, WireSegment(item.key, [1])))
        seed = zlib.crc32(repr([request.instructions, *history.values()]).encode())
        words = [(seed + 7919 * n) % 20_000 for n in range(N_WORDS)]
        said, ended = list(request.continues), asyncio.Event()
        listening = asyncio.create_task(self._listen(job, ended))
        calls: list[str] = []
        try:
            if request.functions and request.keys and "look" in repr(history[request.keys[-1]]):
                await job.send(FunctionCallProgress(job.job_id))
                await asyncio.sleep(CALL_S / 2)  # it has come
                (self._folder / "call").touch()
                await asyncio.sleep(CALL_S)
                calls = [CALL]
                words = []
            if request.prefill_only:
                words = []
            while len(said) < len(words) and not ended.is_set():
                await asyncio.sleep(STEP_S)
                said.append(words[len(said)])
                await job.send(TextTokens(job.job_id, said[-1:], f" {said[-1]}"))
        finally:
            listening.cancel()
        if request.session_id:
            self.sessions[request.session_id][request.item_key] = tuple(said)
        finish = "interrupted" if ended.is_set() else "stop"
        text = "".join(f" {word}" for word in said)
        await job.send(
            ThinkerDone(job.job_id, finish, said, text, 20, 0, 0, False, function_calls=calls)
        )

    @staticmethod
    def _content(item: WireItem, frames: list[bytes]) -> object:
        if item.token_ids is not None:
            return tuple(item.token_ids)
        return tuple(
            zlib.crc32(wire.take(part.pcm, frames).tobytes())
            if isinstance(part, WireAudio)
            else part.text
            for part in item.parts
        )

    @staticmethod
    async def _listen(job: ServedJob, ended: asyncio.Event) -> None:
        async for message in job.inputs():
            if isinstance(message, Interrupt):
                ended.set()


class FakeTalker(FakeStage):
    async def serve(self, job: ServedJob) -> None:
        request = job.opener
        assert isinstance(request, TalkerRequest)
        segments = {segment.key: segment.token_ids for segment in request.segments}
        inputs, early = job.inputs(), []
        known = self.sessions.get(request.session_id, {}) | segments
        if missing := [key for key in request.segment_keys if key not in known]:
            await job.send(SegmentsNeeded(job.job_id, missing))
            while not isinstance(message := await anext(inputs), TalkerSegments):
                early.append(message)
            segments |= {segment.key: segment.token_ids for segment in message.segments}
        self.remember(request.session_id, segments, request.segment_keys)
        n = 0
        async for word in self._words(request, inputs, early):
            n += 1
            if n > request.n_frames:
                await asyncio.sleep(STEP_S)
                codes = np.array([word], "<i2").tobytes()
                await job.send(CodecFrames(job.job_id, codes, 1, [(n, n * 0.08)]))
        await job.send(TalkerDone(job.job_id, "stop", n, n_read=n))

    @staticmethod
    async def _words(request: TalkerRequest, inputs, early: list) -> AsyncIterator[int]:
        assert request.first_id is not None
        yield request.first_id
        while True:
            message = early.pop(0) if early else await anext(inputs)
            if not isinstance(message, Heard):
                for word in message.ids:
                    yield word
                if message.done:
                    return


class FakeVocoder(FakeStage):
    async def serve(self, job: ServedJob) -> None:
        n, n_sent = 0, job.opener.sent.n_done if job.opener.sent else 0
        async for message in job.inputs():
            if isinstance(message, VocoderFrames):
                for code in np.frombuffer(message.codes, "<i2"):
                    n += 1
                    if n > n_sent:
                        await asyncio.sleep(STEP_S / 4)
                        pcm = (np.arange(FRAME_SAMPLES) * (1 + code % 7) + code).astype("<i2")
                        await job.send(Pcm(job.job_id, pcm.tobytes(), place=SoundPlace(n_done=n)))
            elif isinstance(message, VocoderEnd):
                return await job.send(VocoderDone(job.job_id))


async def serve(spec: StageSpec, folder: Path) -> None:
    kind = {"thinker": FakeThinker, "talker": FakeTalker, "vocoder": FakeVocoder}[spec.stage]
    stage = kind(folder)
    stage.server = StageServer(
        spec.address,
        same_host=spec.same_host,
        key_file=spec.key_file,
        run=stage.run,
        close_session=stage.close_session,
        on_hint=lambda hint: None,
        ready=lambda: Ready(
            "",
            stage=spec.stage,
            pid=os.getpid(),
            startup_s=0.1,
            load=stage.load(),
            protocol=protocol_hash(),
        ),
    )
    await stage.server.serve()


def main() -> None:
    die_with_parent()
    spec, folder = StageSpec.from_env(), Path(sys.argv[1])
    leaked = [name for name in os.environ if name.startswith("RAY_")]
    (folder / "environment").write_text(f"{leaked} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    setproctitle.setproctitle(f"sglang_live::fake {spec.name} {spec.address}")
    asyncio.run(serve(spec, folder))


if __name__ == "__main__":
    main()
