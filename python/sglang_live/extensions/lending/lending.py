"""What --lend and --borrow add to a server: parts of schedulers, lenders, and the broker."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from sglang_live.devices import UsedDevices
from sglang_live.extension import Addition
from sglang_live.extensions.lending.broker import LeaseBroker
from sglang_live.extensions.lending.channel import BORROW, LEASES_ENV, LEND, lease_socket
from sglang_live.extensions.lending.policy import LeaseConfig
from sglang_live.model_flags import check_fits
from sglang_live.models.family import ModelFacts
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import loopback_address

# A process beside the stages that has memory to lend and no engine. It serves no session.
LENDER = "lender"
_PART = "sglang_live.extensions.lending.engine.part:lending_part"
_LENDER_STAGE = "sglang_live.extensions.lending.lender:LenderStage"
# With it, SGLang on a GPU sizes the pool after its graphs are captured, and allocates it in a way
# of its own.
_POST_CAPTURE_ENV = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
_GIB = 1 << 30


class Lending(Addition):
    def __init__(self, config: LeaseConfig):
        self._config = config
        self.broker = LeaseBroker()

    def check(self, model: ModelFacts) -> None:
        n_bytes = self._config.lent_bytes
        check_fits(f"--lend-memory-gib {n_bytes / _GIB:g}", n_bytes, without_gpu=True)

    def devices(self) -> Iterable[UsedDevices]:
        lent = self._config.lent_devices if self._config.lent_bytes else ()
        names = self._config.names_devices
        return [UsedDevices("--lend-memory-device", (device,), names) for device in lent]

    def stages(self, specs: Sequence[StageSpec]) -> list[StageSpec]:
        roles = self._config.roles
        borrowers = [spec for spec in specs if roles.get(spec.stage) == BORROW]
        with_roles = [
            _in_role(spec, roles[spec.stage]) if spec.stage in roles else spec for spec in specs
        ]
        return [*with_roles, *self._lenders(borrowers)]

    def _lenders(self, borrowers: list[StageSpec]) -> list[StageSpec]:
        """A lender without an engine for each of these, if there are any."""
        if not self._config.lent_bytes:
            return []
        devices = self._config.lent_devices
        return [
            StageSpec(
                stage=LENDER,
                replica=number,
                model_path=spec.model_path,
                family=spec.family,
                cache_dir=spec.cache_dir,
                address=loopback_address(Path(spec.run_dir), LENDER, number),
                same_host=True,
                run_dir=spec.run_dir,
                served_name=spec.served_name,
                device=devices[number % len(devices)],
                engine_args={
                    "n_bytes": self._config.lent_bytes,
                    "n_ranks": spec.engine_args.get("tp_size", 1),
                },
                factory=_LENDER_STAGE,
                policies=spec.policies,
                log_format=spec.log_format,
            )
            for number, spec in enumerate(borrowers)
        ]

    def start(self, run_dir: Path) -> None:
        self.broker.start(lease_socket(run_dir))

    async def stop(self) -> None:
        self.broker.stop()


def _in_role(spec: StageSpec, role: str) -> StageSpec:
    added = {LEASES_ENV: f"{role}:{lease_socket(Path(spec.run_dir))}"}
    if role == LEND and _POST_CAPTURE_ENV in os.environ:
        added[_POST_CAPTURE_ENV] = "0"
    return replace(spec, environment=spec.environment | added, parts=(*spec.parts, _PART))
