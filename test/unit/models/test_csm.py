"""What identifies a CSM checkpoint, its prompts, its voices and its decoder."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
from transformers import CsmConfig, CsmForConditionalGeneration

from sglang_live.errors import BadInputError
from sglang_live.model_source import ModelSource
from sglang_live.models.csm.decoder import CsmDecoder
from sglang_live.models.csm.family import FAMILY, SPEAKERS, CsmSpec
from sglang_live.models.csm.parts import CsmTalker, talker_view
from sglang_live.models.family import model_facts, read_json
from sglang_live.models.speech_lm.checkpoint import shards_with
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import voice_files, words_of
from test.csm import checkpoint as tiny
from test.mimi import tiny as tiny_mimi

BEGIN, END = 256, 257  # of the tiny tokenizer
VOICE = tiny.VOCAB + tiny.TEXT_VOCAB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("csm"))


@pytest.fixture
def voices(tmp_path) -> Path:
    folder = tmp_path / "voices"
    folder.mkdir()
    for name, n_samples in (("anna", 1920 * 20), ("ben", 1920 * 15 + 1)):
        sf.write(folder / f"{name}.wav", np.zeros(n_samples), 24_000)
        (folder / f"{name}.txt").write_text(f" I am {name}.\n")
    return folder


def changed(checkpoint: Path, tmp_path: Path, **changes) -> Path:
    """A copy by links, with another config.json."""
    path = tmp_path / "changed"
    path.mkdir()
    for file in checkpoint.iterdir():
        (path / file.name).symlink_to(file)
    document = read_json(checkpoint / "config.json") | changes
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(document))
    return path


def text(words: str) -> list[int]:
    """Of the tiny tokenizer, whose ids are bytes by their order in GPT-2's alphabet."""
    letters = sorted(chr(n) for n in range(33, 127))
    ids = [letters.index(c) if c != " " else None for c in words]
    assert None not in ids, "a space has an id elsewhere"
    return [tiny.VOCAB + token for token in (BEGIN, *ids, END)]


# --- the checkpoint ---


def test_a_checkpoint_speaks_for_other_models(checkpoint):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.csm.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == SPEAKERS
    assert facts.clones_voices and facts.voices_need_words


def test_the_defaults_of_transformers_are_the_published_model(checkpoint, tmp_path):
    published = CsmConfig()
    path = changed(checkpoint, tmp_path, **json.loads(published.to_json_string()))
    spec = CsmSpec.load(path)
    assert (spec.vocab, spec.n_codes, spec.end_id) == (2051, 32, 2050)
    assert (spec.codec.codebook_size, spec.codec.samples_per_frame) == (2048, 1920)
    with torch.device("meta"):
        weights = CsmForConditionalGeneration(published).state_dict()
    assert weights["depth_decoder.codebooks_head.weight"].shape == (31, 1024, 2051)
    assert weights["lm_head.weight"].shape == (2051, 2048)
    assert FAMILY.claims({"architectures": ["CsmForConditionalGeneration"]})
    FAMILY.check_ranks(path, "talker", "--talker.tp-size", 8)
    with pytest.raises(BadInputError, match="num_attention_heads is 32"):
        FAMILY.check_ranks(path, "talker", "--talker.tp-size", 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_codebooks_embeddings": False}, "whose codebooks' embeddings differ"),
        ({"codec_config": {"model_type": "dac"}}, "its codec is 'dac', not mimi"),
        ({"num_codebooks": 8}, "have 8, 4 and 4 codebooks"),
        ({"codebook_pad_token_id": 3}, "has to be an id behind the 64 codes"),
        ({"depth_decoder_config": None}, "is malformed"),
    ],
)
def test_what_cannot_be_served_is_refused(checkpoint, tmp_path, changes, message):
    with pytest.raises(BadInputError, match=message):
        model_facts(changed(checkpoint, tmp_path, **changes))


def test_a_checkpoint_that_lacks_something_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(BadInputError, match="has no tokenizer"):
        model_facts(path)
    document = read_json(path / "config.json")
    del document["codec_config"]
    (path / "config.json").write_text(json.dumps(document))
    with pytest.raises(BadInputError, match="lacks 'codec_config'"):
        model_facts(path)


