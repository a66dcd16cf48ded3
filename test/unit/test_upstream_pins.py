"""scripts/upstream_pins.py: requirements of another SGLang."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _script():
    path = ROOT / "scripts" / "upstream_pins.py"
    spec = importlib.util.spec_from_file_location("upstream_pins", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PINS = _script()


def _metadata(*requires: str) -> str:
    lines = "".join(f"Requires-Dist: {text}\n" for text in requires)
    return f"Metadata-Version: 2.1\nName: sglang\n{lines}\nA description\n"


def _differences(before: str, after: str, *pins: str) -> list[str]:
    return PINS.differences(
        PINS.requirements_of(before), PINS.requirements_of(after), PINS.pins_of(pins)
    )


def test_a_pinned_package_of_another_version_is_to_be_installed():
    after = _metadata("transformers==5.19.0", "openai>=2")
    pins = "# a comment ==1\ntransformers==5.12.1\nopenai==2.6.1\n"
    assert _differences(_metadata(), after, pins) == ["INSTALL  transformers==5.19.0"]


def test_pytorch_keeps_its_version():
    found = _differences(_metadata(), _metadata("torch==2.14.1"), "torch==2.13.0")
    assert found == ["KEEP     torch==2.14.1"]


def test_only_requirements_that_the_pinned_sglang_lacks_are_new():
    before = _metadata("flashinfer_python[cu13]==0.6.18")
    after = _metadata("flashinfer-python[cu13]==0.7.2", "sgl-flash-mla==1.0.0")
    assert _differences(before, after, "") == ["NEW      sgl-flash-mla==1.0.0"]


def test_extras_and_other_platforms_are_left_out():
    after = _metadata(
        'pytest; extra == "test"', 'tomli; python_version < "3.0"', 'instanttensor; extra == "all"'
    )
    assert _differences(_metadata(), after, "pytest==1\ntomli==1") == []
