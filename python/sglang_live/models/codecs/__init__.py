"""Decoders of neural codecs that several families of models share.

Here is what is known of them without torch: the config of a SNAC checkpoint, as that of
hubertsiuzdak/snac_24khz.
"""

from dataclasses import dataclass
from pathlib import Path

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
    """

    sampling_rate: int
    codebook_size: int
    vq_strides: tuple[int, ...]
    decoder_rates: tuple[int, ...]
    noise: bool

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
