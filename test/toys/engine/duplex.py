import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models.llama import LlamaModel
from torch import Tensor, nn

from sglang_live.models.speech_lm.engine.steps import logical_positions
from sglang_live.models.speech_lm.talker_state import TalkerRows, TalkerStream
from test.toys.counting import N_CODES
from test.toys.duplex import N_BOOKS, VOCAB
from test.toys.engine.weights import load


class ToyDuplex(nn.Module):
    """Not for calls that go on behind the frames of another engine."""

    frame_lag = row_lag = 0
    rows: TalkerRows
    frame_codes: Tensor

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, quant_config, prefix="model")
        self.text_head = ParallelLMHead(VOCAB, config.hidden_size)
        self.code_table = nn.Parameter(torch.empty(N_BOOKS * N_CODES, config.hidden_size))
        self.logits_processor = LogitsProcessor(config)
        self.streams: dict[str, TalkerStream] = {}
        self.register_buffer("offsets", torch.arange(N_BOOKS) * N_CODES, persistent=False)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        rows = forward_batch.req_pool_indices
        dropped = self.rows.n_dropped[rows]
        frame = (forward_batch.seq_lens - self.rows.prompt_len[rows] + dropped).clamp(min=0)
        # The prompt is as the last text token, so that counting begins with the first one.
        embeds = self.model.embed_tokens(input_ids.clamp(max=VOCAB - 1))
        if forward_batch.forward_mode.is_decode():
            positions = positions + dropped
            heard = self.rows.text_ids[rows, (frame - 1) % self.rows.max_frames]
            embeds = embeds + self.code_table[heard + self.offsets].sum(dim=1)
        else:
            positions = logical_positions(positions, forward_batch, self.streams)
        hidden = self.model(input_ids, positions, forward_batch, embeds)
        output = self.logits_processor(input_ids, hidden, self.text_head, forward_batch)
        if forward_batch.forward_mode.is_extend():
            hidden = hidden[forward_batch.extend_seq_lens.cumsum(0) - 1]
        said = (hidden @ self.code_table.T).unflatten(1, (N_BOOKS, N_CODES)).argmax(dim=2)
        text = output.next_token_logits.argmax(dim=1, keepdim=True)
        self.frame_codes[: len(said)] = torch.cat((text, said), dim=1)
        self.rows.codes[rows, frame % self.rows.max_frames] = said.to(torch.int16)
        return output

    def load_weights(self, weights) -> None:
        load(self, weights)
        device = self.code_table.device
        self.rows = TalkerRows(
            n_rows=self.config.live_rows,
            max_frames=self.config.live_frames,
            hidden=0,
            n_codes=N_BOOKS,
            codec_vocab=0,
            pad_id=0,
            device=device,
            dtype=self.code_table.dtype,
            n_heard=N_BOOKS,
            is_ring=True,
        )
        shape = (self.config.live_rows, 1 + N_BOOKS)
        self.frame_codes = torch.full(shape, -1, dtype=torch.int64, device=device)


EntryClass = ToyDuplex
