"""SGLang's Qwen3-Omni thinker, with an output of hidden states for the talker: those at positions
of audio, pictures and videos.

It also accepts clips of different lengths in one prefill batch, which crash the upstream engine.
Nothing here reads from the device, or copies to it from pageable memory: a prefill with audio
would block the scheduler until the device has done all its work.
The audio encoder computes what SGLang's Qwen3OmniMoeAudioEncoder.forward does, with its lengths on
the host: on the device they would be read back several times for a batch, and in every layer.
The class keeps the upstream name, by which SGLang finds models and processors.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.vision import prepare_vision_attention_metadata
from sglang.srt.models.qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration as UpstreamThinker,
)
from sglang.srt.models.qwen3_omni_moe import _get_feat_extract_output_lengths as length_after_cnn
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_live.core import LAYER_FRAMES, VIDEO_FPS
from sglang_live.engine_channel.inbox import OUTBOX_ENV, RowsOutbox
from sglang_live.messages import Picture
from sglang_live.models.host_copy import copy_to, pinned


@dataclass(frozen=True, slots=True)
class Lengths:
    """
    chunks: mel frames of each chunk, which the convolutions see alone.
    after_cnn: positions of each chunk behind the convolutions.
    windows: positions that attend to each other, in order of the positions.
    """

    chunks: list[int]
    after_cnn: list[int]
    windows: list[int]

    @staticmethod
    def of(clips: list[int], chunk_frames: int, chunks_per_window: int) -> "Lengths":
        """clips: mel frames of each clip, at least one."""
        chunks: list[int] = []
        for n in clips:
            n_full, rest = divmod(n, chunk_frames)
            chunks += [chunk_frames] * n_full + ([rest] if rest else [])
        after_cnn = [length_after_cnn(n) for n in chunks]
        window = max(after_cnn) * chunks_per_window
        windows: list[int] = []
        for n in clips:
            n_full, rest = divmod(length_after_cnn(n), window)
            windows += [window] * n_full + ([rest] if rest else [])
        return Lengths(chunks, after_cnn, windows)


def encode(tower: nn.Module, frames: Tensor, clips: list[int]) -> Tensor:
    """
    Args:
        tower: SGLang's Qwen3OmniMoeAudioEncoder.
        frames: [n_mels, sum(clips)] on the tower's device and in its dtype.
        clips: mel frames of each clip, at least one.
    Returns:
        [n_positions, output_dim], flat over the clips.
    """
    chunk_frames = tower.n_window * 2
    lengths = Lengths.of(clips, chunk_frames, tower.n_window_infer // chunk_frames)
    padded = nn.utils.rnn.pad_sequence(frames.T.split(lengths.chunks), batch_first=True)
    embeds = _convolve(tower, padded.transpose(1, 2).unsqueeze(1))
    width = embeds.shape[1]
    places = [
        torch.arange(width * i, width * i + n, dtype=torch.int64)
        for i, n in enumerate(lengths.after_cnn)
    ]
    hidden = embeds.flatten(0, 1).index_select(0, copy_to(torch.cat(places), frames.device))
    ends = torch.tensor([0, *lengths.windows]).cumsum(0, dtype=torch.int32)
    metadata = prepare_vision_attention_metadata(
        copy_to(ends, frames.device), frames.device, max_seqlen=max(lengths.windows)
    )
    for layer in tower.layers:
        hidden = _encode_layer(layer, hidden, metadata)
    hidden = tower.act(tower.proj1(tower.ln_post(hidden))[0])
    return tower.proj2(hidden)[0]


def _convolve(tower: nn.Module, padded: Tensor) -> Tensor:
    """[n_chunks, 1, n_mels, n_frames] -> [n_chunks, n_positions, d_model], with positions."""
    parts = []
    for part in padded.split(tower.conv_chunksize):
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            part = F.gelu(convolution(part))
        parts.append(part)
    convolved = torch.cat(parts)
    n, channels, mels, width = convolved.shape
    flat = convolved.permute(0, 3, 1, 2).contiguous().view(n, width, channels * mels)
    embeds = tower.conv_out(flat)[0]
    positions = tower.positional_embedding.positional_embedding[:width]
    return embeds + positions.unsqueeze(0).to(embeds.dtype)


def _encode_layer(layer: nn.Module, hidden: Tensor, metadata: Any) -> Tensor:
    """SGLang's Qwen3OmniMoeAudioEncoderLayer.forward, which does not pass the metadata on."""
    hidden = hidden + layer.self_attn(
        x=layer.self_attn_layer_norm(hidden),
        cu_seqlens=metadata.cu_seqlens,
        forward_metadata=metadata,
    )
    inner = layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden))[0])
    hidden = hidden + layer.fc2(inner)[0]
    if hidden.dtype == torch.float16:
        bound = torch.finfo(hidden.dtype).max - 1000
        hidden = hidden.clamp(min=-bound, max=bound)
    return hidden


