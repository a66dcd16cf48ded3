"""Sessions with audio and images that lose tokens: what remains stays consistent for SGLang."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.mm_schedule import _count_mm_tokens_in_extend
from sglang.srt.managers.mm_utils import extend_mrope_positions_for_retracted_request
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    MultimodalProcessorOutput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session, SessionController

from sglang_live.bridge.session.media import (
    compact_media,
    media_before,
    media_spans,
    position_gap,
    shift_positions,
)
from sglang_live.kv.retention import Compaction

TEXT, AUDIO_BEGIN, AUDIO, AUDIO_END, IMAGE_BEGIN, IMAGE, IMAGE_END = range(1, 8)
AUDIO_TOKENS, IMAGE_TOKENS = 13, 24
IMAGE_GRID = (1, 8, 12)  # patches; 2 x 2 of them are a token
N_REPLY = 6

# Contents of turns, as tokens: a system prompt, then turns.
WORDS = [TEXT] * 7
CLIP = [TEXT, TEXT, AUDIO_BEGIN, *[AUDIO] * AUDIO_TOKENS, AUDIO_END, TEXT, TEXT]
PICTURE = [TEXT, IMAGE_BEGIN, *[IMAGE] * IMAGE_TOKENS, IMAGE_END, TEXT, TEXT]
BOTH = PICTURE + CLIP
SINK = len(WORDS) + N_REPLY


@pytest.fixture(autouse=True)
def plain_execution(monkeypatch):
    execution = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
    monkeypatch.setattr(forward_batch_info, "get_exec", lambda: execution)


class Talk:
    """A streaming session as the scheduler keeps it, without a model.

    positions: of every token ever, as SGLang computed them: in prefill, then in each decode step.
    """

    def __init__(self):
        self.session = Session(0, "talk", streaming=True)
        self.req = None
        self.positions = torch.empty(3, 0, dtype=torch.int64)
        self._n_media = 0

    @property
    def mm_inputs(self) -> MultimodalInputs | None:
        return self.req.multimodal_inputs

    def turn(self, *prompt: int) -> None:
        self.begin(*prompt)
        self.reply()
        self.session.finish_req(self.req)

    def begin(self, *prompt: int) -> None:
        """Take a request in as Scheduler.handle_generate_request does."""
        n_history = self.n_tokens
        received = request(prompt)
        req = self.session.create_req(received, None, 1000)
        if (media := self._media(list(prompt))) is not None:
            SessionController.adjust_mm_offsets(received, req, media)
            assert Scheduler._try_apply_padded_mm_input_ids(received, req, media)
            req.extend_image_inputs(media)
        self.req = req
        self._prefill(n_history)

    def reply(self) -> None:
        for _ in range(N_REPLY):
            self.req.output_ids.append(TEXT)
            self._decode()

    def compact(self, begin: int, end: int) -> None:
        """Drop tokens where the session keeps them, then in its media."""
        n_tokens, req, compaction = self.n_tokens, self.req, Compaction(begin, end)
        req.origin_input_ids = req.origin_input_ids + req.output_ids
        del req.origin_input_ids[begin:end]
        req.output_ids = array("q")
        req.origin_input_ids_unpadded = req.origin_input_ids
        req.full_untruncated_fill_ids = array("q")
        self.session.committed_origin_len = len(req.origin_input_ids)
        self.session.committed_unpadded_len = len(req.origin_input_ids)
        self.session.committed_fill_len = 0
        req.multimodal_inputs = compact_media(req.multimodal_inputs, compaction, n_tokens)

    def back_to(self, n_tokens: int) -> None:
        """Drop the input after the first n_tokens."""
        req = self.req
        del req.origin_input_ids[n_tokens:]
        req.origin_input_ids_unpadded = req.origin_input_ids
        req.full_untruncated_fill_ids = array("q")
        self.session.committed_origin_len = n_tokens
        self.session.committed_unpadded_len = n_tokens
        self.session.committed_fill_len = 0
        if req.multimodal_inputs is not None:
            req.multimodal_inputs = media_before(req.multimodal_inputs, n_tokens)
        self.positions = self.positions[:, :n_tokens]

    @property
    def n_tokens(self) -> int:
        return len(self.req.origin_input_ids) + len(self.req.output_ids) if self.req else 0

    def runs(self) -> list[list[int]]:
        """What the token arrays hold where each item says it is."""
        ids = self.req.origin_input_ids + self.req.output_ids
        items = self.mm_inputs.mm_items
        return [list(ids[a : b + 1]) for item in items for a, b in item.offsets]

    def padding(self) -> list[list[int]]:
        """What SGLang writes into the token arrays for each item."""
        items = self.mm_inputs.mm_items
        return [item.padding_sequence(b - a + 1) for item in items for a, b in item.offsets]

    def _media(self, prompt: list[int]) -> MultimodalInputs | None:
        """As the processor of Qwen3-Omni has it for one prompt."""
        kinds = [(AUDIO, Modality.AUDIO), (IMAGE, Modality.IMAGE)]
        present = [(token, modality) for token, modality in kinds if token in prompt]
        if not present:
            return None
        items = []
        for token, modality in present:
            first, n = prompt.index(token), prompt.count(token)
            item = MultimodalDataItem(modality=modality, offsets=[(first, first + n - 1)])
            item.feature = torch.ones(3)
            self._n_media += 1
            item.set_hash(self._n_media)
            items.append(item)
        table, delta = rope_index(prompt)
        padded = MultimodalProcessorOutput.build_padded_input_ids(prompt, items)
        output = MultimodalProcessorOutput(
            mm_items=items, padded_input_ids=padded, mrope_positions=table
        )
        output.mrope_position_delta = delta
        return MultimodalInputs.from_processor_output(output)

    def _prefill(self, n_cached: int) -> None:
        n_new = len(self.req.origin_input_ids) - n_cached
        batch = SimpleNamespace(
            extend_lens=[n_new],
            prefix_lens=[n_cached],
            reqs=[self.req],
            multimodal_inputs=[self.mm_inputs],
        )
        self._compute(ForwardBatch._compute_mrope_positions_extend, batch)

    def _decode(self) -> None:
        batch = SimpleNamespace(multimodal_inputs=[self.mm_inputs])
        self._compute(ForwardBatch._compute_mrope_positions_decode, batch)

    def _compute(self, compute, batch) -> None:
        lengths = torch.tensor([self.n_tokens])
        forward = SimpleNamespace(seq_lens_cpu=lengths, seq_lens=lengths)
        forward._expand_mrope_from_input = lambda *args: ForwardBatch._expand_mrope_from_input(
            forward, *args
        )
        compute(forward, SimpleNamespace(device="cpu"), batch)
        self.positions = torch.cat([self.positions, forward.mrope_positions], dim=1)


def request(prompt: tuple[int, ...]) -> TokenizedGenerateReqInput:
    nothing = ("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    return TokenizedGenerateReqInput(
        rid="turn",
        input_text=None,
        input_ids=array("q", prompt),
        sampling_params=SamplingParams(max_new_tokens=N_REPLY),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=True,
        session_params=SessionParams(id="talk"),
        **dict.fromkeys(nothing),
    )


def rope_index(prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    table, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=2,
        image_token_id=IMAGE,
        video_token_id=-1,
        vision_start_token_id=IMAGE_BEGIN,
        model_type="qwen3_omni_moe",
        input_ids=torch.tensor([prompt]),
        image_grid_thw=torch.tensor([IMAGE_GRID]) if IMAGE in prompt else None,
        audio_token_id=AUDIO,
        audio_start_token_id=AUDIO_BEGIN,
        audio_seqlens=torch.tensor([100]),
        position_id_per_seconds=13,
    )
    return table.squeeze(1), delta


def twins(*turns: list[int]) -> tuple[Talk, Talk]:
    talks = Talk(), Talk()
    for talk in talks:
        for prompt in turns:
            talk.turn(*prompt)
    return talks


def item(*runs: tuple[int, int]) -> MultimodalDataItem:
    return MultimodalDataItem(
        modality=Modality.AUDIO, offsets=list(runs), feature=torch.ones(2), hash=1
    )


# --- back to an earlier end ---


@pytest.mark.parametrize(
    "before", [WORDS, CLIP, PICTURE, BOTH], ids=["words", "clip", "pic", "both"]
)
@pytest.mark.parametrize("said", [CLIP, PICTURE, BOTH], ids=["clip", "picture", "both"])
def test_dropped_tokens_leave_neither_offsets_nor_positions(before, said):
    talk, other = twins(WORDS, before)
    n_tokens = talk.n_tokens
    talk.begin(*said)
    talk.session.finish_req(talk.req)
    dropped = talk.mm_inputs.mm_items[len(media_spans(other.mm_inputs)) :]
    talk.back_to(n_tokens)
    assert media_spans(talk.mm_inputs) == media_spans(other.mm_inputs)
    assert dropped and all(item.feature is None for item in dropped)
    for one in (talk, other):
        one.turn(*WORDS)
        one.turn(*BOTH)
    assert torch.equal(talk.positions, other.positions)
    assert talk.runs() == talk.padding()
    assert list(map(len, talk.runs())) == list(map(len, other.runs()))


# --- positions ---

# Of each history the second turn is dropped.
HISTORIES = {
    "words": [WORDS, WORDS, WORDS],
    "clips": [WORDS, CLIP, CLIP],
    "clip kept": [CLIP, WORDS, WORDS],
    "image compacted": [WORDS, PICTURE, CLIP],
    "picture kept": [PICTURE, CLIP, PICTURE],
    "both": [BOTH, BOTH, WORDS],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("then", [WORDS, CLIP, PICTURE, BOTH], ids=["words", "clip", "pic", "both"])
def test_tokens_after_a_compaction_get_the_positions_they_would_have_had(history, then):
    uncut, talk = twins(*history)
    sink, second = (len(prompt) + N_REPLY for prompt in history[:2])
    talk.compact(sink, sink + second)
    for one in (uncut, talk):
        one.turn(*WORDS)
        one.turn(*then)
        one.turn(*CLIP)
    assert torch.equal(talk.positions, uncut.positions)


def test_the_table_has_the_positions_that_kept_keys_were_computed_with():
    talk = Talk()
    for prompt in (CLIP, PICTURE, WORDS):
        talk.turn(*prompt)
    talk.compact(20, 20 + 40)
    kept = torch.cat([talk.positions[:, :20], talk.positions[:, 60:]], dim=1)
    assert torch.equal(talk.mm_inputs.mrope_positions.long(), kept)


def test_a_second_compaction_continues_from_the_first():
    uncut, talk = twins(WORDS, CLIP, PICTURE, CLIP)
    clip, picture = len(CLIP) + N_REPLY, len(PICTURE) + N_REPLY
    talk.compact(SINK, SINK + clip)
    for one in (uncut, talk):
        one.turn(*CLIP)
    talk.compact(SINK, SINK + picture)
    for one in (uncut, talk):
        one.turn(*WORDS)
        one.turn(*PICTURE)
    assert torch.equal(talk.positions, uncut.positions)
    gone = clip + picture
    kept = torch.cat([talk.positions[:, :SINK], talk.positions[:, SINK + gone :]], dim=1)
    table = talk.mm_inputs.mrope_positions.long()
    assert torch.equal(table, kept[:, : table.shape[1]])


def test_text_alone_needs_a_table_after_a_compaction():
    talk = Talk()
    talk.turn(*WORDS)
    assert talk.mm_inputs is None
    talk.compact(2, 5)
    assert talk.mm_inputs.mm_items == []
    assert talk.mm_inputs.mrope_positions[0].tolist() == [0, 1, *range(5, 13)]


def test_a_table_that_a_retraction_made_too_long_is_truncated_to_the_session():
    uncut, talk = twins(WORDS, CLIP)
    table = talk.mm_inputs.mrope_positions
    talk.mm_inputs.mrope_positions = extend_mrope_positions_for_retracted_request(table, 50)
    talk.compact(SINK, SINK + len(CLIP))
    assert talk.mm_inputs.mrope_positions.shape[1] == talk.n_tokens
    for one in (uncut, talk):
        one.turn(*WORDS)
        one.turn(*CLIP)
    assert torch.equal(talk.positions, uncut.positions)


def test_a_turn_aborted_after_a_compaction_leaves_no_trace():
    uncut, talk = twins(WORDS, CLIP, CLIP)
    talk.compact(SINK, SINK + len(CLIP) + N_REPLY)
    finished, positions = talk.req, talk.positions
    runs = talk.runs()
    talk.begin(*BOTH)
    talk.session.abort_req()
    talk.req, talk.positions = finished, positions
    del talk.req.origin_input_ids[talk.session.committed_origin_len :]
    assert talk.runs() == runs
    for one in (uncut, talk):
        one.turn(*BOTH)
    assert torch.equal(talk.positions, uncut.positions)


def test_a_model_with_plain_positions_has_its_items_moved_only():
    kept, gone = item((30, 39)), item((10, 19))
    after = compact_media(MultimodalInputs(mm_items=[gone, kept]), Compaction(5, 25), 50)
    assert after.mrope_positions is None
    assert [tuple(run) for run in kept.offsets] == [(10, 19)]


# --- items ---


def test_items_are_where_their_tokens_are():
    talk = Talk()
    for prompt in (CLIP, PICTURE, BOTH):
        talk.turn(*prompt)
    first = len(CLIP) + N_REPLY
    talk.compact(first, first + len(PICTURE) + N_REPLY)
    talk.turn(*CLIP)
    sizes = [AUDIO_TOKENS, AUDIO_TOKENS, IMAGE_TOKENS, AUDIO_TOKENS]
    assert list(map(len, talk.runs())) == sizes
    assert talk.runs() == talk.padding()
    assert len(set(map(tuple, talk.runs()))) == 4


def test_sglang_embeds_the_new_clip_only():
    talk = Talk()
    for prompt in (WORDS, CLIP, CLIP):
        talk.turn(*prompt)
    talk.compact(SINK, SINK + len(CLIP) + N_REPLY)
    n_cached = talk.n_tokens
    talk.begin(*CLIP)
    runs = [run for found in talk.mm_inputs.mm_items for run in found.offsets]
    assert _count_mm_tokens_in_extend([n_cached], [len(CLIP)], [runs]) == AUDIO_TOKENS


def test_dropped_items_release_their_features_and_others_keep_them():
    before, inside, behind = item((0, 4)), item((5, 9), (12, 14)), item((15, 19), (22, 24))
    mm_inputs = MultimodalInputs(mm_items=[before, inside, behind])
    after = compact_media(mm_inputs, Compaction(5, 15), 30)
    assert after.mm_items == [before, behind]
    assert inside.feature is None
    assert before.feature is not None and behind.feature is not None
    assert before.offsets == [(0, 4)]
    assert behind.offsets == [(5, 9), (12, 14)]


@pytest.mark.parametrize(
    "compaction",
    [Compaction(5, 10), Compaction(11, 20), Compaction(12, 13), Compaction(5, 16)],
    ids=str,
)
def test_an_item_is_never_split(compaction):
    with pytest.raises(AssertionError):
        compact_media(MultimodalInputs(mm_items=[item((8, 11), (14, 16))]), compaction, 30)


def test_spans_reach_around_all_runs_of_an_item_and_end_behind_the_last():
    mm_inputs = MultimodalInputs(mm_items=[item((20, 24)), item((2, 4), (7, 9)), item((10, 12))])
    assert media_spans(mm_inputs) == [(2, 10), (10, 13), (20, 25)]
    assert media_spans(None) == []


def test_interleaved_items_are_dropped_together():
    mm_inputs = MultimodalInputs(mm_items=[item((2, 4), (10, 12)), item((6, 8), (14, 16))])
    assert media_spans(mm_inputs) == [(2, 17)]


def test_a_model_with_other_token_indexed_fields_is_refused():
    mm_inputs = MultimodalInputs(mm_items=[], token_modalities=[0] * 30)
    with pytest.raises(AssertionError, match="token_modalities"):
        compact_media(mm_inputs, Compaction(5, 10), 30)


# --- rebase ---


@pytest.mark.parametrize(
    "history", [[WORDS, CLIP, CLIP], [WORDS, PICTURE, CLIP]], ids=["clip", "pic"]
)
def test_a_rebase_moves_all_present_and_later_positions_behind_the_sink(history):
    unmoved, talk = twins(*history)
    end = SINK + len(history[1]) + N_REPLY
    for one in (unmoved, talk):
        one.compact(SINK, end)
        one.turn(*WORDS)
    n_shifted = talk.positions.shape[1]
    delta = position_gap(talk.mm_inputs, SINK)
    talk.req.multimodal_inputs = shift_positions(talk.mm_inputs, delta, sink_tokens=SINK)
    assert position_gap(talk.mm_inputs, SINK) == 0
    for one in (unmoved, talk):
        one.turn(*WORDS)
        one.turn(*PICTURE)
        one.turn(*CLIP)
    moved = unmoved.positions[:, n_shifted:] - delta
    assert torch.equal(talk.positions[:, n_shifted:], moved)
    tables = talk.mm_inputs.mrope_positions, unmoved.mm_inputs.mrope_positions
    assert torch.equal(tables[0][:, :SINK], tables[1][:, :SINK])
    assert torch.equal(tables[0][:, SINK:], tables[1][:, SINK:] - delta)


def test_an_image_leaves_a_smaller_gap_than_it_had_tokens():
    talk = Talk()
    for prompt in (WORDS, PICTURE, CLIP):
        talk.turn(*prompt)
    n_gone = len(PICTURE) + N_REPLY
    talk.compact(SINK, SINK + n_gone)
    widest = max(IMAGE_GRID) // 2
    assert position_gap(talk.mm_inputs, SINK) == n_gone - IMAGE_TOKENS + widest
    with pytest.raises(AssertionError):
        shift_positions(talk.mm_inputs, n_gone, sink_tokens=SINK)
