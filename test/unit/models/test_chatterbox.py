"""What identifies a Chatterbox checkpoint, its voices, and its prompts."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.family import (
    DECODER_WEIGHTS,
    FAMILY,
    SPEAKER_WEIGHTS,
    TOKENIZER,
    VOICE_FILE,
    VOICES_FOLDER,
    WEIGHTS,
    T3Spec,
)
from sglang_live.models.chatterbox.parts import ChatterboxTalker, as_trained, talker_config
from sglang_live.models.chatterbox.voices import read_voice, voice_rows
from sglang_live.models.checkpoint_files import check_checkpoint, find_checkpoint
from sglang_live.models.composition import find_talker
from sglang_live.models.family import model_facts, read_json
from test.chatterbox import checkpoint as tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("chatterbox"))


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


# --- the checkpoint ---


def test_a_checkpoint_without_a_config_is_known_by_its_files(checkpoint):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.chatterbox.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("default", "anna")
    assert find_checkpoint(str(checkpoint), ()) == checkpoint
    assert find_talker(str(checkpoint)) == facts
    check_checkpoint(facts.weights)
    FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 2)
    # The heads of both prompts of a pair are divided, not copied.
    with pytest.raises(BadInputError, match="num_attention_heads is 2"):
        FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 4)


def test_sizes_are_those_of_the_weights_and_heads_those_of_both_prompts(checkpoint):
    config = talker_config(T3Spec.load(checkpoint))
    assert (config["hidden_size"], config["intermediate_size"]) == (128, 96)
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (2, 4)
    assert (config["vocab_size"], config["text_vocab_size"]) == (8194, 300)
    assert config["max_position_embeddings"] == 34 + 400 + 1600
    assert config["dtype"] == "float32"


@pytest.mark.parametrize("name", [TOKENIZER, DECODER_WEIGHTS])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(BadInputError, match=f"{name} is missing"):
        model_facts(copy)


def test_other_weights_are_refused(copy):
    save_file({"model.norm.weight": torch.zeros(2)}, copy / WEIGHTS)
    with pytest.raises(BadInputError, match=r"t3_cfg.safetensors is no T3 of Chatterbox: .*speech"):
        model_facts(copy)
    (copy / WEIGHTS).write_bytes(b"none")
    with pytest.raises(BadInputError, match=r"t3_cfg.safetensors is no T3 of Chatterbox"):
        model_facts(copy)


# --- voices ---


def test_without_a_voice_or_with_two_of_one_name_it_is_refused(copy):
    shutil.copy(copy / VOICE_FILE, copy / VOICES_FOLDER / "default.pt")
    with pytest.raises(BadInputError, match=r"default.pt has the name of another voice"):
        model_facts(copy)
    (copy / SPEAKER_WEIGHTS).unlink()
    (copy / VOICE_FILE).unlink()
    assert model_facts(copy).voices == ("anna", "default")
    shutil.rmtree(copy / VOICES_FOLDER)
    with pytest.raises(BadInputError, match=r"has no voice: conds.pt is missing"):
        model_facts(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speaker_emb": None}, "'NoneType'"),
        ({"cond_prompt_speech_tokens": torch.tensor([[3, 6561]])}, "its codes are not below 6561"),
        ({"cond_prompt_speech_tokens": torch.zeros(1, 0)}, "its codes are not below 6561"),
        ({"emotion_adv": torch.ones(2)}, "Chatterbox: "),
    ],
)
def test_a_file_that_is_no_voice_is_named(copy, changes, message):
    tiny.changed_voice(copy, **changes)
    with pytest.raises(BadInputError, match=f"conds.pt is no voice.*{message}"):
        ChatterboxTalker(copy)


def test_a_broken_file_of_a_voice_is_named(copy):
    file = copy / VOICES_FOLDER / "anna.pt"
    for content in (b"", b"no voice", file.read_bytes()[:200]):
        file.write_bytes(content)
        with pytest.raises(BadInputError, match=r"anna.pt"):
            ChatterboxTalker(copy)


def test_rows_of_a_voice_are_those_of_the_reference(checkpoint):
    model, weights = tiny.model(64), load_file(checkpoint / WEIGHTS)
    tensors = {name.removeprefix("cond_enc."): weight for name, weight in weights.items()}
    for n, file in enumerate((VOICE_FILE, f"{VOICES_FOLDER}/anna.pt")):
        with torch.no_grad():
            wanted = model.conditioning(tiny.conditionals(n))
        found = voice_rows(read_voice(checkpoint / file), tensors)
        assert wanted.shape == (34, 128) and wanted.std() > 0.1
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


# --- prompts ---


def test_a_prompt_is_a_voice_a_text_and_two_marks(checkpoint):
    talker = ChatterboxTalker(checkpoint)
    ids = [token - 8194 for token in talker.prompt("anna", "hi, you there; well")]
    wanted = tiny.text_ids(checkpoint, "hi, you there; well")
    assert ids[34:-2] == wanted and len(set(wanted)) > 10
    # Row 0 is the mark; the voices are behind it.
    assert ids[:34] == list(range(300 + 35, 300 + 69)) and ids[-2:] == [300, 300]
    default = [token - 8194 for token in talker.prompt("default", "hi, you there; well")]
    assert default[:34] == list(range(301, 335)) and default[34:] == ids[34:]
    with pytest.raises(BadInputError, match="voice 'bert' is not one of"):
        talker.prompt("bert", "Hi.")


@pytest.mark.parametrize(
    "text", ["hello there.", "Note: one; two", "a", "It's mine!", "Why, though?"]
)
def test_punctuation_is_that_of_the_reference(text):
    assert as_trained(text) == tiny.punc_norm(text)


def test_no_text_becomes_a_mark(checkpoint):
    prompt = ChatterboxTalker(checkpoint).prompt("default", "say [STOP] now")
    assert [token - 8194 for token in prompt].count(0) == 1


def test_another_tokenizer_is_refused(copy):
    path = copy / TOKENIZER
    changed = Tokenizer.from_file(str(path)).to_str().replace("[SPACE]", "[BLANK]")
    for content, message in (
        (changed, r"it lacks \[SPACE\]"),
        (changed.replace("[START]", "[GO]"), r"\[START\] is not 255"),
        ("{}", "cannot read"),
    ):
        path.write_text(content)
        with pytest.raises(BadInputError, match=message):
            ChatterboxTalker(copy)


def test_a_view_has_one_file_of_weights_and_a_config(checkpoint, tmp_path):
    args = ChatterboxTalker(checkpoint).engine_args(tmp_path, 7)
    view = Path(args["model_path"])
    assert sorted(file.name for file in view.iterdir()) == ["config.json", WEIGHTS]
    assert (view / WEIGHTS).resolve() == (checkpoint / WEIGHTS).resolve()
    assert read_json(view / "config.json")["architectures"] == ["ChatterboxT3"]
    assert ChatterboxTalker(checkpoint).engine_args(tmp_path, 7) == args


def test_facts_are_read_without_torch(checkpoint):
    code = (
        "import sys; from pathlib import Path; from sglang_live.models.family import model_facts;"
        f"model_facts(Path({str(checkpoint)!r}));"
        "print(sorted({'torch', 'sglang', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
