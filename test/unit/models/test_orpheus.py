"""What identifies an Orpheus checkpoint, its prompt, and frames of its ids."""

import json
from pathlib import Path

import pytest

from sglang_live.errors import BadInputError
from sglang_live.models.family import model_facts
from sglang_live.models.orpheus.family import (
    FAMILY,
    FIRST_CODE_ID,
    VOICES,
    CodeReader,
    OrpheusDecoder,
    OrpheusTalker,
)
from sglang_live.models.piece_talker import WrongCodeError
from test.orpheus import checkpoint as tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("orpheus"))


def changed(checkpoint: Path, tmp_path: Path, name: str, **changes) -> Path:
    """A copy by links, with one file's JSON changed."""
    for file in checkpoint.rglob("*"):
        link = tmp_path / file.relative_to(checkpoint)
        link.parent.mkdir(exist_ok=True, parents=True)
        if file.is_file():
            link.symlink_to(file)
    document = json.loads((checkpoint / name).read_text()) | changes
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(json.dumps(document))
    return tmp_path


def test_a_checkpoint_speaks_for_other_models(checkpoint):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.orpheus.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == VOICES and facts.voices[0] == "tara"


@pytest.mark.parametrize(
    ("config", "claims"),
    [
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 156_940}, True),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 156_938 + 1024}, False),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 128_256}, False),
        ({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 156_940}, False),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({}, False),
    ],
)
def test_it_is_known_by_the_size_of_its_vocabulary(config, claims):
    assert FAMILY.claims(config) == claims


def test_a_fine_tuned_model_names_its_voices(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path, "config.json", voices=["anna", "ben"])
    assert model_facts(path).voices == OrpheusTalker(path).voices == ("anna", "ben")


@pytest.mark.parametrize("voices", [[], [1], [""]])
def test_voices_without_names_are_refused(checkpoint, tmp_path, voices):
    with pytest.raises(BadInputError, match="voices must be a list of names"):
        model_facts(changed(checkpoint, tmp_path, "config.json", voices=voices))


def test_another_llama_of_that_size_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path, "tokenizer.json", added_tokens=[])
    with pytest.raises(BadInputError, match=r"<custom_token_10> at None, Orpheus has it at 128266"):
        model_facts(path)


def test_a_checkpoint_without_snac_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path, "config.json")
    (path / "snac" / "pytorch_model.bin").unlink()
    with pytest.raises(BadInputError, match=r"has no pytorch_model\.bin, the weights of SNAC"):
        model_facts(path)
    (path / "snac" / "config.json").unlink()
    (path / "snac").rmdir()
    with pytest.raises(BadInputError, match=r"snac is missing: put config\.json and"):
        model_facts(path)


def test_a_snac_of_another_size_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path, "snac/config.json", sampling_rate=44_100)
    with pytest.raises(BadInputError, match="needs the SNAC of 24 kHz"):
        model_facts(path)


def test_the_decoder_is_the_snac_beside_it(checkpoint):
    decoder = OrpheusDecoder.from_pretrained(checkpoint, "cpu", None)
    assert (decoder.n_quantizers, decoder.codebook_size) == (7, 4096)


def test_the_prompt_has_the_text_between_its_marks(checkpoint):
    talker = OrpheusTalker(checkpoint)
    ids = talker.prompt("leo", "Hello.")
    assert ids[:2] == [128259, 128000] and ids[-4:] == [128009, 128260, 128261, 128257]
    assert talker._tokenizer.decode(ids[2:-4]) == "leo: Hello."


def test_names_of_codes_in_a_text_are_text(checkpoint):
    ids = OrpheusTalker(checkpoint).prompt("tara", "<custom_token_10>")
    assert FIRST_CODE_ID not in ids and max(ids[2:-4]) < 256


def test_an_unknown_voice_is_refused(checkpoint):
    with pytest.raises(BadInputError, match="voice 'erik' is not one of"):
        OrpheusTalker(checkpoint).prompt("erik", "Hello.")


def ids_of(*codes: int) -> list[int]:
    return [FIRST_CODE_ID + 4096 * (n % 7) + code for n, code in enumerate(codes)]


def test_ids_become_frames_however_they_are_divided():
    codes = [0, 4095, 7, 8, 9, 10, 11, 4095, 0, 1, 2, 3, 4, 5, 6]
    ids = ids_of(*codes)
    assert CodeReader().add(ids) == [codes[:7], codes[7:14]]
    reader, frames = CodeReader(), []
    for token in ids:
        frames += reader.add([token])
    assert frames == [codes[:7], codes[7:14]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([FIRST_CODE_ID + 4096], r"id 132362 where code 0 of a frame is due.* 128266 to 132361"),
        ([FIRST_CODE_ID, FIRST_CODE_ID], r"id 128266 where code 1 .* 132362 to 136457"),
        ([FIRST_CODE_ID - 1], "id 128265"),
        ([*ids_of(*range(7)), FIRST_CODE_ID + 7 * 4096], "id 156938 where code 0"),
    ],
    ids=["the next place", "the place before", "a mark", "padding"],
)
def test_an_id_that_is_no_code_of_its_place_is_refused(ids, message):
    with pytest.raises(WrongCodeError, match=message):
        CodeReader().add(ids)