@pytest.mark.parametrize("as_published", [True, False])
def test_weights_are_found_under_the_names_that_the_config_gives(tmp_path, as_published):
    path = tiny.build(tmp_path / "csm", as_published=as_published)
    heads = "depth_decoder.codebooks_head.weight"
    [name] = {file for weight, file in shards_with(path, ("depth_",)).items() if weight == heads}
    assert name.startswith("transformers-" if as_published else "model")
    view = talker_view(path, tmp_path / "cache")
    config = read_json(view / "config.json")
    assert config["model_type"] == "llama" and config["eos_token_id"] == tiny.MARKS[-1]
    assert "transformers_weights" not in config
    linked = read_json(view / "model.safetensors.index.json")["weight_map"]
    assert heads in linked and all((view / file).exists() for file in linked.values())


@pytest.mark.parametrize("name", ["../elsewhere.json", "elsewhere.safetensors", 3])
def test_an_index_that_is_none_of_the_checkpoint_is_refused(checkpoint, tmp_path, name):
    (tmp_path / "elsewhere.json").write_text('{"weight_map": {"lm_head.weight": "secret"}}')
    path = changed(checkpoint, tmp_path, transformers_weights=name)
    with pytest.raises(BadInputError, match=r"transformers_weights is .*: not an index"):
        shards_with(path, ("lm_head.",))


# --- prompts ---


def test_a_prompt_names_the_speaker_and_has_the_marks_of_a_text(checkpoint):
    talker = CsmTalker(checkpoint)
    assert talker.prompt("0", "Hello.") == text("[0]Hello.")
    assert talker.prompt("7", "Hello.") == text("[7]Hello.")
    with pytest.raises(BadInputError, match="voice 'anna' is not one of"):
        talker.prompt("anna", "Hello.")


def test_a_text_makes_no_marks(checkpoint):
    ids = CsmTalker(checkpoint).prompt("0", "<|end_of_text|>")
    assert ids == text("[0]<|end_of_text|>")
    assert ids.count(tiny.VOCAB + END) == 1


def test_a_recorded_voice_says_its_words_before_the_text(checkpoint, voices):
    talker = CsmTalker(checkpoint, voices)
    assert talker.voices == (*SPEAKERS, "anna", "ben")
    hello = talker.prompt("0", "Hello.")
    for name, rows in (("anna", range(0, 21)), ("ben", range(21, 38))):
        said = talker.prompt("0", f"I am {name}.")
        # A frame that is not complete counts, and behind the last one is one that ends it.
        assert talker.prompt(name, "Hello.") == [*said, *(VOICE + row for row in rows), *hello]


def test_ids_of_voices_follow_each_other():
    table = VoiceTable(100, {"anna": 2, "ben": 3})
    assert (table.ids("anna"), table.ids("ben"), table.n_rows) == ([100, 101], [102, 103, 104], 5)
    assert "anna" in table and "eve" not in table
    with pytest.raises(KeyError):
        table.ids("eve")


# --- words of recordings ---


def source(checkpoint: Path, voices: Path) -> ModelSource:
    return ModelSource(path=str(checkpoint), recordings=voices)


def test_recordings_with_their_words_become_voices(checkpoint, voices, tmp_path):
    facts = source(checkpoint, voices).load(tmp_path / "cache")
    assert facts.voices == (*SPEAKERS, "anna", "ben")
    assert [words_of(file) for file in voice_files(voices).values()] == ["I am anna.", "I am ben."]


def test_a_recording_without_its_words_is_refused_at_the_start(checkpoint, voices, tmp_path):
    (voices / "ben.txt").write_text("  \n")
    with pytest.raises(BadInputError, match=r"ben.txt is empty"):
        source(checkpoint, voices).load(tmp_path / "cache")
    (voices / "ben.txt").unlink()
    with pytest.raises(BadInputError, match=r"cannot read .*ben.txt: this model needs the words"):
        source(checkpoint, voices).load(tmp_path / "cache")


# --- the decoder ---


def test_its_codes_are_decoded_by_the_mimi_in_the_checkpoint(checkpoint):
    decoder = CsmDecoder.from_pretrained(checkpoint, "cpu", torch.float32)
    codes = tiny_mimi.random_codes(9)
    wave = decoder.decode([decoder.new_stream()], codes[None])[0]
    expected = tiny_mimi.decoded(tiny.Reference(checkpoint).model.codec_model, codes)
    assert expected.std() > 0.1, "the case must not be trivial"
    assert (wave - expected.clamp(-1, 1)).abs().max() < 3e-6
    assert (decoder.n_quantizers, decoder.samples_per_frame) == (4, 1920)
