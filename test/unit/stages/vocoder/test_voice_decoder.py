"""The vocoder engine over a decoder with voices, whose chunks have a rule."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_live.clock import SimClock
from sglang_live.errors import BadInputError
from sglang_live.messages import SoundPlace, VocoderRequest
from sglang_live.models.codecs import END_CODE
from sglang_live.policy.chunks import ChunkRule
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.vocoder import stage as vocoder_stage
from sglang_live.stages.vocoder.batcher import UnknownJobError, VocoderChunk, VocoderEngine
from sglang_live.stages.vocoder.config import VocoderConfig
from sglang_live.stages.vocoder.decoders import VoiceDecoder
from test.unit.stages.vocoder.test_batcher import drain
from test.unit.stages.vocoder.test_stage import Job

SAMPLES_PER_FRAME = 960  # 40 ms
AHEAD = 3
PROMPTS = {"low": 5, "high": 200}
RULES = {
    "low": ChunkRule(first=10 + AHEAD, second=8, growth=2, most=20),
    "high": ChunkRule(first=6 + AHEAD, second=8, growth=2, most=20),
}


@dataclass(eq=False)
class Stream:
    voice: str
    rule: ChunkRule
    n_frames: int
    codes: list[int]
    n_sounded: int = 0


class SummingDecoder:
    """Every frame becomes 40 ms of the sum of all codes of the stream up to it, in units of
    1/32767, AHEAD frames late; the voice "high" sounds 1000 higher.
    """

    n_quantizers = n_tail_frames = 1
    voices = tuple(PROMPTS)

    @classmethod
    def from_pretrained(cls, path, device, dtype) -> "SummingDecoder":
        return cls()

    def __init__(self):
        self.batches: list[list[int]] = []  # frames of every stream of every call

    def new_stream(self, voice: str, speaker: np.ndarray | None = None) -> Stream:
        """speaker: [1], 0 or 1: whether the voice is high."""
        if speaker is not None:
            [is_high] = speaker
            voice = "high" if is_high else "low"
        if voice not in PROMPTS:
            raise BadInputError(f"there is no voice {voice!r}")
        return Stream(voice, RULES[voice], PROMPTS[voice], [])

    def check_codes(self, codes: Tensor) -> None:
        if codes.numel() and int(codes.max()) >= 100:
            raise BadInputError("codes must lie in the codebook")

    def decode(self, streams: list[Stream], codes: list[Tensor]) -> list[Tensor]:
        self.batches.append([len(chunk) for chunk in codes])
        return [self._decode(*pair) for pair in zip(streams, codes, strict=True)]

    def _decode(self, stream: Stream, codes: Tensor) -> Tensor:
        is_end = int(codes[-1]) == END_CODE
        stream.codes += codes[:, 0].tolist()[: len(codes) - is_end]
        stream.n_frames += len(codes) - is_end
        end = len(stream.codes) - (0 if is_end else AHEAD)
        wave = sound(stream.voice, stream.codes)[stream.n_sounded : end]
        stream.n_sounded = end
        return torch.tensor(wave).repeat_interleave(SAMPLES_PER_FRAME) / 32767


def sound(voice: str, codes: list[int]) -> list[int]:
    return [1000 * (voice == "high") + sum(codes[: i + 1]) for i in range(len(codes))]


def expected_pcm(voice: str, codes: Tensor) -> bytes:
    samples = torch.tensor(sound(voice, codes[:, 0].tolist()), dtype=torch.int64)
    return samples.repeat_interleave(SAMPLES_PER_FRAME).numpy().astype("<i2").tobytes()


def frames(n_frames: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 9, (n_frames, 1), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def decoder() -> SummingDecoder:
    return SummingDecoder()


@pytest.fixture
def engine(decoder) -> VocoderEngine:
    return VocoderEngine(decoder, VocoderConfig(max_batch=4), SimClock())


def test_it_is_a_voice_decoder(decoder):
    assert isinstance(decoder, VoiceDecoder)


@pytest.mark.parametrize(
    ("n_frames", "sizes"),
    [
        (1, [2]),
        (12, [13]),
        (13, [13, 1]),
        (20, [13, 8]),
        (21, [13, 8, 1]),
        (70, [13, 8, 16, 20, 14]),
    ],
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_chunks_follow_the_rule_however_the_frames_come(n_frames, sizes, data):
    decoder, clock = SummingDecoder(), SimClock()
    engine = VocoderEngine(decoder, VocoderConfig(), clock)
    flex = data.draw(st.booleans())
    engine.open("a", voice="low", flex=flex)
    codes, rest, chunks = frames(n_frames), frames(n_frames), []
    while len(rest):
        n = data.draw(st.integers(1, len(rest)))
        engine.feed("a", rest[:n])
        rest = rest[n:]
        clock.advance(data.draw(st.floats(0, 2)))
        if data.draw(st.booleans()):
            chunks += drain(engine)
    engine.finish("a")
    chunks += drain(engine)
    # With the frame of the end.
    assert [chunk.n_frames for chunk in chunks] == sizes
    assert [chunk.is_last for chunk in chunks] == [False] * (len(sizes) - 1) + [True]
    assert b"".join(chunk.pcm for chunk in chunks) == expected_pcm("low", codes)


def test_a_job_without_frames_is_not_decoded(engine, decoder):
    engine.open("a", voice="low")
    engine.finish("a")
    assert drain(engine) == [VocoderChunk("a", b"", 0, True, SoundPlace())]
    assert decoder.batches == []


def test_utterances_of_a_job_have_its_voice_and_begin_their_rule_anew(engine, decoder):
    engine.open("a", voice="high")
    said = [frames(n, seed=n) for n in (9, 30)]
    for codes in said:
        engine.feed("a", codes)
        engine.end_utterance("a")
    engine.finish("a")
    pcm = b"".join(chunk.pcm for chunk in drain(engine))
    assert pcm == b"".join(expected_pcm("high", codes) for codes in said)
    assert decoder.batches == [[9], [1], [9], [8], [14]]


def test_streams_share_a_batch_unless_one_is_more_than_twice_as_long(engine, decoder):
    engine.open("first", voice="low")
    engine.feed("first", frames(13))
    drain(engine)
    decoder.batches.clear()
    said = {"first": ("low", frames(8)), "other": ("low", frames(13)), "long": ("high", frames(9))}
    for job_id, (voice, codes) in said.items():
        if job_id != "first":
            engine.open(job_id, voice=voice)
        engine.feed(job_id, codes)
    assert {chunk.job_id for chunk in drain(engine)} == {*said}
    # Behind prompts of 5 and 200 frames.
    assert sorted(map(sorted, decoder.batches)) == [[8, 13], [9]]


def test_the_second_half_of_a_response_sounds_alike_from_another_vocoder(decoder):
    codes = [frames(40, seed=1), frames(50, seed=2)]
    whole = b"".join(expected_pcm("low", each) for each in codes)
    heard, places = b"", []
    for sent in [None, *(SoundPlace(0, n) for n in (13, 21, 41)), SoundPlace(1, 13)]:
        engine = VocoderEngine(decoder, VocoderConfig(), SimClock())
        engine.open("a", voice="low", sent=sent)
        for each in codes[0 if sent is None else sent.utterance :]:
            engine.feed("a", each)
            engine.end_utterance("a")
        engine.finish("a")
        chunks = drain(engine)
        if sent is None:
            at = 0
            for chunk in chunks:
                at += len(chunk.pcm)
                places.append((chunk.place, at))
            assert at == len(whole)
        heard = b"".join(chunk.pcm for chunk in chunks)
        assert heard == whole[dict(places).get(sent, 0) :]


def test_what_cannot_be_opened_is_refused(decoder):
    engine = VocoderEngine(decoder, VocoderConfig(max_buffered_frames=19), SimClock())
    with pytest.raises(BadInputError, match="no voice 'middle'"):
        engine.open("a", voice="middle")
    with pytest.raises(BadInputError, match="max-buffered-frames 19 cannot hold a chunk"):
        engine.open("a", voice="low")
    with pytest.raises(UnknownJobError):
        engine.feed("a", frames(1))


def test_it_is_warmed_up_by_its_rule(engine, decoder):
    engine.warm_up()
    assert decoder.batches == [[13], [8]]


class FakeFamily:
    decoder = f"{__name__}:SummingDecoder"


FAMILY = FakeFamily()


def stage_of(**engine_args: int | str) -> vocoder_stage.VocoderStage:
    names = ("model_path", "cache_dir", "address", "run_dir", "served_name")
    spec = StageSpec(
        stage="vocoder",
        replica=0,
        family=__name__,
        same_host=True,
        engine_args=engine_args,
        **dict.fromkeys(names, ""),
    )
    return vocoder_stage.VocoderStage(spec)


def test_sizes_of_chunks_that_would_have_no_effect_are_refused():
    with pytest.raises(BadInputError, match=r"--vocoder\.chunk-frames, --vocoder\.first-chunk"):
        stage_of(max_streams=2, first_chunk_frames=1, chunk_frames=8)


class FlowDecoder(SummingDecoder):
    has_flow = True
    dtypes: ClassVar[list[torch.dtype | None]] = []

    @classmethod
    def from_pretrained(cls, path, device, dtype, flow_dtype=None) -> "FlowDecoder":
        cls.dtypes.append(flow_dtype)
        return cls()


def test_a_flow_computes_in_the_precision_of_the_flag(monkeypatch):
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(vocoder_stage, "part", lambda name: FlowDecoder)
    monkeypatch.setattr(FlowDecoder, "dtypes", [])
    for precision in ("float32", "bfloat16", "float16"):
        stage_of(max_streams=2, precision=precision)
    with pytest.raises(BadInputError, match=r"--vocoder\.precision tf32: a CPU has none"):
        stage_of(max_streams=2, precision="tf32")
    assert not matmul.allow_tf32
    monkeypatch.setattr(vocoder_stage.cpu, "is_active", lambda: False)
    try:
        stage_of(max_streams=2, precision="tf32", disable_cuda_graph=True)
        assert matmul.allow_tf32
    finally:
        matmul.allow_tf32 = False
    assert FlowDecoder.dtypes == [None, torch.bfloat16, torch.float16, None]


def test_a_precision_that_would_have_no_effect_is_refused():
    with pytest.raises(BadInputError, match="this model's decoder has no flow"):
        stage_of(max_streams=2, precision="bfloat16")


def test_every_number_of_streams_is_warmed_up_where_there_are_graphs():
    for most, sizes in ((1, [1]), (3, [1, 2, 3])):
        decoder = SummingDecoder()
        VocoderEngine(decoder, VocoderConfig()).warm_up(most)
        first, second = (RULES["low"].frames(n) for n in range(2))
        assert decoder.batches == [[n] * size for size in sizes for n in (first, second)]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_decoder_without_graphs_takes_no_turns_on_a_gpu(monkeypatch, on_cpu):
    turn = object()
    monkeypatch.setattr(vocoder_stage.DeviceTurn, "from_env", lambda: turn)
    monkeypatch.setattr(vocoder_stage.cpu, "is_active", lambda: on_cpu)
    monkeypatch.setattr(SummingDecoder, "use_graphs", lambda self, n: None, raising=False)
    assert stage_of(max_streams=2)._turn is (turn if on_cpu else None)


async def test_the_stage_decodes_in_the_voice_of_the_request():
    stage = stage_of(max_streams=2)
    await stage.start()
    try:
        for voice in PROMPTS:
            job = Job()
            job.opener = VocoderRequest("j", 60.0, voice=voice)
            job.put(*((code,) for code in frames(30)[:, 0].tolist()), is_last=True)
            await stage.run(job)
            assert np.array(job.samples(), "<i2").tobytes() == expected_pcm(voice, frames(30))
        job = Job()
        brought = np.ones(1, "<f4").tobytes()
        job.opener = VocoderRequest("j", 60.0, voice="voice_1", speaker=brought)
        # An utterance behind the first one has the voice, too.
        job.put((3,), (END_CODE,), (3,), is_last=True)
        await stage.run(job)
        assert job.samples() == [1003] * 2 * SAMPLES_PER_FRAME
        job = Job()
        job.opener = VocoderRequest("j", 60.0, voice="middle")
        with pytest.raises(BadInputError, match="no voice 'middle'"):
            await stage.run(job)
    finally:
        stage._stepping.cancel()
        stage._worker.shutdown()
