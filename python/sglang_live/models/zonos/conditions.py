"""What a prompt of Zonos says beside its phonemes, as embeddings: one row for each condition.

Source: zonos/conditioning.py (Zyphra/Zonos, Apache-2.0).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.zonos.family import CONDITIONS, PHONEMES, SPEAKER

_NAME = "prefix_conditioner."


class Conditions:
    """
    Args:
        config: prefix_conditioner of config.json.
        tensors: those of prefix_conditioner by their names, in float32.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]):
        self._conditioners: Sequence[Mapping[str, Any]] = config["conditioners"]
        self._projects = config["projection"] == "linear"
        self._tensors = tensors

    def phonemes(self) -> Tensor:
        """[n_phonemes, hidden]."""
        names = [one["name"] for one in self._conditioners]
        return self._finished(self._of(names.index(PHONEMES), "phoneme_embedder.weight"))

    def rows(self, *, guided: bool) -> Tensor:
        """[n_conditions, hidden] in their order; not guided: of the prompt that tells nothing."""
        found = [
            self._row(n, one, guided)
            for n, one in enumerate(self._conditioners)
            if one["name"] != PHONEMES
        ]
        return self._finished(torch.stack(found))

    def speakers(self, embeddings: Tensor) -> Tensor:
        """[n, hidden] of speakers' embeddings [n, n_values]."""
        names = [one["name"] for one in self._conditioners]
        n, rows = names.index(SPEAKER), embeddings
        if self._conditioners[n].get("projection") == "linear":
            rows = F.linear(rows, self._of(n, "project.weight"), self._of(n, "project.bias"))
        return self._finished(rows)

    def _row(self, n: int, one: Mapping[str, Any], guided: bool) -> Tensor:
        can_be_left = one.get("uncond_type") == "learned"
        if can_be_left and not (guided and one["name"] in CONDITIONS):
            return self._of(n, "uncond_vector")
        told = torch.tensor(CONDITIONS[one["name"]])
        if one["type"] == "IntegerConditioner":
            row = self._of(n, "int_embedder.weight")[int(told) - one.get("min_val", 0)]
        elif one["type"] == "FourierConditioner":
            if one["name"] == "emotion":
                told = told / told.sum()
            low, high = one.get("min_val", 0.0), one.get("max_val", 1.0)
            angle = 2 * math.pi * self._of(n, "weight") @ ((told - low) / (high - low)).float()
            row = torch.cat((angle.cos(), angle.sin()))
        else:
            row = told.float()
        if one.get("projection") == "linear":
            row = F.linear(row, self._of(n, "project.weight"), self._of(n, "project.bias"))
        return row

    def _of(self, n: int, name: str) -> Tensor:
        return self._tensors[f"{_NAME}conditioners.{n}.{name}"]

    def _finished(self, rows: Tensor) -> Tensor:
        if self._projects:
            weight = self._tensors[f"{_NAME}project.weight"]
            rows = F.linear(rows, weight, self._tensors[f"{_NAME}project.bias"])
        weight = self._tensors[f"{_NAME}norm.weight"]
        return F.layer_norm(rows, weight.shape, weight, self._tensors[f"{_NAME}norm.bias"])
