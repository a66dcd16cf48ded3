"""Real stages for the tests of this folder, started once per variant."""

import contextlib
import ctypes
import gc
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import soundfile as sf

from lab.attachment import joined
from lab.modelled_device.attach import environment as modelled_device
from sglang_live.attachment import ATTACH_ENV
from sglang_live.extension import Addition
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.models.family import model_facts
from sglang_live.models.qwen3_omni.family import Qwen3OmniSpec
from sglang_live.orchestrator.stage_links import StageLinks, TalkerLink, ThinkerLink, VocoderLink
from sglang_live.policy.policies import Policies
from sglang_live.stage_specs import with_arbiters
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import STAGES, StageSpec
from sglang_live.stages.supervisor import Replica, Supervisor, loopback_address
from sglang_live.stages.zygote import Zygote, is_useful
from test.engine.reference import Reference

# Variants of the engine, or of one test on it, that run with `nightly` alone. Each page size, and
# rounds with and without overlap, run in some of the other files.
NIGHTLY = {
    "test_elastic_kv.py": ("page-16-no-overlap-graphs",),
    "test_full_pool.py": ("page-1",),
    "test_graphs.py": ("no-overlap",),
    "test_host_tier.py": ("page-16-no-overlap-slow-link",),
    # Pages of 16, rounds without overlap and forced retractions: test_long_responses.py.
    "test_hybrid.py": ("page-16-no-overlap-retractions",),
    "test_lending.py": ("page-16-no-overlap-slow-link", "graphs", "two-ranks"),
    "test_long_responses.py": ("page-1",),
    "test_modelled_device.py": ("no-overlap",),
    "test_moshi.py": ("page-1", "page-16-no-overlap"),
    # By turns, rounds overlap too.
    "test_pauses.py": ("overlap", "no-overlap"),
    "test_retention.py": ("page-16-chunks", "page-16-no-overlap-retractions"),
    "test_session_storage.py": ("page-16-no-overlap",),
    "test_sliced_prefill.py": (
        "pages-small-pool",
        # Its pool is not small.
        "test_responses_that_outgrow_a_small_pool_take_the_memory_of_preempted_prefills[overlap]",
    ),
    "test_truncation.py": ("page-1",),
    "test_turn_prefill.py": ("page-16-no-overlap",),
}
# Set by scripts/test.sh --all.
IS_NIGHTLY = "SGLANG_LIVE_NIGHTLY" in os.environ
FAMILY = "sglang_live.models.qwen3_omni.family"
DATA = Path(__file__).parents[1] / "data" / "audio"
DEVICE_MODELS = Path(__file__).parents[1] / "data" / "device_models"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        variants = item.name.partition("[")[2].removesuffix("]")
        for nightly in NIGHTLY.get(item.path.name, ()):
            if nightly in (variants, item.name) or variants.startswith(f"{nightly}-"):
                item.add_marker(pytest.mark.nightly)


@dataclass
class ThinkerAlone:
    """The links of a session without other stages."""

    thinker: ThinkerLink

    def close(self) -> None:
        self.thinker.close()


@dataclass
class SpeechLinks:
    """The links of a session without a vocoder."""

    thinker: ThinkerLink
    talker: TalkerLink

    def close(self) -> None:
        self.thinker.close()
        self.talker.close()


@dataclass
class Stages:
    """Running stages of one variant."""

    supervisor: Supervisor
    model: Qwen3OmniSpec | None  # of another family
    talker_reads_text: bool = False
    additions: Sequence[Addition] = ()

    def replica(self, stage: str) -> Replica:
        return next(r for r in self.supervisor.replicas if r.spec.stage == stage)

    def links(self, session_id: str) -> "StageLinks | SpeechLinks | ThinkerAlone":
        names = {replica.spec.stage for replica in self.supervisor.replicas}
        thinker = ThinkerLink(self.replica("thinker"), session_id)
        if "talker" not in names:
            return ThinkerAlone(thinker)
        talker = TalkerLink(
            self.replica("talker"),
            session_id,
            segments=thinker.segments,
            reads_text=self.talker_reads_text,
        )
        if "vocoder" not in names:
            return SpeechLinks(thinker, talker)
        return StageLinks(thinker, talker, VocoderLink(self.replica("vocoder"), session_id))


