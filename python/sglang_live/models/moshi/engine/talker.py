"""Moshi as an SGLang model: a step takes a frame of the user and draws one of its own, the text
token by the Llama, the codes by the depth transformer.

In a call position p has the frame that the step before has drawn, and the user's newest one; of
delayed codes those of the frame before. SGLang sees the text token. Prompt ids, with T text ids:

    [0, T)        a text token (what the model generates)
    T             the beginning: no stream has anything yet
    ROLE + t      text t, beside silence and the user's sine     ROLE = T + 1
    VOICE + r     row r of the table of voices                   VOICE = ROLE + T
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models.llama import LlamaModel
from torch import Tensor, nn

from sglang_live.models.host_copy import copy_to
from sglang_live.models.moshi.engine.depth import DepthTransformer
from sglang_live.models.moshi.engine.weights import places
from sglang_live.models.moshi.voices import SILENCE, SINE, read_voice
from sglang_live.models.speech_lm.engine.steps import all_greedy, chunks, logical_positions
from sglang_live.models.speech_lm.sampler import Sampler, draws_of
from sglang_live.models.speech_lm.talker_state import TalkerRows, TalkerStream

# Reference settings (moshi: LMGen). A request's temperature is that of its text.
TEXT_TOP_K, CODE_TOP_K = 25, 250
# Separates the noise of the text from that of the codes.
TEXT_SALT = 0x5DEECE66D


class Rotation(nn.Module):
    """RoPE of adjacent numbers, at any position: a table would end with a call of some hours.

    at() has to be called before the layers of a step.
    """

    def __init__(self, head_dim: int, base: float):
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("frequencies", base**-exponent, persistent=False)

    def at(self, positions: Tensor) -> None:
        angle = torch.outer(positions.double(), self.frequencies).unsqueeze(1)
        self._cos, self._sin = angle.cos().float(), angle.sin().float()

    def forward(self, _positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._turned(q), self._turned(k)

    def _turned(self, x: Tensor) -> Tensor:
        real, imaginary = x.float().view(len(x), -1, self.frequencies.shape[0], 2).unbind(-1)
        turned = (
            real * self._cos - imaginary * self._sin,
            real * self._sin + imaginary * self._cos,
        )
        return torch.stack(turned, dim=-1).view(x.shape).to(x.dtype)


class MoshiLM(nn.Module):
    """
    rows, frame_codes: allocated before graphs are captured, which refer to their memory. The rows
        keep the codes of its own frames, without their text, and those of the user's.
    frame_codes: [n_rows, 1 + n_codes] int64, by place in the batch: the text token and the codes
        that the last step drew.
    frame_lag, row_lag: see FrameLM.
    """

    frame_lag = row_lag = 0
    rows: TalkerRows
    frame_codes: Tensor

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__()
        own = config.moshi
        self.config = config
        self.n_codes, self._card = own["n_codes"], own["card"]
        self._has_roles = own["has_roles"]
        self.model = LlamaModel(config, quant_config, prefix="model")
        self.rotation = Rotation(config.head_dim, config.rope_parameters["rope_theta"])
        for layer in self.model.layers:
            layer.self_attn.rotary_emb = self.rotation
        self.text_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config)
        self.code_emb = nn.Parameter(
            torch.empty(2 * self.n_codes, self._card + 1, config.hidden_size)
        )
        self.sampler = Sampler(top_k=TEXT_TOP_K)
        self.depth = DepthTransformer(
            own, config.hidden_size, config.vocab_size, Sampler(top_k=CODE_TOP_K)
        )
        self.streams: dict[str, TalkerStream] = {}
        n_voice_rows = config.live_voice_rows
        for name, shape in (
            ("begin", (config.hidden_size,)),
            ("silence", (config.hidden_size,)),
            ("voices", (n_voice_rows, config.hidden_size)),
        ):
            self.register_buffer(name, torch.zeros(shape), persistent=False)
        delayed = torch.tensor(own["delays"][1:], dtype=torch.bool)
        begun = torch.full((2 * self.n_codes,), self._card)
        if self._has_roles:
            begun = torch.tensor([*SILENCE[: self.n_codes], *SINE[: self.n_codes]])
        self.register_buffer("delayed", delayed, persistent=False)
        # What the delayed streams have at the first frame behind the prompt.
        self.register_buffer("before", begun, persistent=False)
        offsets = torch.arange(2 * self.n_codes) * (self._card + 1)
        self.register_buffer("offsets", offsets, persistent=False)

    # --- a step ---

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        rows, mode = forward_batch.req_pool_indices, forward_batch.forward_mode
        dropped = self.rows.n_dropped[rows]
        frame = (forward_batch.seq_lens - self.rows.prompt_len[rows] + dropped).clamp(min=0)
        if mode.is_decode():
            positions = positions + dropped
            embeds = self._embed_frames(input_ids, rows, (frame - 1).clamp(min=0))
        else:
            positions = logical_positions(positions, forward_batch, self.streams)
            embeds = self._embed_extend(input_ids, forward_batch)
        self.rotation.at(positions)
        hidden = self.model(input_ids, positions, forward_batch, embeds)
        output = self.logits_processor(input_ids, hidden, self.text_head, forward_batch)
        if mode.is_extend():
            hidden = hidden[forward_batch.extend_seq_lens.cumsum(0) - 1]
        text, codes = self._drawn(output.next_token_logits, hidden, rows, frame)
        self._keep(text, codes, rows, frame, forward_batch)
        output.next_token_logits.fill_(-torch.inf).scatter_(1, text.unsqueeze(1), 0.0)
        return output

    def _embed_frames(self, text: Tensor, rows: Tensor, frame: Tensor) -> Tensor:
        """The model's input [n, hidden] of frames behind the prompt.

        Args:
            text: [n] int64, their text tokens.
            frame: [n] int64, their numbers.
        """
        state, n = self.rows, self.n_codes
        at, at_before = frame % state.max_frames, (frame - 1) % state.max_frames
        own = state.codes[rows, at].long()
        heard, heard_before = state.text_ids[rows, at], state.text_ids[rows, at_before]
        heard = torch.where(self.delayed[n:], heard_before, heard).long()
        codes = torch.cat((own, heard), dim=1)
        is_first = (frame == 0).unsqueeze(1) & self.delayed
        codes = torch.where(is_first, self.before, codes)
        # Rows that pad a captured batch keep the id that was in their place: that of a prompt too.
        text = text.clamp(max=self.config.vocab_size - 1)
        embeds: Tensor = self.model.embed_tokens(text) + self._embed_codes(codes)
        return embeds

    def _embed_codes(self, codes: Tensor) -> Tensor:
        """[n, hidden] of codes [n, 2 * n_codes] int64, its own before the user's."""
        return F.embedding_bag(codes + self.offsets, self.code_emb.flatten(0, 1), mode="sum")

    def _embed_extend(self, input_ids: Tensor, forward_batch) -> Tensor:
        """[n_tokens, hidden] of a prefill: prompts, and frames that are computed again."""
        embeds = self._embed_prompt(input_ids)
        if not forward_batch.forward_mode.is_extend():
            return embeds
        at = 0
        for rid, prefix, n in chunks(forward_batch):
            stream = self.streams.get(rid)
            if stream is not None and prefix + n > stream.prompt_len:
                self._place_frames(embeds[at : at + n], input_ids[at : at + n], stream, prefix)
            at += n
        return embeds

    def _embed_prompt(self, ids: Tensor) -> Tensor:
        """Places of frames have any embedding."""
        n_text = self.config.vocab_size
        role, voice = ids - n_text - 1, ids - 2 * n_text - 1
        embeds = self.begin.expand(len(ids), -1)
        if not self._has_roles:
            return embeds.clone()
        said = self.model.embed_tokens(role.clamp(0, n_text - 1)) + self.silence
        embeds = torch.where((role >= 0).unsqueeze(1), said, embeds)
        rows = self.voices[voice.clamp(0, len(self.voices) - 1)]
        return torch.where((voice >= 0).unsqueeze(1), rows, embeds)

    def _place_frames(self, out: Tensor, ids: Tensor, stream: TalkerStream, prefix: int) -> None:
        first, row = max(stream.prompt_len - prefix, 0), stream.row
        assert row is not None  # the scheduler binds it before the forward pass
        spots = range(prefix + first, prefix + len(out))
        frame = copy_to(torch.tensor([stream.frame_at(spot) for spot in spots]), out.device)
        out[first:] = self._embed_frames(ids[first:], torch.full_like(frame, row), frame)

    def _drawn(
        self, logits: Tensor, hidden: Tensor, rows: Tensor, frame: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Text tokens [n] and codes [n, n_codes] of the next frames.

        Noise depends on seed and frame alone, so a call does not depend on the others of its batch.
        """
        greedy, seed = self.rows.greedy[rows], self.rows.seed[rows]
        if all_greedy(greedy):
            text, draws = logits.argmax(dim=-1), None
        else:
            draw = draws_of(seed ^ TEXT_SALT, frame, 1)[:, 0]
            text = self.sampler.choose(logits, self.rows.temperature[rows], greedy, draw)
            draws = draws_of(seed, frame, self.n_codes)
        forced = None
        if self._has_roles:
            # The prompt's last frame of silence goes on in the delayed codes of the first frame.
            n = self.n_codes
            is_known = (frame == 0).unsqueeze(1) & self.delayed[:n]
            forced = torch.where(is_known, self.before[:n], -1)
        return text, self.depth(hidden, text, forced, greedy, draws)

    def _keep(
        self, text: Tensor, codes: Tensor, rows: Tensor, frame: Tensor, forward_batch
    ) -> None:
        """Store the frames of the batch, except those that a chunk of a prefill has drawn before
        its prefill was complete."""
        self.frame_codes[: len(codes)] = torch.cat((text.unsqueeze(1), codes), dim=1)
        if forward_batch.forward_mode.is_extend():
            streams = [self.streams.get(rid) for rid in forward_batch.rids]
            part = [n for n, s in enumerate(streams) if s is not None and s.mid_prefill]
            if part:
                whole = [n for n in range(len(streams)) if n not in part]
                at = copy_to(torch.tensor(whole, dtype=torch.int64), codes.device)
                codes, rows, frame = codes[at], rows[at], frame[at]
        self.rows.codes[rows, frame % self.rows.max_frames] = codes.to(torch.int16)

    # --- weights ---

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params, filled = dict(self.named_parameters()), Counter[str]()
        n_text = self.config.vocab_size
        for name, tensor in weights:
            found = places(name, self.n_codes)
            if found is None:
                raise ValueError(f"unknown weight {name} of Moshi")
            for target, step in found:
                param, part = params[target].data, tensor
                if step is not None:
                    param = param[step.place]
                    if step.joined:
                        part = tensor[step.place * len(param) :][: len(param)]
                if name == "text_emb.weight":
                    self.begin.copy_(tensor[n_text])
                    part, param = tensor[:n_text], param[:n_text]
                    params[target].data[n_text:].zero_()
                elif name == "text_linear.weight":
                    param = param[:n_text]
                    params[target].data[n_text:].zero_()
                if part.dim() == 3 and part.shape[:2] == (1, 1):
                    part = part[0, 0]
                if part.shape != param.shape:
                    raise ValueError(
                        f"weight {name} of Moshi is {list(part.shape)}, not {list(param.shape)}"
                    )
                param.copy_(part)
                filled[target] += param.numel()
        padded = {"model.embed_tokens.weight", "text_head.weight"}
        wanted = {
            name: n_text * param.shape[1] if name in padded else param.numel()
            for name, param in params.items()
        }
        if lacking := sorted(name for name, n in wanted.items() if filled[name] != n):
            raise ValueError(f"checkpoint lacks weights of Moshi: {lacking[:8]}")
        self._prepare()

    def _prepare(self) -> None:
        weight = self.text_head.weight
        device = weight.device
        initial = torch.full((1, 2 * self.n_codes), self._card, device=device)
        self.begin += self._embed_codes(initial)[0].to(self.begin.dtype)
        if self._has_roles:
            self.silence.copy_(self._embed_codes(self.before.unsqueeze(0))[0])
            self._fill_voices()
        self.rows = TalkerRows(
            n_rows=self.config.live_rows,
            max_frames=self.config.live_frames,
            hidden=0,
            n_codes=self.n_codes,
            codec_vocab=0,
            pad_id=0,
            device=device,
            dtype=weight.dtype,
            n_heard=self.n_codes,
            is_ring=True,
        )
        # A batch has at most as many requests as there are rows.
        shape = (self.config.live_rows, 1 + self.n_codes)
        self.frame_codes = torch.full(shape, -1, dtype=torch.int64, device=device)

    def _fill_voices(self) -> None:
        found = []
        for file in self.config.live_voices:
            rows, codes = read_voice(Path(file))
            # Behind the voice is silence; what of it is delayed still is the voice's.
            codes[1, 1:] = torch.where(self.delayed.cpu(), codes[1, 1:], self.before.cpu())
            codes[1, 0] = 3
            codes = codes.to(self.voices.device)
            last = self.model.embed_tokens(codes[:, 0]) + self._embed_codes(codes[:, 1:])
            found += [rows.to(last), last]
        self.voices.copy_(torch.cat(found))


EntryClass = MoshiLM
