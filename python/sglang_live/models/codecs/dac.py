"""DAC's decoder for streams, as a SNAC of one rate: its tensors by SNAC's names.

Source: DacDecoder of transformers (descript/dac_*).
"""

import re

from torch import Tensor

# transformers names the layers; descript, and SNAC after it, number them.
_UNIT = {"snake1": 0, "conv1": 1, "snake2": 2, "conv2": 3}
_NAME = re.compile(
    r"(?:block\.(?P<block>\d+)\.(?:res_unit(?P<unit>\d)\.)?)?(?P<layer>\w+)\.(?P<kind>\w+)"
)


def as_snac(tensors: dict[str, Tensor], n_blocks: int) -> dict[str, Tensor]:
    """The tensors of a decoder, by SNAC's names.

    tensors: by the names of transformers, behind that of the decoder.
    """
    return {_renamed(name, n_blocks): tensor for name, tensor in tensors.items()}


def _renamed(name: str, n_blocks: int) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    block, unit, layer, kind = match["block"], match["unit"], match["layer"], match["kind"]
    if block is None:
        place = {"conv1": 0, "snake1": n_blocks + 1, "conv2": n_blocks + 2}.get(layer)
        return f"decoder.model.{place}.{kind}"
    of_block = f"decoder.model.{int(block) + 1}.block"
    if unit is None:
        return f"{of_block}.{0 if layer == 'snake1' else 1}.{kind}"
    return f"{of_block}.{int(unit) + 1}.block.{_UNIT[layer]}.{kind}"
