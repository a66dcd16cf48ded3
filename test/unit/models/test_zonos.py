"""What identifies a Zonos checkpoint, its prompts, and its codec."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soxr
import torch
from safetensors.torch import load_file, save_file

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.family import model_facts, read_json
from sglang_live.models.zonos.conditions import Conditions
from sglang_live.models.zonos.decoder import ZonosDecoder
from sglang_live.models.zonos.family import CODEC_FOLDER, FAMILY, ZonosSpec
from sglang_live.models.zonos.parts import N_PHONEMES, ZonosTalker, talker_view
from test.zonos import checkpoint as tiny
from test.zonos.checkpoint import espeak

__all__ = ["espeak"]
pytestmark = pytest.mark.usefixtures("espeak")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("zonos"))


def changed(checkpoint: Path, tmp_path: Path, folder: str = "", **changes) -> Path:
    """A copy with another config.json, its own or that in the folder."""
    path = tmp_path / "changed"
    shutil.copytree(checkpoint, path)
    file = path / folder / "config.json"
    file.write_text(json.dumps(read_json(file) | changes))
    return path


# --- the checkpoint ---


def test_a_checkpoint_speaks_for_other_models(checkpoint):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.zonos.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("random",) and not facts.clones_voices
    FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 2)
    # The heads of both prompts of a pair are divided, not copied.
    with pytest.raises(BadInputError, match="num_heads_kv is 2"):
        FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 4)


PREFIX = tiny.CONFIG["prefix_conditioner"]


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        ("", {"backbone": tiny.CONFIG["backbone"] | {"ssm_cfg": {"layer": "Mamba2"}}}, "hybrid"),
        ("", {"eos_token_id": 3}, r"its marks are \(1025, 3\)"),
        ("", {"prefix_conditioner": PREFIX | {"projection": "mlp"}}, "a projection mlp"),
        (
            "",
            {
                "prefix_conditioner": PREFIX
                | {"conditioners": [{"type": "FourierConditioner", "name": "mood"}]}
            },
            "its condition mood is not served",
        ),
        ("", {"backbone": None}, "is malformed"),
        (CODEC_FOLDER, {"sampling_rate": 16_000}, "needs the DAC of 44.1 kHz"),
        (CODEC_FOLDER, {"model_type": "mimi"}, "needs the DAC of 44.1 kHz"),
    ],
)
def test_what_cannot_be_served_is_refused(checkpoint, tmp_path, folder, changes, message):
    with pytest.raises(BadInputError, match=message):
        model_facts(changed(checkpoint, tmp_path, folder, **changes))


def test_without_its_codec_or_the_program_it_is_refused(checkpoint, tmp_path, monkeypatch):
    path = changed(checkpoint, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInputError, match=r"espeak-ng, which is not installed"):
        model_facts(path)
    shutil.rmtree(path / CODEC_FOLDER)
    with pytest.raises(BadInputError, match=r"dac is missing: put config.json"):
        model_facts(path)


def test_the_view_has_the_heads_of_both_prompts(checkpoint, tmp_path):
    config = read_json(talker_view(checkpoint, tmp_path) / "config.json")
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    assert (config["vocab_size"], config["text_vocab_size"]) == (tiny.N_IDS, N_PHONEMES)


# --- prompts ---


def test_a_prompt_is_phonemes_conditions_and_a_frame_of_marks(checkpoint):
    talker = ZonosTalker(checkpoint)
    ids = [token - tiny.N_IDS for token in talker.prompt("random", "Hi, you.")]
    signs = ';:,.!?¡¿—…"«»“”() *~-/\\&ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz'
    phonemes = [2, *(4 + signs.index(sign) for sign in "Hi, you."), 3]
    assert ids == [*phonemes, *range(N_PHONEMES, N_PHONEMES + 6)]
    with pytest.raises(BadInputError, match="voice 'anna' is not one of"):
        talker.prompt("anna", "Hi.")


def test_conditions_are_those_of_the_reference_for_both_prompts(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    conditions = Conditions(PREFIX, tensors)
    prefix = tiny.Reference(checkpoint).model.prefix_conditioner
    both = ((True, tiny.CONDITIONS), (False, {"pitch_std": tiny.CONDITIONS["pitch_std"]}))
    with torch.no_grad():
        for guided, told in both:
            expected = prefix(told | {"espeak": [5, 7]})
            found = torch.cat((conditions.phonemes()[[5, 7]], conditions.rows(guided=guided)))
            assert (found - expected).abs().max() < 1e-5
    assert ZonosSpec.load(checkpoint).end_id == 1024


# --- the codec ---


@pytest.mark.parametrize("sizes", [(60,), (1, 2, 5, 3, 7, 22, 20)])
def test_chunks_of_codes_equal_the_whole_in_the_reference_at_the_servers_rate(checkpoint, sizes):
    decoder = ZonosDecoder.from_pretrained(checkpoint, "cpu", torch.float64)
    codes = tiny.random_codes(60)
    expected = soxr.resample(tiny.decoded(codes, torch.float64).numpy(), 44_100, 24_000)
    assert expected.std() > 0.1, "the case must not be trivial"
    tail = torch.full((decoder.n_tail_frames, codes.shape[1]), END_CODE)
    stream = decoder.new_stream()
    wave = [decoder.decode([stream], chunk[None])[0] for chunk in (*codes.split(sizes), tail)]
    found = torch.cat(wave).numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected.clip(-1, 1)).max() < 1e-5


def test_a_codec_without_a_weight_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path)
    file = path / CODEC_FOLDER / "model.safetensors"
    tensors = load_file(file)
    for name in ("quantizer.quantizers.1.out_proj.bias", "decoder.block.0.conv_t1.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, file)
        with pytest.raises(BadInputError, match="weights lack"):
            ZonosDecoder.from_pretrained(path, "cpu", torch.float32)
