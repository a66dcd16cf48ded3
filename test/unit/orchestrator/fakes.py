"""Three stages without engines, served over real sockets in the test's own event loop.

The thinker's reply is a script of ids; token id n is spoken as one codec frame that holds n, and
that frame sounds as one sample of value n: whatever is lost, doubled or swapped can be heard.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np

from sglang_live.capacity.control import CapacityConfig, CapacityControl
from sglang_live.clock import SimClock
from sglang_live.core import FRAME_S, OUTPUT_RATE_HZ, AudioPart, HistoryItem, TextPart, TurnRequest
from sglang_live.errors import CapacityError, ItemsMissingError
from sglang_live.messages import (
    CodecFrames,
    FunctionCallProgress,
    Heard,
    Interrupt,
    MeasurePrompt,
    NativeRetained,
    Pcm,
    Picture,
    Promote,
    PromptMeasured,
    Ready,
    RetainNative,
    ScriptRequest,
    SegmentsNeeded,
    SessionHint,
    SoundPlace,
    TalkerDone,
    TalkerInput,
    TalkerRequest,
    TalkerSegments,
    TextTokens,
    ThinkerDone,
    ThinkerRequest,
    UserSegment,
    VocoderDone,
    VocoderEnd,
    VocoderFrames,
    VocoderText,
    WireAudio,
    WireImage,
    WireSegment,
)
from sglang_live.orchestrator.sessions import Orchestrator
from sglang_live.policy.policies import Policies
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Replica
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import StageClient
from sglang_live.stages.transport.server import ServedJob, StageServer

FIRST_CODE = 100
N_STATES = 4  # audio states the thinker reports per clip


class FakeStage:
    """
    openers: of all jobs that began. cancelled: ids of those that were cut short.
    items: what it remembers, by session and key.
    fails_at, holds_at: before which token, frame or chunk it fails, or waits for `release`.
    held: it waits there.
    progress: what it was told about its consumer.
    hints: what it was told about sessions.
    """

    name = ""

    def __init__(self):
        self.openers: list = []
        self.cancelled: list[str] = []
        self.closed_sessions: list[str] = []
        self.items: dict[str, dict[str, object]] = {}
        self.fails_at: int | None = None
        self.holds_at: int | None = None
        self.held = False
        self._released = asyncio.Event()
        self.progress: list[Heard] = []
        self.hints: list[SessionHint] = []

    async def run(self, job: ServedJob) -> None:
        self.openers.append(job.opener)
        try:
            await self.serve(job)
        except asyncio.CancelledError:
            self.cancelled.append(job.job_id)
            raise

    async def serve(self, job: ServedJob) -> None:
        raise NotImplementedError

    async def close_session(self, session_id: str) -> None:
        self.closed_sessions.append(session_id)
        self.items.pop(session_id, None)

    def release(self) -> None:
        self._released.set()

    async def step(self, n: int) -> None:
        """Before the n-th token, frame or chunk."""
        if n == self.fails_at:
            raise CapacityError(f"{self.name} is full")
        if n == self.holds_at:
            self.held = True
            await self._released.wait()

    def remember(self, session_id: str, new: dict, keys: list[str]) -> dict:
        """Items of a session after a request; like the real stages, what `keys` lacks goes."""
        known = self.items.get(session_id, {}) | new
        if missing := [key for key in keys if key not in known]:
            raise ItemsMissingError(f"{missing} unknown")
        kept = {key: known[key] for key in keys}
        if session_id:
            self.items[session_id] = kept
        return kept


class FakeThinker(FakeStage):
    """
    busy: a turn prefill lasts until it is interrupted.
    calls: its reply begins with a function call.
    speaks: its tokens from FIRST_CODE on are codes, each of a frame.
    """

    name = "thinker"
    busy = calls = speaks = False
    code_s = FRAME_S

    def __init__(self, reply: list[int]):
        super().__init__()
        self.reply, self.finish = reply, "stop"
        self.n_ended = self.n_promoted = 0

    async def serve(self, job: ServedJob) -> None:
        if isinstance(job.opener, RetainNative):
            await self.step(0)
            return await job.send(NativeRetained(job.job_id))
        if isinstance(job.opener, MeasurePrompt):
            await self.step(0)
            texts = (job.opener.instructions, *job.opener.functions), job.opener.texts
            n_header, n_items = (sum(map(len, part)) for part in texts)
            n_audio = sum(int(clip_s) for clip_s in job.opener.clips_s)
            return await job.send(
                PromptMeasured(job.job_id, n_header, n_items + n_audio, 750, 1000)
            )
        if isinstance(job.opener, ScriptRequest):
            return await self._recite(job, job.opener)
        request: ThinkerRequest = job.opener
        clips = {
            item.key: [wire.take(p.pcm, job.frames) for p in item.parts if isinstance(p, WireAudio)]
            for item in request.items
        }
        self.remember(request.session_id, {item.key: item for item in request.items}, request.keys)
        for item in request.items:
            if item.role == "user":
                n_pictures = sum(isinstance(part, WireImage) for part in item.parts)
                await self._report(job, item.key, len(clips[item.key]), n_pictures)
        said, finish = await (self._ahead(job) if request.prefill_only else self._reply(job))
        if request.session_id and not request.prefill_only:
            self.items[request.session_id][request.item_key] = "reply"
        await job.send(
            ThinkerDone(
                job.job_id,
                finish=finish,
                ids=said,
                text=self._text(said),
                n_prompt=20,
                n_audio=N_STATES * sum(len(c) for c in clips.values()),
                n_image=N_STATES
                * sum(isinstance(part, WireImage) for item in request.items for part in item.parts),
                n_cached=7,
                rebuilt=False,
            )
        )

    async def _recite(self, job: ServedJob, script: ScriptRequest) -> None:
        text = script.text
        ids = [int(word) for word in text.split()]
        await self.step(0)
        await self._report(job, script.key, 0)
        await job.send(TextTokens(job.job_id, ids, text))
        await self.step(1)
        await job.send(ThinkerDone(job.job_id, "stop", ids, text, 0, 0, 0, False))

    async def _ahead(self, job: ServedJob) -> tuple[list[int], str]:
        await self.step(0)
        if self.busy:
            async for message in job.inputs():
                if isinstance(message, Promote):
                    self.n_promoted += 1
                    break
        return [], "interrupted"

    async def _reply(self, job: ServedJob) -> tuple[list[int], str]:
        """Its tokens, all of them unless it is ended, and why it finished."""
        ended, said = asyncio.Event(), list(job.opener.continues)
        assert job.opener.said == self._text(said)

        async def say() -> None:
            if self.calls:
                await job.send(FunctionCallProgress(job.job_id))
            for n, token in enumerate(self.reply):
                if n < len(job.opener.continues):
                    assert token == said[n]
                    continue
                await self.step(n)
                said.append(token)
                begin = len(said) - 1 if n > len(job.opener.continues) else 0
                text = "" if self._is_code(token) else f" {token}"
                speech = self._frames(said, begin)
                await job.send(TextTokens(job.job_id, [token], text, *speech))
            await self.step(len(self.reply))

        coroutines = (say(), ended.wait(), self._listen(job, ended))
        tasks = saying, ending, _ = [asyncio.create_task(c) for c in coroutines]
        try:
            await asyncio.wait({saying, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not saying.done():
                return said, "interrupted"
            saying.result()
            return said, self.finish
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_code(self, token: int) -> bool:
        return self.speaks and token >= FIRST_CODE

    def _text(self, said: list[int]) -> str:
        return "".join(f" {token}" for token in said if not self._is_code(token))

    def _frames(self, said: list[int], begin: int) -> tuple[bytes, list[tuple[int, float]]]:
        """Codes and marks of the tokens from `begin` on."""
        codes = [(n + 1, token) for n, token in enumerate(said) if self._is_code(token)]
        marks = [(n, self.code_s * (i + 1)) for i, (n, _) in enumerate(codes) if n > begin]
        new = [token for n, token in codes if n > begin]
        return np.array(new, "<i2").tobytes(), marks

    async def _listen(self, job: ServedJob, ended: asyncio.Event) -> None:
        async for message in job.inputs():
            if isinstance(message, Heard):
                self.progress.append(message)
            elif isinstance(message, Interrupt):
                self.n_ended += 1
                ended.set()

    async def _report(self, job: ServedJob, key: str, n_clips: int, n_pictures: int = 0) -> None:
        tensors, n = job.tensors(), n_clips + n_pictures
        ref = tensors.put(np.full((N_STATES * n, 2), 0.5, np.float32)) if n else None
        pictures = [Picture(1, 1, N_STATES)] * n_pictures
        segment = WireSegment(key, [1, 2, 3], ref, pictures)
        await job.send(UserSegment(job.job_id, segment), tensors)


class FakeTalker(FakeStage):
    """
    needed: keys that it requested again.
    frame_s: of its codec; of a talker that reads text, a frame holds the text that it has.
    """

    name = "talker"

    def __init__(self):
        super().__init__()
        self.frame_s = FRAME_S
        self.needed: list[list[str]] = []

    async def serve(self, job: ServedJob) -> None:
        request: TalkerRequest = job.opener
        segments = self._taken(job, request.segments)
        inputs, early = job.inputs(), []
        known = self.items.get(request.session_id, {}) | segments
        if missing := [key for key in request.segment_keys if key not in known]:
            self.needed.append(missing)
            await job.send(SegmentsNeeded(job.job_id, missing))
            while not isinstance(message := await anext(inputs), TalkerSegments):
                early.append(message)
            segments |= self._taken(job, message.segments)
        self.remember(request.session_id, segments, request.segment_keys)
        n = n_tokens = 0
        ids = [] if request.first_id is None else [request.first_id]
        while True:
            for token in ids:
                n += 1
                if n <= request.n_frames:
                    known = np.frombuffer(request.codes, "<i2")
                    assert known[n - 1] == token, "made of the same text"
                    continue
                await self.step(n - 1)
                codes = np.array([token], "<i2").tobytes()
                marks = [(n_tokens, n * self.frame_s)] if n_tokens else []
                await job.send(CodecFrames(job.job_id, codes, 1, marks, self.frame_s))
            message: TalkerInput | Heard = early.pop(0) if early else await anext(inputs)
            if isinstance(message, Heard):
                self.progress.append(message)
                ids = []
                continue
            ids = message.ids or [int(word) for word in message.text.split()]
            n_tokens = message.n_tokens
            if message.done:
                break
        await self.step(n)
        await job.send(TalkerDone(job.job_id, "stop", n, n_read=n))

    @staticmethod
    def _taken(job: ServedJob, segments: list[WireSegment]) -> dict:
        return {s.key: s.states and wire.take(s.states, job.frames) for s in segments}


class FakeVocoder(FakeStage):
    name = "vocoder"

    async def serve(self, job: ServedJob) -> None:
        n, n_sent = 0, _n_sent(job)
        async for message in job.inputs():
            if isinstance(message, VocoderFrames):
                n += 1
                if n > n_sent:
                    await self.step(n - 1)
                    place = SoundPlace(n_done=n)
                    await job.send(Pcm(job.job_id, message.codes, place=place))
            elif isinstance(message, VocoderEnd):
                await self.step(n)
                return await job.send(VocoderDone(job.job_id))


def _n_sent(job: ServedJob) -> int:
    """Frames or texts whose sound another vocoder has sent."""
    return 0 if job.opener.sent is None else job.opener.sent.n_done


class FakeReader(FakeStage):
    """A vocoder that reads text: a sample per character, and the tokens up to each text's end.

    texts: that it was given.
    """

    name = "vocoder"

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    async def serve(self, job: ServedJob) -> None:
        n = n_samples = 0
        n_sent = _n_sent(job)
        async for message in job.inputs():
            if isinstance(message, VocoderText):
                n += 1
                n_samples += len(message.text)
                if n > n_sent:
                    await self.step(n - 1)
                    self.texts.append(message.text)
                    pcm = np.full(len(message.text), message.n_tokens, "<i2").tobytes()
                    spoken = [(message.n_tokens, n_samples / OUTPUT_RATE_HZ)]
                    await job.send(Pcm(job.job_id, pcm, spoken, SoundPlace(n_done=n)))
            elif isinstance(message, VocoderEnd):
                await self.step(n)
                return await job.send(VocoderDone(job.job_id))


class FakeReplica:
    """A stage behind a socket, as the supervisor would have started it."""

    def __init__(self, stage: FakeStage, run_dir: Path, number: int = 0):
        self.stage = stage
        self._address = f"ipc://{run_dir}/{stage.name}-{number}"
        self.entry = Replica(
            StageSpec(
                stage=stage.name,
                replica=number,
                model_path="",
                family="",
                cache_dir="",
                address="",
                same_host=True,
                run_dir=str(run_dir),
                served_name="fake",
                native_key="k" if (stage.name, number) == ("thinker", 0) else "",
            )
        )
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        # Another address each time: a closing socket may remove the file of the next one.
        address = f"{self._address}-{self.entry.n_starts}"
        self.entry.spec = msgspec.structs.replace(self.entry.spec, address=address)
        spec = self.entry.spec
        self.server = StageServer(
            spec.address,
            same_host=True,
            interrupts=True,
            run=self.stage.run,
            close_session=self.stage.close_session,
            ready=lambda: Ready("", stage=spec.stage, pid=1, startup_s=0.0),
            on_hint=self.stage.hints.append,
        )
        self._serving = asyncio.create_task(self.server.serve())
        self.entry.client = StageClient(spec.name, spec.address, same_host=True)
        self.entry.ready = await self.entry.client.ping(5.0)
        self.entry.n_starts += 1

    async def stop(self) -> None:
        """As when its process ends: jobs fail, and all it knew is gone."""
        self.entry.ready = None
        self.entry.client.fail_all("process ended")
        await self.entry.client.close()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self.stage.items.clear()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


class FakeWorld:
    """An orchestrator over fake stages. `thinkers`, `talkers`, `vocoders`: one per replica."""

    def __init__(
        self,
        run_dir: Path,
        reply: list[int],
        n_replicas: int,
        max_sessions: int,
        policies: Policies,
        has_talker: bool = True,
        has_thinker: bool = True,
        talker_reads_text: bool = False,
        own_voice: bool = False,
    ):
        self.thinkers = [FakeThinker(reply) for _ in range(n_replicas)] if has_thinker else []
        has_talker = has_talker and not own_voice
        self.talkers = [FakeTalker() for _ in range(n_replicas)] if has_talker else []
        for thinker in self.thinkers:
            thinker.speaks = own_voice
        vocoder = FakeVocoder if has_talker or own_voice else FakeReader
        self.vocoders = [vocoder() for _ in range(n_replicas)]
        self.processes = [
            FakeReplica(stage, run_dir, number)
            for stages in (self.thinkers, self.talkers, self.vocoders)
            for number, stage in enumerate(stages)
        ]
        self.replicas = [process.entry for process in self.processes]
        self.clock = SimClock()
        self.orchestrator = Orchestrator(
            self,
            model_name="fake",
            voices=("ethan",),
            capacity=CapacityControl(
                CapacityConfig(max_sessions=max_sessions, adapts=policies.admission),
                self.clock,
                lambda: self.orchestrator.pools(),
            ),
            policies=policies,
            clock=self.clock,
            talker_reads_text=talker_reads_text,
            own_voice=own_voice,
        )

    @property
    def thinker(self) -> FakeThinker:
        return self.thinkers[0]

    @property
    def talker(self) -> FakeTalker:
        return self.talkers[0]

    @property
    def vocoder(self) -> FakeVocoder:
        return self.vocoders[0]

    @property
    def stages(self) -> list[FakeStage]:
        return [self.thinker, self.talker, self.vocoder]

    def process(self, stage: FakeStage) -> FakeReplica:
        return next(p for p in self.processes if p.stage is stage)

    async def start(self) -> None:
        for process in self.processes:
            await process.start()

    async def stop(self) -> None:
        for process in self.processes:
            if process.entry.is_up:
                await process.stop()

    async def settled(self) -> None:
        """Every stage has seen what was sent to it so far, and acted on it."""
        for _ in range(2):
            for replica in self.replicas:
                if replica.is_up:
                    await replica.client.ping(5.0)

    def n_jobs(self) -> int:
        """That any stage or any client of one still holds."""
        running = [process for process in self.processes if process.entry.is_up]
        return sum(p.server.n_jobs + p.entry.client.n_jobs for p in running)


def user(key: str, *contents: str | int, token_ids=None) -> HistoryItem:
    """A user message of texts and of clips, the latter given by their length in samples."""
    parts = tuple(
        TextPart(content)
        if isinstance(content, str)
        else AudioPart(np.arange(content, dtype=np.int16))
        for content in contents
    )
    return HistoryItem(key=key, role="user", parts=parts, token_ids=token_ids)


def ask(turn_id: str, *history: HistoryItem, **changes) -> TurnRequest:
    given = {"instructions": "Be brief.", "voice": "ethan", **changes}
    return TurnRequest(turn_id=turn_id, history=history, **given)
