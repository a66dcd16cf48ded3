"""SGLang's Qwen3-Omni thinker, with an output of hidden states at audio positions, for the talker.

It also accepts clips of different lengths in one prefill batch, which crash the upstream engine.
The class keeps the upstream name, by which SGLang finds models and processors.
"""

import os
from contextlib import nullcontext

import torch
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.models.qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration as UpstreamThinker,
)
from sglang.srt.runtime_context import get_parallel

from sglang_live.engine_channel.inbox import OUTBOX_ENV, RowsOutbox
from sglang_live.telemetry.forward_log import ForwardLog


class Qwen3OmniMoeForConditionalGeneration(UpstreamThinker):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(config, quant_config, prefix)
        self.thinker.get_audio_feature = self._audio_features
        self._log = ForwardLog.from_env("thinker")
        address = os.environ.get(OUTBOX_ENV)
        if not address:
            return
        # All ranks tap, because that may communicate; the states leave from one.
        is_first = get_parallel().tp_rank == 0
        self._rows_outbox = RowsOutbox(address) if is_first else None
        self._audio_at: torch.Tensor | None = None
        # The input of this layer is hidden_states[accept_hidden_layer] of the reference.
        self.thinker.model.layers_to_capture = [config.talker_config.accept_hidden_layer]
        self.thinker.model.register_forward_hook(self._tap, with_kwargs=True)
        self.forward = self._forward_tapped  # upstream also sets it per instance

    def _audio_features(self, items) -> torch.Tensor:
        """Encode clips [n_clips of (1, n_mels, n_frames), masks] -> [n_placeholders, hidden].

        Upstream concatenates the padded features and fails when clips were padded differently.
        """
        tower = self.thinker.audio_tower
        weight = next(tower.parameters())
        clips = []
        for item in items:
            is_audio = item.feature_attention_mask.bool().to(item.feature.device)
            clips.append(item.feature.permute(0, 2, 1)[is_audio].permute(1, 0))
        frames = torch.cat(clips, dim=1).to(weight.device, weight.dtype)
        lengths = [n for item in items for n in item.feature_attention_mask.sum(1).tolist()]
        n_frames = torch.tensor(lengths, device=weight.device)
        return tower(frames, feature_lens=n_frames).last_hidden_state

    def _forward_tapped(self, input_ids, positions, forward_batch, **kwargs):
        # Placeholder ids are clamped and media dropped from the batch before the tap is reached.
        self._audio_at = None
        is_prefill = forward_batch.forward_mode.is_extend()
        if self._rows_outbox is not None and is_prefill and forward_batch.contains_audio_inputs():
            self._audio_at = input_ids >= MM_PAD_SHIFT_VALUE
        with self._log.span() if self._log else nullcontext():
            return self.thinker.forward(input_ids, positions, forward_batch, **kwargs)

    def _tap(self, module, args, kwargs, output):
        if not isinstance(output, tuple):
            return output
        hidden, captured = output
        if self._audio_at is not None:
            batch = kwargs["forward_batch"]
            self._send_rows(batch, captured[0])
        return hidden

    def _send_rows(self, batch, states: torch.Tensor) -> None:
        """states: [n_tokens, hidden], flat over the requests of one prefill batch."""
        assert self._audio_at is not None and self._rows_outbox is not None
        begin = 0
        for rid, prefix, n in zip(
            batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True
        ):
            at = self._audio_at[begin : begin + n].nonzero(as_tuple=True)[0]
            if len(at):
                positions = (at + prefix).tolist()
                self._rows_outbox.send(rid, positions, states[begin : begin + n][at])
            begin += n


EntryClass = Qwen3OmniMoeForConditionalGeneration
