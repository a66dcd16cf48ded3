"""Neural codecs that several families of models share.

Here is what is known of them without torch: the config of a SNAC checkpoint, as that of
hubertsiuzdak/snac_24khz, and which Mimi can be streamed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import read_json

# In the place of every code of the frames behind a stream's last one.
END_CODE = -1
WEIGHTS = "pytorch_model.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnacConfig:
    """As config.json has it; what the decoder does not need is left out.

    Attributes:
        vq_strides: latent columns per code of each level, the coarsest first.
        decoder_rates: columns that each block makes of one.
        noise: whether blocks add noise.
        depthwise: whether the first convolution is, with another behind it.
        bounded: whether the sound goes through a tanh.
    """

    sampling_rate: int
    codebook_size: int
    vq_strides: tuple[int, ...]
    decoder_rates: tuple[int, ...]
    noise: bool
    depthwise: bool = True
    bounded: bool = True

    @property
    def ahead_frames(self) -> int:
        """Frames behind a frame that its sound needs, by the kernels of its layers (snac.py): of
        7 columns, and in each block of 3 units with dilations of 1, 3 and 9."""
        ahead = 3
        for rate in self.decoder_rates:
            ahead = ahead * rate + -(-rate // 2) + 39
        return math.ceil((ahead + 3) / (self.vq_strides[0] * math.prod(self.decoder_rates)))

    @staticmethod
    def load(path: Path) -> "SnacConfig":
        """Raises BadInputError if the directory is no checkpoint of a SNAC that streams."""
        if not (path / WEIGHTS).is_file():
            raise BadInputError(f"{path} has no {WEIGHTS}, the weights of SNAC")
        config = read_json(path / "config.json")
        try:
            read = SnacConfig(
                sampling_rate=config["sampling_rate"],
                codebook_size=config["codebook_size"],
                vq_strides=tuple(config["vq_strides"]),
                decoder_rates=tuple(config["decoder_rates"]),
                noise=config["noise"],
            )
            attention, depthwise = config["attn_window_size"], config["depthwise"]
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}: it is no SNAC") from error
        if attention is not None or not depthwise:
            raise BadInputError(
                f"{path}: only SNAC with depthwise convolutions and without attention can be "
                "decoded as a stream: use the one of 24 kHz"
            )
        return read


# By name in config.json; a config that lacks one has this value.
_STREAMED_MIMI: Mapping[str, Any] = {
    "sampling_rate": 24_000,
    "audio_channels": 1,
    "use_causal_conv": True,
    "pad_mode": "constant",
    "trim_right_ratio": 1.0,
    "use_conv_shortcut": False,
    "codebook_size": 2048,
    "num_quantizers": 32,
    "upsampling_ratios": (8, 6, 5, 4),
}
_MIMI_SIZES = ("codebook_size", "num_quantizers", "upsampling_ratios")
# Of a position of its transformers; a frame has two.
_MIMI_POSITION_S = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class MimiFacts:
    """Of a Mimi that can be streamed: its convolutions are causal, and pad with zeros."""

    sampling_rate: int
    codebook_size: int
    n_quantizers: int
    samples_per_frame: int

    @staticmethod
    def of(config: Mapping[str, Any], source: str) -> "MimiFacts":
        """
        Args:
            config: of a transformers checkpoint, as that of kyutai/mimi.
            source: for errors.
        Raises:
            BadInputError: it is no Mimi, or one that cannot be streamed.
        """
        if config.get("model_type") != "mimi":
            raise BadInputError(f"{source}: its codec is {config.get('model_type')!r}, not mimi")
        found = {name: config.get(name, value) for name, value in _STREAMED_MIMI.items()}
        for name, value in _STREAMED_MIMI.items():
            if name not in _MIMI_SIZES and found[name] != value:
                raise BadInputError(f"{source}: a Mimi with {name} {found[name]} is not streamed")
        per_position = math.prod(found["upsampling_ratios"])
        rate = found["sampling_rate"]
        if per_position != round(rate * _MIMI_POSITION_S):
            raise BadInputError(f"{source}: its frames are not two positions of 40 ms each")
        return MimiFacts(
            sampling_rate=rate,
            codebook_size=found["codebook_size"],
            n_quantizers=found["num_quantizers"],
            samples_per_frame=2 * per_position,
        )
