"""A talker as an SGLang model that draws a whole frame of codes in every step.

In: the ids of a prompt, then the frame of the step before. Out: the next frame, in the step that
computes its state; SGLang sees its first code as the token, or the end.
Prompt ids, with V codes of the first codebook and T text ids:

    [0, V)      the first code of a frame (what the talker generates)
    TEXT  + t   text t                            TEXT  = V
    VOICE + r   row r of the table of voices      VOICE = V + T
    VOICE + h   a row that the prompt brings      behind the table, h = a hash of its content
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import Tensor, nn

from sglang_live.models.host_copy import copy_to
from sglang_live.models.speech_lm.engine.steps import all_greedy, chunks, logical_positions
from sglang_live.models.speech_lm.sampler import NO_CODE, Sampler, draws_of
from sglang_live.models.speech_lm.talker_state import TalkerRows, TalkerStream

# Separates the noise of the first code from that of the others.
FIRST_CODE_SALT = 0x5DEECE66D


class FrameLM(nn.Module):
    """
    rows, frame_codes: allocated by prepare(), before graphs are captured, which refer to their
        memory. The rows keep all codes of a frame.
    frame_codes: [n_rows, frame_width] int64, by place in the batch: the frame of the last step,
        -1 at the end. A captured graph runs no Python, so every kind of step writes it on the
        device.
    frame_lag: steps behind the one that draws the first code, in which the frame becomes complete.
    row_lag: the same for what the rows keep.
    voices: [n_rows, hidden], the table of voices.
    """

    frame_lag = row_lag = 0
    rows: TalkerRows
    frame_codes: Tensor

    def __init__(
        self,
        config,
        backbone: nn.Module,
        *,
        n_codes: int,
        text_vocab: int,
        n_voice_rows: int,
        sampler: Sampler,
        excluded: Sequence[int],
        late: Sequence[int] = (),
    ):
        """
        Args:
            config: of SGLang's model; its eos_token_id ends a request, and live_rows is an
                override.
            n_codes: of a frame.
            sampler: of the first code.
            excluded: ids that are never drawn as the first code.
            late: ids that are not drawn before the least number of frames of a request.
        """
        super().__init__()
        self.config = config
        self.model = backbone
        self.codec_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config)
        self.sampler = sampler
        self.n_codes = self.frame_width = n_codes
        self.streams: dict[str, TalkerStream] = {}
        allowed = torch.zeros(config.vocab_size)
        allowed[list(excluded)] = -torch.inf
        self.register_buffer("allowed", allowed, persistent=False)
        self._late = list(late)
        text = torch.empty(text_vocab, config.hidden_size)
        self.register_buffer("text_table", text, persistent=False)
        voices = torch.zeros(n_voice_rows, config.hidden_size)
        self.register_buffer("voices", voices, persistent=False)

    # --- what a family writes ---

    @abstractmethod
    def _embed_frames(self, codes: Tensor) -> Tensor:
        """The backbone's input [n, hidden] of whole frames [n, n_codes] int64."""

    @abstractmethod
    def _others(self, first: Tensor, hidden: Tensor, greedy: Tensor, draws: Tensor) -> Tensor:
        """The other codes [n, n_codes - 1] of frames.

        Args:
            first: [n] int64, the first codes.
            hidden: [n, hidden], the normalised states that chose them.
            greedy: [n] bool, requests that take the likeliest codes.
            draws: [n, n_codes - 1] of `draws_of`, for the others.
        """

    @abstractmethod
    def _ends(self, codes: Tensor) -> Tensor:
        """[n] bool, whether frames [n, n_codes] are no sound, but the end."""

    # --- the rest ---

    def prepare(self) -> None:
        """Prepare forward(), after the weights are loaded."""
        weight = self.codec_head.weight
        penalty = self.sampler.repetition
        self.rows = TalkerRows(
            n_rows=self.config.live_rows,
            max_frames=self.config.max_position_embeddings,
            hidden=0,
            n_codes=self.n_codes,
            codec_vocab=self.config.vocab_size if penalty and not penalty.window else 0,
            pad_id=0,
            device=weight.device,
            dtype=weight.dtype,
        )
        # A batch has at most as many requests as there are rows.
        shape = (self.config.live_rows, self.frame_width)
        self.frame_codes = torch.full(shape, -1, dtype=torch.int64, device=weight.device)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        rows, mode = forward_batch.req_pool_indices, forward_batch.forward_mode
        dropped = self.rows.n_dropped[rows]
        frame = (forward_batch.seq_lens - self.rows.prompt_len[rows] + dropped).clamp(min=0)
        if mode.is_decode():
            positions = positions + dropped
            embeds = self._embed_last_frames(rows, frame)
        else:
            positions = logical_positions(positions, forward_batch, self.streams)
            embeds = self._embed_extend(input_ids, forward_batch)
        hidden = self.model(input_ids, positions, forward_batch, embeds)
        output = self.logits_processor(input_ids, hidden, self.codec_head, forward_batch)
        if mode.is_extend():
            hidden = hidden[forward_batch.extend_seq_lens.cumsum(0) - 1]
        codes = self._drawn(output.next_token_logits, hidden, rows, frame)
        self.frame_codes[: len(codes)] = self._completed(codes, rows, frame)
        self._keep(codes, rows, frame, forward_batch)
        self._tell(codes, output.next_token_logits)
        return output

    def _embed_last_frames(self, rows: Tensor, frame: Tensor) -> Tensor:
        """Embeddings [n, hidden] of the frames that the previous step drew."""
        last = (frame - 1).clamp(0, self.rows.max_frames - 1)
        codes = self.rows.codes[rows, last].long()
        if self.rows.seen.shape[1]:
            first = codes[:, 0]
            # A Python scalar would be copied from pageable memory, which a CUDA graph cannot
            # capture.
            self.rows.seen[rows, first] = torch.ones_like(first, dtype=torch.bool)
        return self._embed_places(codes, rows, last)

    def _embed_places(self, codes: Tensor, rows: Tensor | int, frame: Tensor) -> Tensor:
        """The backbone's input [n, hidden] where rows have the codes [n, n_codes] of frames [n]."""
        return self._embed_frames(codes)

    def _embed_extend(self, input_ids: Tensor, forward_batch) -> Tensor:
        """Embeddings [n_tokens, hidden] of a prefill: prompts, and frames of retracted requests."""
        embeds = self._embed_prompt(input_ids)
        if not forward_batch.forward_mode.is_extend():
            return embeds
        at = 0
        for rid, prefix, n in chunks(forward_batch):
            stream, end = self.streams.get(rid), prefix + n
            if stream is not None and (brought := stream.audio_in(prefix, end)) is not None:
                rows, places = brought
                row_at = at + copy_to(places, embeds.device)
                embeds[row_at] = copy_to(rows, embeds.device, embeds.dtype)
            if stream is not None and end > stream.prompt_len:
                self._place_frames(embeds[at : at + n], stream, prefix)
            at += n
        return embeds

    def _embed_prompt(self, ids: Tensor) -> Tensor:
        """Places of frames have any embedding."""
        voice = ids - self.config.vocab_size - len(self.text_table)
        text = (ids - self.config.vocab_size).clamp(0, len(self.text_table) - 1)
        embeds = self.text_table[text]
        if not len(self.voices):
            return embeds
        rows = self.voices[voice.clamp(0, len(self.voices) - 1)]
        return torch.where((voice >= 0).unsqueeze(1), rows, embeds)

    def _place_frames(self, out: Tensor, stream: TalkerStream, prefix: int) -> None:
        """Embed frames again when a retracted request is prefilled with them."""
        first, row = max(stream.prompt_len - prefix, 0), stream.row
        assert row is not None  # the scheduler binds it before the forward pass
        places = range(prefix + first, prefix + len(out))
        frame = copy_to(torch.tensor([stream.frame_at(place) for place in places]), out.device)
        codes = self.rows.codes[row, frame].long()
        if self.rows.seen.shape[1]:
            codes0 = codes[:, 0]
            self.rows.seen[row, codes0] = torch.ones_like(codes0, dtype=torch.bool)
        out[first:] = self._embed_places(codes, row, frame)

    def _drawn(self, logits: Tensor, hidden: Tensor, rows: Tensor, frame: Tensor) -> Tensor:
        """The next frames, [n, n_codes].

        Noise depends on seed and frame alone, so a request's output does not depend on the other
        requests of its batch or on pauses.
        """
        state = self.rows
        greedy, seed = state.greedy[rows], state.seed[rows]
        window = self.sampler.window
        history = self._history(rows, frame, window)[..., 0] if window else None
        logits = logits + self.allowed
        if self.sampler.penalised_last and not all_greedy(greedy):
            logits = self.sampler.truncated(logits, state.temperature[rows], greedy)
        logits = self._penalised(logits, rows, history)
        if self._late:
            early = (frame < state.least[rows]).unsqueeze(1)
            for token in self._late:
                logits[:, token : token + 1].masked_fill_(early, -torch.inf)
        if all_greedy(greedy):
            first = logits.argmax(dim=-1)
        else:
            draw = draws_of(seed ^ FIRST_CODE_SALT, frame, 1)[:, 0]
            temperature = state.temperature[rows]
            first = self.sampler.choose(logits, temperature, greedy, draw, history)
        others = self._others(first, hidden, greedy, draws_of(seed, frame, self.n_codes - 1))
        return torch.cat((first.unsqueeze(1), others), dim=1)

    def _penalised(self, logits: Tensor, rows: Tensor, history: Tensor | None) -> Tensor:
        rule = self.sampler.repetition
        if rule is None:
            return logits
        if rule.window:
            assert history is not None
            times = self.sampler.times(history, logits.shape[-1])
        else:
            times = self.rows.seen[rows]
        return self.sampler.penalised(logits, times, self.rows.penalty[rows])

    def _history(self, rows: Tensor, frame: Tensor, window: int) -> Tensor:
        """[n, window, n_codes] int64, the newest frames; NO_CODE before the first."""
        back = torch.arange(window, 0, -1, device=frame.device)
        at = frame.unsqueeze(1) - back
        codes = self.rows.codes[rows.unsqueeze(1), at.clamp(min=0)].long()
        return torch.where((at < 0).unsqueeze(2), NO_CODE, codes)

    def _completed(self, codes: Tensor, rows: Tensor, frame: Tensor) -> Tensor:
        """[n, frame_width], the frames that are complete with the step that drew codes."""
        return codes

    def _keep(self, codes: Tensor, rows: Tensor, frame: Tensor, forward_batch) -> None:
        """Store the frames of the batch, except those that a chunk of a prefill has drawn before
        its prefill was complete."""
        if forward_batch.forward_mode.is_extend():
            streams = [self.streams.get(rid) for rid in forward_batch.rids]
            whole = [n for n, s in enumerate(streams) if s is None or not s.mid_prefill]
            if len(whole) < len(streams):
                at = copy_to(torch.tensor(whole, dtype=torch.int64), codes.device)
                codes, rows, frame = codes[at], rows[at], frame[at]
        frame = frame.clamp(max=self.rows.max_frames - 1)
        self.rows.codes[rows, frame] = codes.to(torch.int16)

    def _tell(self, codes: Tensor, logits: Tensor) -> None:
        """Have SGLang choose the first code, or the end; and the observer find no frame there."""
        ends = self._ends(codes)
        self.frame_codes[: len(codes)].masked_fill_(ends.unsqueeze(1), -1)
        token = self._tokens(codes).masked_fill(ends, self.config.eos_token_id)
        logits.fill_(-torch.inf).scatter_(1, token.unsqueeze(1), 0.0)

    def _tokens(self, codes: Tensor) -> Tensor:
        """[n], as which SGLang gets frames [n, n_codes] that are no end."""
        return codes[:, 0]
