"""A retracted request's penalties are those of its tokens, with SGLang's own penalizers."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.sampling.penaltylib")
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.sampling import penaltylib  # noqa: E402

from sglang_live.bridge.scheduler.paused import count_written  # noqa: E402
from sglang_live.engine_channel.inbox import CONTINUED  # noqa: E402

KINDS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}
VOCAB = 12


@pytest.fixture(autouse=True)
def eager():
    """Compiling SGLang's functions takes half a minute, and the claim is what is counted."""
    with torch.compiler.set_stance("force_eager"):
        yield


class FakeBatch:
    """What penalizers read of a batch."""

    device, forward_mode = "cpu", ForwardMode.EXTEND

    def __init__(self, written: list[list[int]], *, overlap: bool, n_before: int = 0):
        """n_before: of the written ones, by another engine."""
        self.enable_overlap = overlap
        self.reqs = [
            SimpleNamespace(
                origin_input_ids=[8, 9, *ids[:n_before]],
                output_ids=ids[n_before:],
                eos_token_ids={1},
                tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1),
                sampling_params=SimpleNamespace(
                    frequency_penalty=0.3 + n,
                    presence_penalty=0.7 - n,
                    repetition_penalty=1.3 + n,
                    min_new_tokens=3 + n - n_before,
                    custom_params={CONTINUED: n_before} if n_before else None,
                    stop_token_ids={2},
                ),
            )
            for n, ids in enumerate(written)
        ]
        self.penalties = penaltylib.BatchedPenalizerOrchestrator(VOCAB, self, KINDS)

    def logits(self) -> torch.Tensor:
        found = torch.linspace(-1.0, 2.0, len(self.reqs) * VOCAB).reshape(len(self.reqs), VOCAB)
        for kind in sorted(KINDS, key=lambda kind: kind.__name__):
            self.penalties.penalizers[kind].apply(found)
        return found


@pytest.mark.parametrize("n_before", [0, 1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_written_is_counted_as_it_was_step_by_step(overlap, n_before):
    written = [[3, 4, 3, 3], [5, 6, 5, 7]]
    stepwise = FakeBatch(written, overlap=overlap)
    # With overlap the newest token is counted in the next round.
    for step in zip(*(ids[:-1] if overlap else ids for ids in written), strict=True):
        stepwise.penalties.cumulate_output_tokens(torch.tensor(step))
    retracted = FakeBatch(written, overlap=overlap, n_before=n_before)
    info = SimpleNamespace(penalizer_orchestrator=retracted.penalties)
    assert not torch.equal(retracted.logits(), stepwise.logits())
    assert count_written(info, type, retracted) is info
    assert torch.equal(retracted.logits(), stepwise.logits())


def test_new_requests_and_decodes_have_nothing_to_count():
    batch = FakeBatch([[], []], overlap=False)
    before = batch.logits()
    count_written(SimpleNamespace(penalizer_orchestrator=batch.penalties), type, batch)
    assert torch.equal(batch.logits(), before)
    decode = FakeBatch([[3, 4]], overlap=False)
    decode.forward_mode, before = ForwardMode.DECODE, decode.logits()
    count_written(SimpleNamespace(penalizer_orchestrator=decode.penalties), type, decode)
    assert torch.equal(decode.logits(), before)
