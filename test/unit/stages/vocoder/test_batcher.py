"""Chunk schedule, urgency, batching and bounds of the vocoder engine."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from sglang_live.clock import SimClock
from sglang_live.errors import BadInputError, CapacityError
from sglang_live.messages import SoundPlace
from sglang_live.models.qwen3_omni.code2wav import StreamingCode2Wav
from sglang_live.stages.vocoder.batcher import UnknownJobError, VocoderChunk, VocoderEngine
from sglang_live.stages.vocoder.config import VocoderConfig

SAMPLES_PER_FRAME = 1920  # 80 ms
CODEBOOK_SIZE = 100


class SummingDecoder:
    """Every frame becomes 80 ms of samples: the sum of all codes of the stream so far, in units of
    1/32767, so that a lost, doubled or swapped frame shows in all samples after it.
    """

    n_quantizers, n_tail_frames, n_context_frames = 2, 0, None

    def __init__(self):
        self.batches: list[tuple[int, ...]] = []  # shape of the codes of every call
        self.is_broken = False

    def new_stream(self) -> dict:
        return {"sum": 0}

    def check_codes(self, codes: torch.Tensor) -> None:
        if codes.numel() and int(codes.max()) >= CODEBOOK_SIZE:
            raise BadInputError("codes must lie in the codebook")

    def decode(self, streams: list[dict], codes: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise RuntimeError("out of memory")
        self.batches.append(tuple(codes.shape[:2]))
        sums = codes.sum(2).cumsum(1) + torch.tensor([[stream["sum"]] for stream in streams])
        for stream, row in zip(streams, sums, strict=True):
            stream["sum"] = int(row[-1])
        return sums.repeat_interleave(SAMPLES_PER_FRAME, 1) / 32767.0


def expected_pcm(codes: torch.Tensor) -> bytes:
    sums = codes.sum(1).cumsum(0).repeat_interleave(SAMPLES_PER_FRAME)
    return sums.numpy().astype("<i2").tobytes()


def frames(n_frames: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (n_frames, 2), generator=rng)


def drain(engine: VocoderEngine) -> list[VocoderChunk]:
    chunks = []
    while new := engine.step():
        chunks += new
    return chunks


@pytest.fixture
def decoder() -> SummingDecoder:
    return SummingDecoder()


@pytest.fixture
def engine(decoder) -> VocoderEngine:
    return VocoderEngine(
        decoder, VocoderConfig(max_streams=4, max_batch=3, max_buffered_frames=20), SimClock()
    )


def test_the_first_chunk_is_small_the_next_are_large_and_the_rest_is_flushed(engine):
    engine.open("a")
    engine.feed("a", frames(13))
    engine.finish("a")
    chunks = drain(engine)
    assert [chunk.n_frames for chunk in chunks] == [2, 4, 4, 3]
    assert [chunk.is_last for chunk in chunks] == [False, False, False, True]
    assert b"".join(chunk.pcm for chunk in chunks) == expected_pcm(frames(13))


def test_chunks_are_small_while_the_listener_has_little_left(decoder):
    clock = SimClock()
    engine = VocoderEngine(decoder, VocoderConfig(), clock)
    engine.open("a")
    sizes = []
    for n in range(12):  # a talker that is twice as fast as speech
        engine.feed("a", frames(2, seed=n))
        sizes += [chunk.n_frames for chunk in drain(engine)]
        clock.advance(0.08)
    assert sizes == [2, 2, 2, 2, 4, 4, 4, 4]
    clock.advance(2.0)  # silence
    engine.feed("a", frames(2))
    assert [chunk.n_frames for chunk in drain(engine)] == [2]
    engine.feed("a", frames(9))
    assert [chunk.n_frames for chunk in drain(engine)] == [4, 4]


def test_who_would_fall_silent_first_comes_first(decoder):
    clock = SimClock()
    engine = VocoderEngine(decoder, VocoderConfig(max_batch=1), clock)
    for job_id, n in (("far", 10), ("near", 6)):
        engine.open(job_id)
        engine.feed(job_id, frames(n))
    drain(engine)
    clock.advance(0.4)
    engine.feed("far", frames(4))
    engine.feed("near", frames(4))
    assert [chunk.job_id for chunk in drain(engine)] == ["near", "far"]


def test_nothing_is_ready_before_a_chunk_is_full(engine):
    engine.open("a")
    engine.feed("a", frames(1))
    assert engine.step() == []
    assert engine.step() == []
    engine.feed("a", frames(8))
    assert [chunk.n_frames for chunk in drain(engine)] == [2, 4]
    engine.feed("a", frames(1))
    assert [chunk.n_frames for chunk in drain(engine)] == [4]


def test_a_job_without_frames_ends_in_one_empty_chunk(engine, decoder):
    engine.open("a")
    engine.feed("a", frames(0))
    engine.finish("a")
    assert drain(engine) == [VocoderChunk("a", b"", 0, True, SoundPlace())]
    assert decoder.batches == []


def test_a_finish_after_the_last_frame_was_decoded_ends_in_an_empty_chunk(engine):
    engine.open("a")
    engine.feed("a", frames(2))
    assert [chunk.is_last for chunk in drain(engine)] == [False]
    engine.finish("a")
    engine.finish("a")
    assert drain(engine) == [VocoderChunk("a", b"", 0, True, SoundPlace(n_done=2))]


@pytest.mark.parametrize("decodes_at_once", [False, True])
def test_utterances_of_a_job_are_decoded_apart(engine, decoder, decodes_at_once):
    engine.open("a")
    found = []
    engine.end_utterance("a")  # before any frame: there is none
    for n_frames in (5, 1, 3):
        engine.feed("a", frames(n_frames, seed=n_frames))
        if decodes_at_once:
            found += drain(engine)
        engine.end_utterance("a")
    engine.finish("a")
    found += drain(engine)
    assert [chunk.is_last for chunk in found] == [False] * (len(found) - 1) + [True]
    expected = [expected_pcm(frames(n_frames, seed=n_frames)) for n_frames in (5, 1, 3)]
    assert b"".join(chunk.pcm for chunk in found) == b"".join(expected)
    assert {n_frames for _, n_frames in decoder.batches} <= {1, 2, 3}


def test_first_chunks_come_first(engine):
    engine.open("playing")
    engine.feed("playing", frames(6))
    engine.step()
    engine.open("waiting")
    engine.feed("waiting", frames(2))
    assert [chunk.job_id for chunk in engine.step()] == ["waiting"]
    assert [chunk.job_id for chunk in engine.step()] == ["playing"]


def test_what_is_not_heard_comes_in_large_chunks_behind_the_others(decoder):
    config = VocoderConfig(max_buffered_frames=60, flex_chunk_frames=20)
    engine = VocoderEngine(decoder, config, SimClock())
    engine.open("file", flex=True)
    engine.feed("file", frames(19))
    assert engine.step() == []
    engine.feed("file", frames(26, seed=1))
    engine.open("a")
    engine.feed("a", frames(2))
    engine.finish("file")
    chunks = drain(engine)
    assert [(chunk.job_id, chunk.n_frames) for chunk in chunks] == [
        ("a", 2),
        ("file", 20),
        ("file", 20),
        ("file", 5),
    ]
    whole = torch.cat([frames(19), frames(26, seed=1)])
    assert b"".join(c.pcm for c in chunks if c.job_id == "file") == expected_pcm(whole)


@pytest.mark.parametrize("max_batch", [1, 4])
def test_flex_advances_by_its_share_beside_lasting_speech(decoder, max_batch):
    engine = VocoderEngine(decoder, VocoderConfig(max_batch=max_batch), SimClock())
    engine.open("file", flex=True)
    engine.feed("file", frames(100))
    engine.finish("file")
    for job_id in "ab":
        engine.open(job_id)
    n_decoded, longest = dict.fromkeys(("a", "b", "file"), 0), 0
    while n_decoded["file"] < 40:
        for job_id in "ab":
            engine.feed(job_id, frames(4))
        for chunk in engine.step():
            n_decoded[chunk.job_id] += chunk.n_frames
            longest = max(longest, chunk.n_frames)
    assert longest == 4, "no heard chunk waits for a large one"
    assert n_decoded["a"] + n_decoded["b"] == pytest.approx(16 * 40, rel=0.1)
    # When no one is heard any more, it comes in large chunks again.
    for job_id in "ab":
        engine.cancel(job_id)
    assert [chunk.n_frames for chunk in drain(engine)] == [48, 12]


def test_flex_advances_beside_first_chunks_without_end(decoder):
    engine = VocoderEngine(decoder, VocoderConfig(max_batch=1), SimClock())
    engine.open("file", flex=True)
    engine.feed("file", frames(48))
    for n in range(200):
        engine.open(f"first {n}")
        engine.feed(f"first {n}", frames(2))
        [chunk] = engine.step()
        engine.cancel(f"first {n - 1}")
        if chunk.job_id == "file":
            break
    # Four chunks of 4 frames are owed after 256 heard frames.
    assert n == 128


def test_among_equals_the_oldest_chunk_comes_first(decoder):
    clock = SimClock()
    engine = VocoderEngine(decoder, VocoderConfig(max_batch=1), clock)
    for job_id in "abc":
        engine.open(job_id)
    for job_id in "bca":
        engine.feed(job_id, frames(2))
        clock.advance(0.001)
    assert [chunk.job_id for chunk in drain(engine)] == ["b", "c", "a"]


def test_a_long_backlog_takes_turns_with_the_others(decoder):
    engine = VocoderEngine(decoder, VocoderConfig(max_batch=1), SimClock())
    for job_id, n_frames in (("long", 14), ("short", 6)):
        engine.open(job_id)
        engine.feed(job_id, frames(n_frames))
    order = [chunk.job_id for chunk in drain(engine)]
    assert order == ["long", "short"] * 2 + ["long"] * 2


def test_equal_chunks_share_a_batch_and_unequal_ones_do_not(engine, decoder):
    for job_id, n_frames in (("a", 2), ("b", 2), ("short", 1), ("c", 5)):
        engine.open(job_id)
        engine.feed(job_id, frames(n_frames))
        engine.finish(job_id)
    drain(engine)
    assert decoder.batches == [(3, 2), (1, 1), (1, 3)]


def test_a_batch_has_a_limit(decoder):
    engine = VocoderEngine(decoder, VocoderConfig(max_batch=3), SimClock())
    for job_id in "abcde":
        engine.open(job_id)
        engine.feed(job_id, frames(2))
    drain(engine)
    assert decoder.batches == [(3, 2), (2, 2)]


def test_too_many_streams_are_refused_until_one_ends(engine):
    for job_id in "abcd":
        engine.open(job_id)
    with pytest.raises(CapacityError, match="4 of 4"):
        engine.open("e")
    engine.finish("a")
    drain(engine)
    engine.open("e")
    engine.cancel("b")
    engine.open("f")


@pytest.mark.parametrize(
    ("codes", "expected_error"),
    [
        (frames(18), CapacityError),
        (torch.full((1, 2), CODEBOOK_SIZE), BadInputError),
        (frames(1)[0], BadInputError),
    ],
    ids=["too many", "bad code", "one dimension"],
)
def test_a_refused_feed_changes_nothing(engine, codes, expected_error):
    engine.open("a")
    engine.feed("a", frames(3))
    with pytest.raises(expected_error):
        engine.feed("a", codes)
    engine.feed("a", frames(17, seed=1))
    engine.finish("a")
    pcm = b"".join(chunk.pcm for chunk in drain(engine))
    assert pcm == expected_pcm(torch.cat((frames(3), frames(17, seed=1))))


def test_cancel_drops_a_job_at_once_and_may_come_twice(engine):
    engine.open("a")
    engine.feed("a", frames(2))
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("never opened")
    assert engine.step() == []
    with pytest.raises(UnknownJobError):
        engine.feed("a", frames(1))


def test_batches_of_different_shapes_are_decoded_at_once(decoder):
    engine = VocoderEngine(decoder, VocoderConfig(max_in_flight=2), SimClock())
    for job_id, n in (("first", 2), ("later", 10), ("last", 10)):
        engine.open(job_id)
        engine.feed(job_id, frames(n))
    playing = [chunk.job_id for chunk in engine.step() + engine.step()]
    assert playing == ["first", "later", "last", "later", "last"]
    engine.feed("first", frames(2, seed=1))
    begun = engine.begin()
    assert begun is not None and [job.job_id for job in begun.jobs] == ["first"]
    others = engine.begin()
    assert others is not None and [job.job_id for job in others.jobs] == ["later", "last"]
    engine.open("new")
    engine.feed("new", frames(2, seed=2))
    assert engine.begin() is None  # two are decoded
    chunks = engine.end(others, others.launch().pcm())  # results may come in any order
    assert [(chunk.job_id, chunk.n_frames) for chunk in chunks] == [("later", 4), ("last", 4)]
    newest = engine.begin()
    assert newest is not None and [job.job_id for job in newest.jobs] == ["new"]
    for batch, n_frames in ((newest, 2), (begun, 2)):
        assert [c.n_frames for c in engine.end(batch, batch.launch().pcm())] == [n_frames]


def test_chunks_of_a_shape_that_is_decoded_gather_for_the_next_batch(decoder):
    engine = VocoderEngine(decoder, VocoderConfig(max_in_flight=3), SimClock())
    engine.open("a")
    engine.feed("a", frames(2))
    batch = engine.begin()
    for job_id in ("b", "c"):
        engine.open(job_id)
        engine.feed(job_id, frames(2))
        assert engine.begin() is None
    engine.cancel("a")
    assert engine.end(batch, batch.launch().pcm()) == []
    assert sorted(chunk.job_id for chunk in engine.step()) == ["b", "c"]


def test_a_cancelled_id_starts_afresh(engine):
    engine.open("a")
    engine.feed("a", frames(4))
    engine.step()
    engine.cancel("a")
    engine.open("a")
    engine.feed("a", frames(2, seed=7))
    assert engine.step()[0].pcm == expected_pcm(frames(2, seed=7))


def test_unknown_ended_and_doubled_jobs_are_refused(engine):
    for call in (engine.finish, lambda job_id: engine.feed(job_id, frames(1))):
        with pytest.raises(UnknownJobError, match="'x' is not open"):
            call("x")
    engine.open("a")
    with pytest.raises(BadInputError, match="open already"):
        engine.open("a")
    engine.finish("a")
    with pytest.raises(BadInputError, match="after finish"):
        engine.feed("a", frames(1))
    drain(engine)
    with pytest.raises(UnknownJobError):
        engine.finish("a")


def test_a_failing_decoder_loses_no_frame(engine, decoder):
    engine.open("a")
    engine.feed("a", frames(2))
    decoder.is_broken = True
    with pytest.raises(RuntimeError):
        engine.step()
    decoder.is_broken = False
    assert engine.step()[0].pcm == expected_pcm(frames(2))


def test_the_peer_may_reuse_its_buffer(engine):
    buffer = frames(2)
    engine.open("a")
    engine.feed("a", buffer)
    buffer.fill_(8)
    assert engine.step()[0].pcm == expected_pcm(frames(2))


@pytest.mark.parametrize(
    "wrong", [dict(max_streams=0), dict(chunk_frames=-1), dict(max_buffered_frames=3)], ids=str
)
def test_a_config_that_cannot_work_is_refused(wrong):
    with pytest.raises(BadInputError, match=next(iter(wrong)).replace("_", "[_-]")):
        VocoderConfig(**wrong)


@settings(derandomize=True, max_examples=40)
@given(feeds=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.booleans()), max_size=30))
def test_every_job_gets_exactly_its_audio_in_any_interleaving(feeds):
    engine = VocoderEngine(SummingDecoder(), VocoderConfig(max_batch=2), SimClock())
    fed = {str(job): [torch.empty(0, 2, dtype=torch.int64)] for job in range(4)}
    for job_id in fed:
        engine.open(job_id)
    chunks = []
    for i, (job, n_frames, may_step) in enumerate(feeds):
        codes = frames(n_frames, seed=i)
        engine.feed(str(job), codes)
        fed[str(job)].append(codes)
        chunks += engine.step() if may_step else []
    for job_id in fed:
        engine.finish(job_id)
    chunks += drain(engine)
    for job_id, codes in fed.items():
        own = [chunk for chunk in chunks if chunk.job_id == job_id]
        assert b"".join(chunk.pcm for chunk in own) == expected_pcm(torch.cat(codes))
        assert [chunk.is_last for chunk in own] == [False] * (len(own) - 1) + [True]


def real_vocoder() -> Qwen3OmniMoeCode2Wav:
    torch.manual_seed(0)
    config = Qwen3OmniMoeCode2WavConfig(
        codebook_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
        decoder_dim=32,
        layer_scale_initial_scale=0.5,
    )
    module = Qwen3OmniMoeCode2Wav(config).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.startswith("decoder") and weight.ndim > 1:  # would give near silence
                weight.normal_(0, weight[0].numel() ** -0.5)
    return module


def test_the_real_vocoder_through_the_engine_equals_one_decode():
    module = real_vocoder()
    engine = VocoderEngine(StreamingCode2Wav(module), VocoderConfig())
    codes = {job_id: torch.randint(0, 64, (n, 16)) for job_id, n in (("a", 21), ("b", 13))}
    chunks = []
    for job_id in codes:
        engine.open(job_id)
    for start in range(0, 21, 3):
        for job_id, its_codes in codes.items():
            engine.feed(job_id, its_codes[start : start + 3])
            chunks += engine.step()
    for job_id in codes:
        engine.finish(job_id)
    chunks += drain(engine)
    for job_id, its_codes in codes.items():
        pcm = b"".join(chunk.pcm for chunk in chunks if chunk.job_id == job_id)
        with torch.inference_mode():
            wave = module(its_codes.T[None])[0, 0].numpy()
        streamed = np.frombuffer(pcm, "<i2") / 32767.0
        assert 0.05 < wave.std() < 0.5
        assert streamed.shape == wave.shape
        assert np.abs(streamed - wave).max() <= 0.6 / 32767.0  # rounding, and a little float32


def test_a_job_goes_on_where_another_vocoder_has_ended():
    decoder, n_frames = StreamingCode2Wav(real_vocoder()), 70
    assert 14 < decoder.n_context_frames < n_frames // 2
    utterances = [torch.randint(0, 64, (n, 16)) for n in (n_frames, 5, 9)]

    def decoded(sent: SoundPlace | None = None) -> list[VocoderChunk]:
        engine = VocoderEngine(decoder, VocoderConfig())
        engine.open("a", sent=sent)
        first = 0 if sent is None else sent.utterance
        for codes in utterances[first:-1]:
            for part in codes.split(7):
                engine.feed("a", part)
            engine.end_utterance("a")
        engine.feed("a", utterances[-1])
        engine.finish("a")
        return drain(engine)

    chunks = decoded()
    whole = b"".join(chunk.pcm for chunk in chunks)
    for n, chunk in enumerate(chunks):
        resumed = decoded(chunk.place)
        rest = b"".join(chunk.pcm for chunk in resumed)
        assert [chunk.is_last for chunk in resumed] == [False] * (len(resumed) - 1) + [True]
        found = b"".join(chunk.pcm for chunk in chunks[: n + 1]) + rest
        assert len(found) == len(whole)
        apart = np.frombuffer(found, "<i2").astype(int) - np.frombuffer(whole, "<i2")
        assert np.abs(apart).max() <= 1  # other chunks round otherwise
    # Most of a long utterance is not decoded again.
    late = next(c for c in chunks if c.place.n_done == 66)
    assert sum(chunk.n_frames for chunk in decoded(late.place)) < n_frames // 2 + 18


def test_every_common_shape_is_decoded_before_the_first_job(decoder):
    config = VocoderConfig(max_batch=3, first_chunk_frames=2, chunk_frames=4)
    engine = VocoderEngine(decoder, config, SimClock())
    engine.warm_up()
    full = [(n, n_frames) for n in (1, 2, 3) for n_frames in (2, 4)]
    ends = [(1, 1), (1, 3)]
    # As a first chunk and as a later one, which differ in samples.
    assert sorted(decoder.batches) == sorted(2 * (full + ends))
    assert engine.step() == []