# One for all tests: it imports the engines' modules once.
ZYGOTE = Zygote() if is_useful() else None


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def zygote() -> AsyncIterator[None]:
    yield
    if ZYGOTE is not None:
        await ZYGOTE.close()


@pytest.fixture(scope="module", autouse=True)
def freed_memory() -> Iterator[None]:
    """What a file's references have freed belongs to the machine again: others start engines."""
    yield
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextlib.asynccontextmanager
async def running_stages(
    checkpoint: Path,
    cache: Path,
    engine_args: dict | None = None,
    talker_environment: dict | None = None,
    thinker_environment: dict | None = None,
    policies: tuple[str, ...] = (),
    thinker_args: dict | None = None,
    session_storage: str = "",
    device_model: str = "",
    names: tuple[str, ...] = STAGES,
    family: str = FAMILY,
    voices: str = "",
    shares_device: bool = False,
    additions: Sequence[Addition] = (),
    talker_args: dict | None = None,
) -> AsyncIterator[Stages]:
    """Start stages.

    names: the stages to start. Each takes some seconds.
    engine_args: arguments of thinker and talker.
    thinker_args, talker_args: further arguments of one of them.
    session_storage: the thinker's, "<bytes>:<directory>".
    voices: the talker's, see StageSpec.
    shares_device: see StageSpec.
    additions: of extensions.
    device_model: a file of test/data/device_models, without its suffix. "": none.
    """
    run_dir = RunDir.make()
    both = engine_args or {}
    args = {
        "thinker": both | (thinker_args or {}),
        "talker": both | (talker_args or {}),
        "vocoder": {},
    }
    attached = {n: v for n, v in os.environ.items() if n == ATTACH_ENV}
    modelled = modelled_device(DEVICE_MODELS / f"{device_model}.toml" if device_model else None)
    environments = {"talker": talker_environment, "thinker": thinker_environment}
    specs = [
        StageSpec(
            stage=stage,
            replica=0,
            model_path=str(checkpoint),
            family=family,
            cache_dir=str(cache),
            address=loopback_address(run_dir.path, stage, 0),
            same_host=True,
            run_dir=str(run_dir.path),
            served_name="demo",
            shares_device=shares_device,
            policies=Policies.parse(policies),
            native_key="test key" if stage == "thinker" and policies else "",
            engine_args=args[stage],
            environment=joined(attached, modelled, environments.get(stage) or {}),
            session_storage=session_storage if stage == "thinker" else "",
            voices=voices if stage == "talker" else "",
        )
        for stage in names
    ]
    if "arbiter" in policies:
        specs = with_arbiters(specs)
    for addition in additions:
        specs = addition.stages(specs)
    supervisor = Supervisor(specs, log_dir=cache, zygote=ZYGOTE)
    try:
        for addition in additions:
            addition.start(run_dir.path)
        await supervisor.start()
        model = Qwen3OmniSpec.load(checkpoint) if family == FAMILY else None
        yield Stages(
            supervisor, model, model_facts(checkpoint, family).talker_reads_text, additions
        )
    finally:
        await supervisor.stop()
        for addition in additions:
            await addition.stop()
        run_dir.remove()


@pytest.fixture(scope="session")
def endless_checkpoint(tmp_path_factory) -> Path:
    """The demo architecture with responses that never end by themselves."""
    path = tmp_path_factory.mktemp("endless")
    build(path, DemoSize(thinker_end_logit=0.0, talker_end_logit=0.0))
    return path


@pytest.fixture(scope="package")
def reference(endless_checkpoint) -> Reference:
    return Reference.load(endless_checkpoint)


# They end before the end-to-end tests begin: SGLang makes no host tier where less than 10 GiB of
# the machine would stay free.
@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stages(endless_checkpoint, tmp_path_factory) -> AsyncIterator[Stages]:
    """SGLang's defaults: overlap scheduling, page size 1."""
    cache = tmp_path_factory.mktemp("stages")
    async with running_stages(endless_checkpoint, cache) as running:
        yield running


@pytest.fixture(scope="session")
def speech() -> np.ndarray:
    """11 s of a human voice, int16 at 16 kHz."""
    pcm, rate_hz = sf.read(DATA / "sp_jfk.flac", dtype="int16")
    assert rate_hz == 16_000
    return pcm
