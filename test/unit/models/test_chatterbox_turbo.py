"""What identifies a Chatterbox Turbo checkpoint, its prompts, and how it draws codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.decoder import ChatterboxDecoder
from sglang_live.models.chatterbox_turbo.family import (
    FAMILY,
    MEAN_WEIGHTS,
    TOKENIZER,
    WEIGHTS,
    TurboSpec,
)
from sglang_live.models.chatterbox_turbo.parts import TurboTalker, as_trained
from sglang_live.models.checkpoint_files import check_checkpoint, find_checkpoint
from sglang_live.models.family import model_facts
from sglang_live.models.speech_lm.sampler import Repetition, Sampler, draws_of
from test.chatterbox_turbo import checkpoint as tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("turbo"))


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


# --- the checkpoint ---


def test_a_checkpoint_without_a_config_is_known_by_its_files(checkpoint):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.chatterbox_turbo.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("default", "anna")
    assert find_checkpoint(str(checkpoint), ()) == checkpoint
    check_checkpoint(facts.weights)
    FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 1)
    with pytest.raises(BadInputError, match=r"--talker.tp-size: .* have one rank"):
        FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 2)


def test_nano_differs_by_its_name_alone(copy):
    (copy / WEIGHTS[0]).rename(copy / WEIGHTS[1])
    assert TurboSpec.load(copy).weights == copy / WEIGHTS[1]
    shutil.copy(copy / WEIGHTS[1], copy / WEIGHTS[0])
    with pytest.raises(BadInputError, match=r"needs one of .*, and has 2"):
        model_facts(copy)


@pytest.mark.parametrize("name", [TOKENIZER, MEAN_WEIGHTS])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(BadInputError, match=f"{name} is missing"):
        model_facts(copy)


def test_other_weights_are_refused(copy):
    (copy / WEIGHTS[0]).write_bytes(b"no weights")
    with pytest.raises(BadInputError, match="is no T3 of Chatterbox Turbo"):
        model_facts(copy)


def test_sizes_are_those_of_the_weights(checkpoint, tmp_path):
    view = Path(TurboTalker(checkpoint).engine_args(tmp_path, 7)["model_path"])
    config = json.loads((view / "config.json").read_text())
    sizes = {name: config[name] for name in ("n_embd", "n_inner", "n_layer", "n_head")}
    assert sizes == {"n_embd": 128, "n_inner": 512, "n_layer": 2, "n_head": 2}
    assert (config["vocab_size"], config["n_positions"]) == (6563, tiny.N_PLACES)
    assert config["dtype"] == "float32" and (view / WEIGHTS[0]).is_symlink()


def test_its_sound_flows_in_two_steps_behind_three_codes_of_silence(checkpoint):
    decoder = ChatterboxDecoder.from_pretrained(checkpoint, "cpu", torch.float32)
    assert decoder.voices == ("default", "anna") and decoder._flow.is_mean
    assert decoder._silence.tolist() == [4299] * 3


# --- prompts ---


def test_a_prompt_is_a_speaker_a_recording_a_text_and_a_mark(checkpoint):
    talker = TurboTalker(checkpoint)
    ids = talker.prompt("anna", "hi: you")
    text = tiny.tokenizer().encode("Hi, you.", add_special_tokens=False)
    codes = tiny.conditionals(1)["cond_prompt_speech_tokens"][0].tolist()
    rows = 6563 + tiny.N_TEXT
    assert ids == [rows + 1, *codes, *(6563 + token for token in text), 6561]
    with pytest.raises(BadInputError, match="voice 'bert' is not one of"):
        talker.prompt("bert", "Hi.")


@pytest.mark.parametrize("text", ["hello there.", "Note: one; two", "a", "It's mine!", "Why, so?"])
def test_punctuation_is_that_of_the_reference(text):
    assert as_trained(text) == tiny.punc_norm(text)


def test_no_text_becomes_a_mark(checkpoint):
    talker = TurboTalker(checkpoint)
    tag = talker._tokenizer.convert_tokens_to_ids("[laugh]")
    assert 6563 + tag not in talker.prompt("default", "say [laugh] now")


def test_a_voice_without_codes_is_refused(copy):
    gone = tiny.conditionals(0) | {"cond_prompt_speech_tokens": torch.zeros(1, 0)}
    torch.save({"t3": gone, "gen": {}}, copy / "conds.pt")
    with pytest.raises(BadInputError, match=r"conds.pt is no voice of Chatterbox"):
        TurboTalker(copy)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(copy):
    larger = tiny.tokenizer()
    larger.add_tokens([f"more{n}" for n in range(60)])
    larger.save_pretrained(copy)
    with pytest.raises(BadInputError, match="its tokenizer has 318 ids, T3 has 300"):
        TurboTalker(copy)


# --- how codes are drawn ---


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_penalty_comes_behind_the_choice_of_candidates(spread):
    n, n_codes = 40, 50
    rng = torch.Generator().manual_seed(1)
    logits = spread * torch.randn(n, n_codes, generator=rng)
    seen = torch.randint(0, n_codes, (n, 6), generator=rng)
    times = torch.zeros(n, n_codes, dtype=torch.bool).scatter_(1, seen, True)
    temperature, penalty = torch.full((n,), 0.8), torch.full((n,), 1.2)
    steps = (
        *(TemperatureLogitsWarper(0.8), TopKLogitsWarper(30), TopPLogitsWarper(0.9)),
        RepetitionPenaltyLogitsProcessor(1.2),
    )
    wanted = logits
    for step in steps:
        wanted = step(seen, wanted)
    n_kept = (wanted > -torch.inf).sum(dim=1)
    assert n_kept.min() < 30 and n_kept.max() > 1, "the case must not be trivial"
    sampler = Sampler(top_k=30, top_p=0.9, repetition=Repetition(), penalised_last=True)
    greedy = torch.zeros(n, dtype=torch.bool)
    cut = sampler.truncated(logits, temperature, greedy)
    penalised = sampler.penalised(cut, times, penalty)
    torch.testing.assert_close(penalised / 0.8, wanted)
    draw = draws_of(torch.arange(n), torch.arange(n), 1)[:, 0]
    ids = torch.arange(n_codes).expand(n, -1)
    drawn = (wanted + sampler.gumbel(draw, ids)).argmax(dim=1)
    assert (sampler.choose(penalised, temperature, greedy, draw) == drawn).all()
    assert (sampler.truncated(logits, temperature, ~greedy) == logits).all()