@dataclass(frozen=True, slots=True)
class MediaSpans:
    """Audio, pictures and videos of one request in a prefill batch.

    start: index of the request's first token in the batch.
    prefix: tokens of its session before that.
    spans: half-open spans of tokens of the session, ascending.
    clips: SGLang's items of those that are audio.
    pictures: those that are pictures or videos.
    """

    rid: str
    start: int
    prefix: int
    spans: list[tuple[int, int]]
    clips: list[Any]
    pictures: list[Picture]

    @property
    def positions(self) -> list[int]:
        return [at for begin, end in self.spans for at in range(begin, end)]

    def rows(self, states: Tensor) -> Tensor:
        """states: [n_tokens, hidden] of the batch -> [n_positions, hidden]."""
        shift = self.start - self.prefix
        return torch.cat([states[begin + shift : end + shift] for begin, end in self.spans])


def media_spans(batch: Any, merge: int, step: int) -> list[MediaSpans]:
    """Where a prefill batch has media, by the offsets that SGLang's processor found.

    merge: side of the square of patches that is one token. step: see Picture.
    """
    found, start = [], 0
    for rid, prefix, n, media in zip(
        batch.rids,
        batch.extend_prefix_lens_cpu,
        batch.extend_seq_lens_cpu,
        batch.mm_inputs,
        strict=True,
    ):
        spans, clips, pictures = [], [], []
        for item in media.mm_items if media is not None else ():
            runs = item.offsets or ()
            inside = [(max(first, prefix), min(last + 1, prefix + n)) for first, last in runs]
            inside = [(begin, end) for begin, end in inside if begin < end]
            if not inside:
                continue
            spans += inside
            if item.is_audio():
                clips.append(item)
                continue
            name = "image_grid_thw" if item.is_image() else "video_grid_thw"
            grids = item.model_specific_data[name].tolist()
            for (first, _), (layers, rows, columns) in zip(runs, grids, strict=True):
                pictures.append(Picture(first, rows // merge, columns // merge, layers, step))
        if spans:
            found.append(MediaSpans(rid, start, prefix, sorted(spans), clips, pictures))
        start += n
    return found


class Qwen3OmniMoeForConditionalGeneration(UpstreamThinker):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(config, quant_config, prefix)
        self.thinker.get_audio_feature = self._audio_features
        # SGLang's prefill graphs look for it here.
        self.is_mrope_enabled = self.thinker.is_mrope_enabled
        address = os.environ.get(OUTBOX_ENV)
        if not address:
            return
        # All ranks tap, because that may communicate; the states leave from one.
        is_first = get_parallel().tp_rank == 0
        self._rows_outbox = RowsOutbox(address) if is_first else None
        self._media: list[MediaSpans] = []
        layer_s = LAYER_FRAMES // VIDEO_FPS
        self._layer_step = config.talker_config.position_id_per_seconds * layer_s
        # The input of this layer is hidden_states[accept_hidden_layer] of the reference.
        self.thinker.model.layers_to_capture = [config.talker_config.accept_hidden_layer]
        self.thinker.model.register_forward_hook(self._tap, with_kwargs=True)
        self.forward = self._forward_tapped  # upstream also sets it per instance

    def _audio_features(self, items) -> Tensor:
        """Encode clips [n_clips of (1, n_mels, n_frames), masks] -> [n_placeholders, hidden].

        Upstream concatenates the padded features and fails when clips were padded differently.
        """
        tower = self.thinker.audio_tower
        weight = next(tower.parameters())
        clips, lengths = [], []
        for item in items:
            # The mask is on the host, and every clip is padded at its end.
            for clip, n in zip(
                item.feature, item.feature_attention_mask.sum(1).tolist(), strict=True
            ):
                clips.append(clip[:, :n])
                lengths.append(n)
        frames = torch.cat(clips, dim=1)
        return encode(tower, copy_to(frames, weight.device, weight.dtype), lengths)

    def _forward_tapped(self, input_ids, positions, forward_batch, **kwargs):
        # Media are dropped from the batch before the tap is reached.
        self._media = []
        if forward_batch.forward_mode.is_extend() and forward_batch.contains_mm_inputs():
            merge = self.config.thinker_config.vision_config.spatial_merge_size
            self._media = media_spans(forward_batch, merge, self._layer_step)
            if input_ids.is_cuda:
                # SGLang uploads the features of these clips before it encodes them.
                for item in (item for media in self._media for item in media.clips):
                    item.feature = pinned(item.feature)
        return self.thinker.forward(input_ids, positions, forward_batch, **kwargs)

    def _tap(self, module, args, kwargs, output):
        if not isinstance(output, tuple):
            return output
        hidden, captured = output
        if self._rows_outbox is not None:
            for media in self._media:
                rows = media.rows(captured[0])
                self._rows_outbox.send(media.rid, media.positions, rows, media.pictures)
        return hidden


EntryClass = Qwen3OmniMoeForConditionalGeneration
