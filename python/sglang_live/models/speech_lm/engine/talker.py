"""A talker as an SGLang model: one codec frame of several codes per decode step.

Step k samples code 0 of a frame; step k+1 first predicts the frame's residual codes, sums the
embeddings of all its codes and the next text token, and runs the backbone. No frame is lost: the
end token is sampled in the step that completes the last frame.
"""

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from torch import Tensor, nn

from sglang_live.models.host_copy import copy_to
from sglang_live.models.speech_lm.code_predictor import CodePredictor, traced
from sglang_live.models.speech_lm.engine.steps import (
    all_greedy,
    chunks,
    logical_positions,
    three_axes,
)
from sglang_live.models.speech_lm.sampler import Sampler, draws_of
from sglang_live.models.speech_lm.talker_ids import TalkerIds
from sglang_live.models.speech_lm.talker_state import TalkerRows, TalkerStream

# Separates the noise of code 0 from that of the residual codes.
CODE0_SALT = 0x5DEECE66D


class Projection(nn.Module):
    """Width of text -> width of the talker (transformers: Qwen3OmniMoeTalkerResizeMLP)."""

    def __init__(self, n_in: int, n_inner: int, n_out: int):
        super().__init__()
        self.linear_fc1 = nn.Linear(n_in, n_inner)
        self.linear_fc2 = nn.Linear(n_inner, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class SpeechLM(nn.Module):
    """
    rows, frame_codes: allocated when the weights are loaded, before graphs are captured, which
        refer to their memory.
    frame_codes: [n_rows, num_code_groups] int64, by place in the batch: the frame that the last
        step completed, -1 where a prefill completed none. A captured graph runs no Python, so
        every kind of step writes it on the device.
    min_frames: before these the end is not sampled.
    frame_lag, row_lag: see FrameLM.
    """

    frame_lag = row_lag = 1
    min_frames = 0
    rows: TalkerRows
    frame_codes: Tensor

    def __init__(
        self,
        config,
        backbone: nn.Module,
        predictor: CodePredictor,
        *,
        sampler: Sampler,
        n_control_ids: int,
        text_vocab: int,
        text_widths: tuple[int, int],
    ):
        """
        Args:
            config: of SGLang's model; its `talker` has the ids of control tokens, and the settings
                live_rows and live_max_frames are overrides.
            backbone: with the codec embedding as embed_tokens.
            sampler: of code 0, with a penalty for all codes of the response.
            n_control_ids: at the end of the codec vocabulary; of these only the end is sampled.
            text_vocab: number of text ids.
            text_widths: of the text embedding, and inside the projection.
        """
        super().__init__()
        talker = config.talker
        self.config = config
        self.ids = TalkerIds(config.vocab_size, text_vocab)
        self.model = backbone
        self.codec_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.sampler = sampler
        self.code_predictor = predictor
        self._predict_codes = predictor.forward
        self.text_projection = Projection(*text_widths, config.hidden_size)
        # text_projection(embedding) of the whole text vocabulary, filled when weights load.
        self.register_buffer(
            "text_table", torch.empty(text_vocab, config.hidden_size), persistent=False
        )
        self.register_buffer("allowed", torch.zeros(config.vocab_size), persistent=False)
        self.allowed[config.vocab_size - n_control_ids :] = -torch.inf
        self.allowed[talker["codec_eos_token_id"]] = 0.0
        self.logits_processor = LogitsProcessor(config)
        self.streams: dict[str, TalkerStream] = {}

    @torch.no_grad()
    def prepare(self, embedding: Tensor) -> None:
        """Prepare forward(), after the weights are loaded.

        Args:
            embedding: of the text vocabulary, [text_vocab, width].
        """
        weight = self.text_projection.linear_fc1.weight
        for part in torch.arange(self.ids.text_vocab).split(8192):
            rows = embedding[part].to(weight.device, weight.dtype)
            self.text_table[part] = self.text_projection(rows).to(self.text_table.dtype)
        self.code_predictor.prepare()
        if weight.device.type == "cpu":
            self._predict_codes = traced(self.code_predictor)
        self._allocate_rows(self.config.live_rows, self.config.live_max_frames)

    def _allocate_rows(self, n_rows: int, max_frames: int) -> None:
        weight = self.codec_head.weight
        self.rows = TalkerRows(
            n_rows=n_rows,
            max_frames=max_frames,
            hidden=self.config.hidden_size,
            n_codes=self.code_predictor.n_steps,
            codec_vocab=self.config.vocab_size,
            pad_id=self.config.talker["tts_pad_token_id"],
            device=weight.device,
            dtype=weight.dtype,
        )
        # A batch has at most as many requests as there are rows.
        shape = (n_rows, self.code_predictor.n_steps + 1)
        self.frame_codes = torch.full(shape, -1, dtype=torch.int64, device=weight.device)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        rows = forward_batch.req_pool_indices
        is_decode = forward_batch.forward_mode.is_decode()
        if is_decode:
            positions = positions + (self.rows.n_dropped + self.rows.shift)[rows]
            embeds = self._complete_frames(input_ids, rows, forward_batch.seq_lens)
        else:
            positions = logical_positions(positions, forward_batch, self.streams)
            embeds = self._embed_extend(input_ids, forward_batch)
            if forward_batch.forward_mode.is_extend():
                positions = three_axes(positions, forward_batch, self.streams)
                self._keep_frames_of_extend(input_ids, forward_batch)
        hidden = self.model(input_ids, positions, forward_batch, embeds)
        if is_decode:
            self.rows.past_hidden[rows] = hidden
        elif forward_batch.forward_mode.is_extend():
            self._keep_last_hidden(hidden, forward_batch)
        output = self.logits_processor(input_ids, hidden, self.codec_head, forward_batch)
        frame = forward_batch.seq_lens - self.rows.prompt_len[rows] + self.rows.n_dropped[rows]
        frame = frame.clamp(min=0)
        self._penalise(output.next_token_logits, rows, frame)
        self._sample(output.next_token_logits, rows, frame)
        return output

    def _keep_last_hidden(self, hidden: Tensor, forward_batch) -> None:
        """Store the last hidden states of a prefill. A retracted request needs its old state
        until its last chunk.
        """
        end = 0
        for rid, _, n in chunks(forward_batch):
            end += n
            stream = self.streams.get(rid)
            if stream is not None and not stream.mid_prefill:
                self.rows.past_hidden[stream.row] = hidden[end - 1]

    def _penalise(self, logits: Tensor, rows: Tensor, frame: Tensor) -> None:
        """Apply the repetition penalty over the request's codes 0, and exclude controls; in place.

        frame: [n] int64, index of the frame that is begun.
        SGLang's own penalty does not fit: with overlap its history lags by one step, and it begins
        with a prompt id.
        """
        seen, penalty = self.rows.seen[rows], self.rows.penalty[rows]
        logits.copy_(self.sampler.penalised(logits, seen, penalty))
        logits.add_(self.allowed)
        if self.min_frames:
            end = logits[:, self.config.talker["codec_eos_token_id"]]
            end.masked_fill_(frame < self.min_frames, -torch.inf)

    def _sample(self, logits: Tensor, rows: Tensor, frame: Tensor) -> None:
        """Sample code 0 of the next frame, and set all other logits to -inf; in place.

        The noise depends on seed and frame alone, so a request's output does not depend on the
        other requests of its batch or on pauses. SGLang then takes the argmax.
        """
        state = self.rows
        greedy = state.greedy[rows]
        if all_greedy(greedy):
            return
        draw = draws_of(state.seed[rows] ^ CODE0_SALT, frame, 1)[:, 0]
        pick = self.sampler.choose(logits, state.temperature[rows], None, draw)
        only = torch.full_like(logits, -torch.inf).scatter_(1, pick.unsqueeze(1), 0.0)
        logits.copy_(torch.where(greedy.unsqueeze(1), logits, only))

    def _complete_frames(self, code0: Tensor, rows: Tensor, seq_lens: Tensor) -> Tensor:
        """Embeddings [n, hidden] of the frames that the previous step began."""
        state = self.rows
        # Rows that pad a captured batch keep the id that was in their place: that of a prompt too.
        code0 = code0.clamp(max=self.config.vocab_size - 1)
        frame = seq_lens - 1 - state.prompt_len[rows] + state.n_dropped[rows]
        frame = frame.clamp(0, state.max_frames - 1)
        first = self.model.embed_tokens(code0)
        greedy = state.greedy[rows]
        draws = None
        if not all_greedy(greedy):
            draws = draws_of(state.seed[rows], frame, self.code_predictor.n_steps)
        # A captured graph records operators, which the traced predictor does not show.
        predict = self.code_predictor if get_is_capture_mode() else self._predict_codes
        codes, residual = predict(state.past_hidden[rows], first, greedy, draws)
        state.codes[rows, frame] = codes.to(torch.int16)
        # A Python scalar would be copied from pageable memory, which a CUDA graph cannot capture.
        state.seen[rows, code0] = torch.ones_like(code0, dtype=torch.bool)
        self.frame_codes[: len(code0)] = torch.cat((code0.unsqueeze(1), codes), dim=1)
        return first + residual + self.text_table[state.text_ids[rows, frame].long()]

    def _embed_extend(self, input_ids: Tensor, forward_batch) -> Tensor:
        """Embeddings [n_tokens, hidden] of a prefill: prompts, and frames of retracted requests."""
        embeds = self._embed_prompt(input_ids)
        if not forward_batch.forward_mode.is_extend():
            return embeds
        at = 0
        for rid, prefix, n in chunks(forward_batch):
            stream = self.streams.get(rid)
            if stream is not None:
                ids = input_ids[at : at + n]
                out = embeds[at : at + n]
                self._place_audio(out, stream, prefix)
                self._place_frames(out, ids, stream, prefix)
            at += n
        return embeds

    def _embed_prompt(self, ids: Tensor) -> Tensor:
        """Embeddings of prompt ids by the ranges of TalkerIds; audio positions stay zero."""
        r = self.ids
        codec = self.config.vocab_size
        zero = torch.zeros_like(ids)
        is_text = (ids >= r.text) & (ids < r.start)
        is_start = (ids >= r.start) & (ids < r.pad)
        is_pad = (ids >= r.pad) & (ids < r.bos)
        is_bos = ids == r.bos
        text = torch.where(is_text, ids - r.text, zero)
        text = torch.where(is_start, ids - r.start, text)
        text = torch.where(is_pad, self.config.talker["tts_pad_token_id"], text)
        text = torch.where(is_bos, self.config.talker["tts_bos_token_id"], text)
        code = torch.where(ids < codec, ids, zero)
        code = torch.where(is_start, self.config.talker["codec_bos_id"], code)
        code = torch.where(is_pad, ids - r.pad, code)
        code = torch.where(is_bos, self.config.talker["codec_pad_id"], code)
        has_text = is_text | is_start | is_pad | is_bos
        has_code = (ids < codec) | is_start | is_pad | is_bos
        return self.text_table[text] * has_text.unsqueeze(1) + self.model.embed_tokens(
            code
        ) * has_code.unsqueeze(1)

    def _place_audio(self, out: Tensor, stream: TalkerStream, prefix: int) -> None:
        """Write embeddings to the audio positions inside this chunk, for a talker that has any."""

    def _place_frames(self, out: Tensor, ids: Tensor, stream: TalkerStream, prefix: int) -> None:
        """Rebuild frame embeddings when a retracted request is prefilled with its frames."""
        first = max(stream.prompt_len - prefix, 0)
        if first >= len(out):
            return
        state = self.rows
        row = stream.row
        assert row is not None  # the scheduler binds it before the forward pass
        places = range(prefix + first, prefix + len(out))
        frames = [stream.frame_at(place) for place in places]
        frame = copy_to(torch.tensor(frames), out.device)
        if frames[-1] >= stream.n_frames:
            # The newest frame had only its code 0 when the request was retracted.
            draws = None
            if not stream.greedy:
                # The seed of its row: `torch.tensor([seed], device=…)` would wait for the device.
                draws = draws_of(state.seed[row : row + 1], frame[-1:], self.code_predictor.n_steps)
            first_embed = self.model.embed_tokens(ids[-1:])
            past_hidden = state.past_hidden[row : row + 1]
            codes, _ = self.code_predictor(past_hidden, first_embed, None, draws)
            state.codes[row, frames[-1]] = codes[0].to(torch.int16)
            stream.n_frames = frames[-1] + 1
        state.seen[row, ids[first:]] = torch.ones_like(ids[first:], dtype=torch.bool)
        residual = self.code_predictor.embed_frames(state.codes[row, frame].long())
        text = self.text_table[state.text_ids[row, frame].long()]
        out[first:] = self.model.embed_tokens(ids[first:]) + residual + text

    def _keep_frames_of_extend(self, input_ids: Tensor, forward_batch) -> None:
        """The newest frame of each retracted request, for frame_codes; -1 for prompts."""
        kept = self.frame_codes[: len(forward_batch.rids)]
        kept.fill_(-1)
        at = 0
        for codes, (rid, prefix, n) in zip(kept, chunks(forward_batch), strict=True):
            stream = self.streams.get(rid)
            if stream is not None and prefix + n > stream.prompt_len:
                frame = stream.frame_at(prefix + n - 1)
                codes[0] = input_ids[at + n - 1]
                codes[1:] = self.rows.codes[stream.row, frame]
            at += n
