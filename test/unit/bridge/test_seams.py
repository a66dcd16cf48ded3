"""Seams: each is described, fits the installed SGLang, and is detected when it is not in place."""

import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sglang_live.bridge import seams
from sglang_live.bridge.platform import cpu, cuda
from sglang_live.bridge.seams import Seam, all_seams
from sglang_live.errors import SeamError
from sglang_live.stages.spec import STAGES

hook_registry = pytest.importorskip("sglang.srt.plugins.hook_registry")
HookRegistry = hook_registry.HookRegistry

SEAMS = all_seams()
PATCHES = Path(__file__).parents[3] / "sgl_patches"
each_seam = pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """SGLang's registry of hooks as it was, before and after every test."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())


# --- what a seam says of itself ---


@each_seam
def test_a_seam_declares_target_reason_and_removal_condition(seam):
    assert seam.target.startswith("sglang.")
    assert seam.kind in ("replace", "around", "before", "after", "define", "item")
    assert (seam.signature is None) == (seam.kind in ("define", "item"))
    assert seam.stages and set(seam.stages) <= {*STAGES, seams.PIECE_TALKER, "*"}
    for sentence in (seam.why, seam.drop_when):
        assert len(sentence) > 20 and "\n" not in sentence


@each_seam
def test_a_seams_file_has_no_logic(seam):
    text = (PATCHES / f"{seam.name}.py").read_text()
    assert re.match(r'"""[^\n]+\."""\n', text), "one sentence says what it does"
    assert len(text.splitlines()) <= 40


def test_no_two_seams_share_a_name_or_in_one_stage_a_target():
    assert len({seam.name for seam in SEAMS}) == len(SEAMS)
    for stage in ("thinker", "talker", seams.PIECE_TALKER, "vocoder"):
        targets = [s.target for s in SEAMS if s.needed(stage, "cpu", ("urgency",))]
        assert len(set(targets)) == len(targets)


def test_every_file_of_the_patches_folder_is_a_seam():
    files = {path.stem for path in PATCHES.glob("*.py")} - {"__init__"}
    assert {seam.name for seam in SEAMS} == files


@each_seam
def test_the_hook_of_a_seam_exists(seam):
    hook = seams._with_hook(seam).hook
    if seam.kind == "item":
        key, value = hook
        assert key and callable(value)
    elif seam.kind == "define":
        assert hook is not None
    else:
        assert callable(hook)


@each_seam
def test_a_seam_fits_the_sglang_that_is_installed(seam):
    assert seams.upstream_signature(seam) == seam.signature


@pytest.mark.skipif(not cpu.is_active(), reason="upstream defines these with a GPU")
@pytest.mark.parametrize(
    "seam", [seam for seam in SEAMS if seam.kind == "define"], ids=lambda seam: seam.name
)
def test_a_name_that_a_seam_defines_is_no_function_that_could_be_hooked(seam):
    owner, name = seams._resolve(seam)
    assert not inspect.isfunction(getattr(owner, name, None))


# --- which process needs which ---


def seam_of(name: str = "one", **changes) -> Seam:
    return replace(
        Seam(
            name=name,
            target="fake_upstream.function",
            kind="replace",
            signature="(a, b=1)",
            hook=lambda a, b=1: "ours",
            why="because",
            drop_when="never",
            stages=("thinker",),
            cpu_only=False,
        ),
        **changes,
    )


@pytest.mark.parametrize(
    ("stages", "cpu_only", "stage", "platform", "needed"),
    [
        (("thinker",), False, "thinker", "cuda", True),
        (("thinker",), False, "talker", "cpu", False),
        (("*",), False, "talker", "cuda", True),
        (("*",), True, "talker", "cuda", False),
        (("*",), True, "talker", "cuda_native", False),
        (("*",), True, "talker", "cpu", True),
        (("thinker",), True, "thinker", "cuda", False),
    ],
)
def test_a_process_needs_the_seams_of_its_stage_and_platform(
    stages, cpu_only, stage, platform, needed
):
    assert seam_of(stages=stages, cpu_only=cpu_only).needed(stage, platform) == needed


@pytest.mark.parametrize(
    ("platform", "needed"), [("cpu", True), ("cuda_native", True), ("cuda", False)]
)
def test_a_shim_may_serve_cuda_without_sgl_kernel_too(platform, needed):
    seam = seam_of(stages=("*",), cpu_only=True, cuda_native=True)
    assert seam.needed("talker", platform) == needed


def test_outside_a_stage_only_the_platforms_shims_apply(monkeypatch):
    monkeypatch.setattr(cpu, "is_active", lambda: True)
    shims = {s.name for s in SEAMS if s.cpu_only and "*" in s.stages}
    assert {seam.name for seam in seams.needed_seams(None)} == shims
    monkeypatch.setattr(cpu, "is_active", lambda: False)
    assert seams.needed_seams(None) == []
    monkeypatch.setattr(cuda, "is_active", lambda: True)
    assert {seam.name for seam in seams.needed_seams(None)} == {"host_pool_release", "kv_copy"}


# --- putting them in, against an upstream of our own ---


@pytest.fixture
def upstream(monkeypatch) -> ModuleType:
    module = ModuleType("fake_upstream")

    def function(a, b=1):
        return f"upstream {a} {b}"

    async def method(self, text):
        return f"upstream {text}"

    class Class:
        def __init__(self, size):
            self.size = size

    Class.method = method
    module.function, module.Class, module.TABLE = function, Class, {"cuda": 1}
    monkeypatch.setitem(sys.modules, "fake_upstream", module)
    return module


@pytest.fixture
def install(upstream, monkeypatch):
    """Installs the seams given, as a process does that needs just these."""

    def install(*given: Seam) -> list[Seam]:
        monkeypatch.setattr(seams, "needed_seams", lambda stage: list(given))
        return seams.install("thinker")

    return install


class Replacement:
    def __init__(self, size):
        self.size = 2 * size


MARK = object()
GOOD = {
    "replace": seam_of(),
    "around": seam_of(kind="around", hook=lambda original, a, b=1: f"around {original(a, b)}"),
    "before": seam_of(kind="before", hook=lambda a, b=1: (("before",), {"b": b})),
    "after": seam_of(kind="after", hook=lambda result, a, b=1: f"after {result}"),
    "class": seam_of(target="fake_upstream.Class", signature="(size)", hook=Replacement),
    "define": seam_of(target="fake_upstream.absent", kind="define", signature=None, hook=MARK),
    "item": seam_of(target="fake_upstream.TABLE", kind="item", signature=None, hook=("cpu", MARK)),
}


def in_effect(kind: str, upstream: ModuleType) -> bool:
    return {
        "replace": lambda: upstream.function("x") == "ours",
        "around": lambda: upstream.function("x") == "around upstream x 1",
        "before": lambda: upstream.function("x") == "upstream before 1",
        "after": lambda: upstream.function("x") == "after upstream x 1",
        "class": lambda: upstream.Class(2).size == 4,
        "define": lambda: getattr(upstream, "absent", None) is MARK,
        "item": lambda: upstream.TABLE.get("cpu") is MARK,
    }[kind]()


@pytest.mark.parametrize("kind", GOOD)
def test_a_seam_of_any_kind_takes_effect_and_is_verified(kind, install, upstream):
    assert not in_effect(kind, upstream)
    assert [seam.name for seam in install(GOOD[kind])] == ["one"]
    assert in_effect(kind, upstream)
    seams.check_landed("thinker")


@pytest.mark.parametrize("kind", GOOD)
def test_a_seam_that_is_not_in_place_is_detected_by_name(kind, upstream, monkeypatch):
    monkeypatch.setattr(seams, "needed_seams", lambda stage: [GOOD[kind]])
    with pytest.raises(SeamError, match=r"seam one: hook on fake_upstream.* did not land"):
        seams.check_landed("thinker")


@pytest.mark.parametrize("kind", ["replace", "around", "before", "after", "class"])
def test_a_hook_whose_failure_sglang_only_logs_is_an_error(kind, install, monkeypatch):
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)  # as when it only logs
    with pytest.raises(SeamError, match=r"seam one: .* did not land"):
        install(GOOD[kind])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"signature": "(a)"}, r"has signature \(a, b=1\), expected \(a\)"),
        ({"target": "fake_upstream.gone"}, "fake_upstream.gone does not exist"),
        ({"target": "fake_upstream.gone.function"}, "fake_upstream.gone does not exist"),
        ({"target": "no_such_package.f"}, "no_such_package does not exist"),
    ],
    ids=["other signature", "gone", "owner gone", "package gone"],
)
def test_a_seam_that_does_not_fit_is_named_and_none_is_installed(
    changes, complaint, install, upstream
):
    with pytest.raises(SeamError, match=f"seam odd: .*{complaint}"):
        install(GOOD["item"], GOOD["define"], seam_of("odd", **changes))
    assert not in_effect("item", upstream) and not in_effect("define", upstream)


def test_a_real_seam_with_another_signature_stops_the_stage_before_anything_is_hooked(monkeypatch):
    from sglang_live.sgl_patches import audio_offsets

    monkeypatch.setattr(audio_offsets, "SIGNATURE", "(input_ids, something_new)")
    with pytest.raises(SeamError, match=r"seam audio_offsets: .*something_new"):
        seams.install("thinker")
    assert not HookRegistry._hooks


def test_a_process_whose_seams_do_not_fit_exits_with_the_reason(install, monkeypatch, capsys):
    class Exited(BaseException):
        pass

    def leave(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(seams.os, "_exit", leave)
    monkeypatch.setattr(seams, "needed_seams", lambda stage: [seam_of("odd", signature="(z)")])
    with pytest.raises(Exited) as exited:
        seams.install_or_exit("thinker")
    assert exited.value.args == (seams.EXIT_BAD_SEAM,)
    assert "refuses to start" in (said := capsys.readouterr().err) and "seam odd" in said
