"""The memory of one server's GPUs: weights, pools of KV, and the sessions that fit.

A pool gets three quarters of what is left, because activations, graphs and libraries are an
estimate, and no more than SGLang would give it.
"""

from dataclasses import dataclass

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import DeviceModel
from sglang_live.extensions.planner.hardware import ModelSizes
from sglang_live.extensions.planner.simulation.placement import Placement

GIB = 1 << 30
_POOL_SHARE = 0.75
# --mem-fraction-static: SGLang leaves the rest of what an engine found free at its start.
MEM_FRACTION = 0.85
# Where the talker shares its GPU with a thinker: 24 of the longest responses, 100 of 1,000 tokens.
_TALKER_TOKENS_BESIDE, _TALKER_TOKENS_MOST = 100_000, 1_000_000
_ROUND_TOKENS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What takes memory on a GPU."""

    name: str
    gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """
    device: number of the GPU in its server.
    parts: what takes its memory, the pools last.
    spare_gib: what is left.
    """

    device: int
    free_gib: float
    parts: tuple[Part, ...]

    @property
    def spare_gib(self) -> float:
        return self.free_gib - sum(part.gib for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """
    fp8: whether the thinker must be in FP8 to fit.
    thinker_tokens, talker_tokens: KV pool of each replica.
    gpus: of a divided thinker the first one, as which the others are.
    """

    fp8: bool
    thinker_tokens: int
    talker_tokens: int
    gpus: tuple[GpuMemory, ...]


def memory_of(
    placement: Placement, free_gib: float, sizes: ModelSizes, model: DeviceModel
) -> Memory:
    """
    Raises:
        BadInputError: a stage does not fit on its GPU.
    """
    token_gib = model.thinker.kv_token_bytes / placement.thinker_tp / GIB
    least_gib = 10 * _ROUND_TOKENS * token_gib
    for fp8 in (False, True):
        try:
            return _memory(placement, free_gib, sizes, model, fp8, least_gib)
        except BadInputError as error:
            refusal = error
    raise refusal


def _memory(
    placement: Placement,
    free_gib: float,
    sizes: ModelSizes,
    model: DeviceModel,
    fp8: bool,
    least_gib: float,
) -> Memory:
    thinker, talker = placement.thinkers[0], placement.talkers[0]
    beside = talker in placement.thinkers
    talker_token_gib = model.talker.kv_token_bytes / GIB
    thinker_token_gib = model.thinker.kv_token_bytes / placement.thinker_tp / GIB
    fixed = {number: _fixed(placement, number, sizes, fp8) for number in _devices(placement)}
    room_gib = {number: _room_gib(parts, free_gib) for number, parts in fixed.items()}
    talker_tokens = _TALKER_TOKENS_BESIDE
    if not beside:
        talker_tokens = min(_TALKER_TOKENS_MOST, _tokens(room_gib[talker], talker_token_gib))
    for_thinker_gib = room_gib[thinker] - (talker_tokens * talker_token_gib if beside else 0)
    if for_thinker_gib < least_gib or talker_tokens < _TALKER_TOKENS_BESIDE:
        raise BadInputError(
            f"{sizes.name} does not fit: of {free_gib:g} GiB {max(0.0, for_thinker_gib):.0f} are "
            "left for the thinker's KV"
        )
    thinker_tokens = _tokens(for_thinker_gib, thinker_token_gib)
    return Memory(
        fp8=fp8,
        thinker_tokens=thinker_tokens,
        talker_tokens=talker_tokens,
        gpus=tuple(
            GpuMemory(
                device=number,
                free_gib=free_gib,
                parts=(
                    *parts,
                    *_pool("talker", number in placement.talkers, talker_tokens, talker_token_gib),
                    *_pool(
                        "thinker", number in placement.thinkers, thinker_tokens, thinker_token_gib
                    ),
                ),
            )
            for number, parts in fixed.items()
        ),
    )


def _tokens(gib: float, token_gib: float) -> int:
    return int(gib / token_gib) // _ROUND_TOKENS * _ROUND_TOKENS


def _room_gib(parts: list[Part], free_gib: float) -> float:
    """For the pools of a GPU. The last part is the processes', which SGLang does not count."""
    weights_gib = sum(part.gib for part in parts[:-1])
    left_gib = free_gib - weights_gib - parts[-1].gib
    return min(_POOL_SHARE * left_gib, MEM_FRACTION * free_gib - weights_gib)


def _pool(stage: str, is_there: bool, n_tokens: int, token_gib: float) -> tuple[Part, ...]:
    if not is_there:
        return ()
    return (Part(name=f"KV of {n_tokens:,} tokens in the {stage}", gib=n_tokens * token_gib),)


def _devices(placement: Placement) -> list[int]:
    return sorted({*placement.thinkers, *placement.talkers, *placement.vocoders})


def _fixed(placement: Placement, number: int, sizes: ModelSizes, fp8: bool) -> list[Part]:
    """Weights and processes on one device."""
    parts, n_processes = [], 0
    if number in placement.thinkers:
        whole_gib = sizes.thinker_fp8_gib if fp8 else sizes.thinker_gib
        divided_gib = (whole_gib - sizes.encoders_gib) / placement.thinker_tp
        name = f"thinker in {'FP8' if fp8 else 'bf16'}"
        if placement.thinker_tp > 1:
            name += f", divided by {placement.thinker_tp}"
        parts.append(Part(name=name, gib=divided_gib + sizes.encoders_gib))
        n_processes += 1
    if number in placement.talkers:
        parts.append(Part(name="talker", gib=sizes.talker_gib))
        n_processes += 1
    if number in placement.vocoders:
        parts.append(Part(name="vocoder", gib=sizes.vocoder_gib))
        n_processes += 1
    name = f"activations, graphs, libraries of {n_processes} processes"
    return [*parts, Part(name=name, gib=n_processes * sizes.process_gib)]
