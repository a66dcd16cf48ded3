"""A model family is found by its folder, or by the module that a flag names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_live.errors import BadInputError
from sglang_live.models.demo.location import TRAINED
from sglang_live.models.family import family_at, family_modules, model_facts, part

OMNI = "sglang_live.models.qwen3_omni.family"
TOY = """
from sglang_live.models.family import ModelFacts

class Toy:
    thinker = talker = decoder = f"{__name__}:PART"

    def claims(self, config):
        return config["architectures"] == ["Toy"]

    def facts(self, path):
        return ModelFacts(
            path=path,
            weights=path,
            family=__name__,
            voices=("bell",),
            vocab_size=7,
            context_tokens=99,
        )

PART = "a part of the toy"
FAMILY = Toy()
"""


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """The checkpoint of a family in a folder outside of this package."""
    (tmp_path / "toy_family.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"architectures": ["Toy"]}))
    yield checkpoint
    sys.modules.pop("toy_family", None)


def test_the_demo_is_of_a_family_of_this_package():
    facts = model_facts(TRAINED)
    assert facts.family == OMNI and OMNI in family_modules()
    assert facts.path == TRAINED and facts.voices and facts.vocab_size and facts.context_tokens


def test_a_family_outside_the_package_is_found_by_its_module(toy):
    with pytest.raises(BadInputError, match=rf"architecture \(Toy\); asked: .*{OMNI}"):
        model_facts(toy)
    facts = model_facts(toy, "toy_family")
    assert (facts.family, facts.voices) == ("toy_family", ("bell",))
    assert part(family_at(facts.family).decoder) == "a part of the toy"
    # A family of this package is found as before.
    assert model_facts(TRAINED, "toy_family").family == OMNI


@pytest.mark.parametrize("module", ["absent_module", "json"])
def test_a_module_without_a_family_is_refused_by_name(module):
    with pytest.raises(BadInputError, match=module):
        family_at(module)


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_checkpoint_without_a_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInputError, match=r"config\.json"):
        model_facts(tmp_path)


def test_facts_are_read_without_torch_and_sglang():
    code = (
        "import sys; from pathlib import Path; from sglang_live.models.family import model_facts;"
        f"model_facts(Path({str(TRAINED)!r}));"
        "print(sorted({'torch', 'sglang', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
