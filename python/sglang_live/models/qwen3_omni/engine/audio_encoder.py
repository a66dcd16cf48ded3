"""The thinker's audio encoder, with its lengths computed on the host.

Same arithmetic as SGLang's Qwen3OmniMoeAudioEncoder.forward, which computes lengths on the device
and reads them back: several times for a batch of clips, and once more in every layer. Each of
these reads would block the scheduler until the device has done all its work.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.vision import prepare_vision_attention_metadata
from sglang.srt.models.qwen3_omni_moe import _get_feat_extract_output_lengths as length_after_cnn
from torch import Tensor, nn

from sglang_live.models.host_copy import copy_to


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
