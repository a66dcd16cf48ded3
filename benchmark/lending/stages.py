"""A thinker and a talker of the demo model, whose responses never end by themselves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from benchmark.ending import end_like_ctrl_c
from lab.modelled_device.attach import environment as modelled_device
from sglang_live.extensions.elastic.mover import KvMover
from sglang_live.extensions.elastic.pools import ElasticPools
from sglang_live.extensions.lending.channel import BORROW, LEND
from sglang_live.extensions.lending.lending import Lending
from sglang_live.extensions.lending.policy import LeaseConfig
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.models.family import model_facts
from sglang_live.orchestrator.stage_links import TalkerLink, ThinkerLink
from sglang_live.policy.policies import Policies
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Replica, Supervisor, loopback_address

# Until a lender that has just started has offered all that it can: a run a round.
_SETTLED_S = 3.0


@dataclass(slots=True)
class Links:
    """A session's links to both stages."""

    thinker: ThinkerLink
    talker: TalkerLink

    def close(self) -> None:
        self.thinker.close()
        self.talker.close()


@dataclass(slots=True)
class Pair:
    """
    Attributes:
        mover: it moves memory if both pools exchange it.
    """

    thinker: Replica
    talker: Replica
    mover: KvMover

    def links(self, session_id: str) -> Links:
        thinker = ThinkerLink(self.thinker, session_id)
        return Links(thinker, TalkerLink(self.talker, session_id, segments=thinker.segments))

    async def settle(self, *, lends: bool) -> None:
        """Wait until leases are held, and no more come."""
        held = -1.0
        async with asyncio.timeout(60):
            while lends:
                await asyncio.sleep(_SETTLED_S)
                assert self.thinker.client is not None
                load = (await self.thinker.client.ping(10.0)).load
                if 0 < load.get("policy_leases_held", 0.0) == held:
                    return
                held = load.get("policy_leases_held", 0.0)


@contextlib.asynccontextmanager
async def running_pair(
    policies: tuple[str, ...],
    thinker_args: dict,
    talker_args: dict,
    device_model: str,
    *,
    devices: tuple[str, str] = ("cuda:0", "cuda:1"),
    lends: bool,
    elastic: bool,
    shallow: bool = False,
) -> AsyncIterator[Pair]:
    """
    Args:
        policies: of both stages.
        lends: whether the talker lends, and the thinker borrows.
        device_model: file of the modelled device, or "" for the machine's own.
        devices: of thinker and talker. Modelled ones have a link between them.
        elastic: whether both pools exchange memory.
        shallow: whether the thinker has one layer.
    """
    end_like_ctrl_c()
    owned = RunDir.make()
    run_dir = owned.path
    size = DemoSize(thinker_end_logit=0.0, talker_end_logit=0.0)
    build(run_dir / "endless", replace(size, thinker_layers=1) if shallow else size)
    model = model_facts(run_dir / "endless")
    args = {"thinker": thinker_args, "talker": talker_args}
    specs = [
        StageSpec(
            stage=stage,
            replica=0,
            model_path=str(model.path),
            family=model.family,
            cache_dir=str(run_dir),
            address=loopback_address(run_dir, stage, 0),
            same_host=True,
            run_dir=str(run_dir),
            served_name="demo",
            native_key="benchmark" if stage == "thinker" else "",
            policies=Policies.parse(policies),
            engine_args=args[stage],
            environment=modelled_device(device_model),
            device=device,
        )
        for stage, device in zip(args, devices, strict=True)
    ]
    pools = ElasticPools()
    lending = Lending(LeaseConfig(roles={"thinker": BORROW, "talker": LEND}))
    additions = [*([pools] if elastic else []), *([lending] if lends else [])]
    for addition in additions:
        specs = addition.stages(specs)
    supervisor = Supervisor(specs, log_dir=run_dir)
    try:
        for addition in additions:
            addition.start(run_dir)
        await supervisor.start()
        thinker, talker = supervisor.replicas
        yield Pair(thinker, talker, pools.mover)
    finally:
        await supervisor.stop()
        for addition in additions:
            await addition.stop()
        owned.remove()
