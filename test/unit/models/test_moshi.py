"""What identifies a Moshi checkpoint, its prompts, its codec and its weights; and its reference."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_live.errors import BadInputError
from sglang_live.models.family import model_facts, read_json
from sglang_live.models.moshi.codec import MoshiCodec
from sglang_live.models.moshi.engine.weights import Step, places
from sglang_live.models.moshi.family import FAMILY, MoshiSpec
from sglang_live.models.moshi.parts import PREFIXES, MoshiTalker, talker_view
from sglang_live.models.moshi.voices import SILENCE, SINE, read_voice
from sglang_live.models.speech_lm.checkpoint import shards_with
from test.mimi import tiny as tiny_mimi
from test.moshi import checkpoint as tiny
from test.moshi.reference import Reference, prompt_of

# Of LMGen in moshi 0.2.13 (greedy), and of the one in NVIDIA/personaplex, with the weights of
# test/moshi/checkpoint.py and these frames of a user.
MOSHI_FRAMES = "e7f28574a283c4a0"
MOSHI_FIRST = [[19, 30, 22, 3, 40], [43, 8, 3, 53, 15], [49, 8, 0, 41, 16]]
PERSONAPLEX_FIRST = [
    [71, 381, 243, 1178, 546],
    [8, 57, 580, 339, 348],
    [40, 1694, 1470, 481, 669],
]
PERSONAPLEX_LAST = [66, 654, 1207, 1270, 1607]
N_FRAMES = 130


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("moshi"))


@pytest.fixture(scope="module")
def personaplex(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("personaplex"), kind="personaplex")


def user(card: int) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randint(0, card, (N_FRAMES, tiny.N_CODES))


def changed(checkpoint: Path, tmp_path: Path, without: str = "", **changes) -> Path:
    """A copy by links, with another config.json. without: a file that it lacks."""
    path = tmp_path / "changed"
    path.mkdir()
    for file in checkpoint.iterdir():
        if file.name not in ("config.json", without):
            (path / file.name).symlink_to(file)
    document = read_json(checkpoint / "config.json") | changes
    (path / "config.json").write_text(json.dumps(document))
    return path


# --- the reference ---


def test_the_restated_moshi_says_what_the_real_package_says():
    frames = Reference(tiny.language_model()).call(user(tiny.CARD))
    assert frames[:3] == MOSHI_FIRST
    digest = sha256(np.asarray(frames, "<i2").tobytes()).hexdigest()
    assert digest[: len(MOSHI_FRAMES)] == MOSHI_FRAMES


def test_the_restated_personaplex_says_what_the_real_one_says():
    card = tiny.PUBLISHED_CARD
    reference = Reference(tiny.language_model(2 * tiny.N_CODES, card))
    prompt, before = prompt_of(reference, tiny.voice(1), [10, 11, 12, 50])
    frames = reference.call(user(card), prompt=prompt, before=before)
    assert (len(prompt), frames[:3], frames[-1]) == (24, PERSONAPLEX_FIRST, PERSONAPLEX_LAST)


# --- the checkpoint ---


def test_a_checkpoint_takes_calls(checkpoint, personaplex):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.moshi.family"
    assert (facts.stages, facts.duplex_s) == (("talker", "vocoder"), 0.08)
    assert facts.voices == ("moshi",)
    assert model_facts(personaplex).voices == ("NATF0", "NATM1")


def test_a_config_without_sizes_is_the_published_model(tmp_path):
    for name in ("model.safetensors", tiny.CODEC, "tokenizer_spm_32k_3.model"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"model_type": "moshi"}')
    spec = MoshiSpec.load(tmp_path)
    assert (spec.n_codes, spec.sizes["dim"], spec.codec_config["num_quantizers"]) == (8, 4096, 8)
    view = read_json(_view_config(spec, tmp_path))
    assert (view["intermediate_size"], view["moshi"]["depth_inner"]) == (11_264, 2816)
    with pytest.raises(BadInputError, match=r"--talker.tp-size: this model's talker runs on one"):
        FAMILY.check_ranks(tmp_path, "talker", "--talker.tp-size", 2)


def _view_config(spec: MoshiSpec, tmp_path: Path) -> Path:
    # Its weights are empty files.
    index = {"weight_map": {"text_emb.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return talker_view(spec, tmp_path / "cache") / "config.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MoshiForConditionalGeneration"]}, "has transformers' layout of Moshi"),
        ({"norm": "layer_norm"}, "a Moshi with norm 'layer_norm' is not served"),
        ({"fuser": {"sum": []}}, "a Moshi with fuser"),
        ({"delays": [0, 2, 2]}, r"delays are \[0, 2, 2\]: 9 are served"),
        ({"dep_q": 3}, "as many codebooks for the user as of its own"),
        ({"card": 100}, "Mimi's codebooks have 64 codes, those of the language model 100"),
        ({"mimi_name": "../mimi.safetensors"}, "not a file beside it"),
        ({"n_q": None}, "is malformed"),
    ],
)
def test_what_cannot_be_served_is_refused(checkpoint, tmp_path, changes, message):
    with pytest.raises(BadInputError, match=message):
        model_facts(changed(checkpoint, tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (tiny.CODEC, "the weights of Mimi, its codec"),
        ("model.safetensors", "the weights of its language model"),
        ("tokenizer_spm_32k_3.model", "its tokenizer"),
    ],
)
def test_a_file_that_lacks_is_named(checkpoint, tmp_path, name, what):
    with pytest.raises(BadInputError, match=rf"lacks {name}, {what}"):
        model_facts(changed(checkpoint, tmp_path, without=name))


def test_a_personaplex_without_voices_is_refused(personaplex, tmp_path):
    with pytest.raises(BadInputError, match=r"has no voices/\*.pt: unpack voices.tgz"):
        model_facts(changed(personaplex, tmp_path, without="voices"))


def test_a_file_that_is_no_voice_is_refused(tmp_path):
    torch.save({"something": 1}, tmp_path / "anna.pt")
    with pytest.raises(BadInputError, match=r"anna\.pt is no voice of PersonaPlex"):
        read_voice(tmp_path / "anna.pt")


def test_the_codec_is_mimi(checkpoint):
    """Rotary pairs of adjacent rows became pairs of halves."""
    codec, module = MoshiCodec.from_pretrained(checkpoint, "cpu", torch.float32), tiny.mimi()
    sound, n = tiny_mimi.random_sound(30), tiny.N_CODES
    stream = codec.encoder.new_stream()
    codes = codec.encoder.encode([stream], sound[None])[0]
    assert torch.equal(codes, tiny_mimi.encoded(module, sound)[:, :n])
    wave = codec.decode([codec.new_stream()], codes[None])[0]
    wanted = tiny_mimi.decoded(module, codes)
    assert float((wave - wanted.clamp(-1, 1)).abs().max()) < 1e-5


def test_another_file_in_the_codecs_place_is_refused(checkpoint, tmp_path):
    spec = MoshiSpec.load(changed(checkpoint, tmp_path, mimi_name="model.safetensors"))
    with pytest.raises(BadInputError, match=r"is no Mimi of 4 codebooks .* tensors are missing"):
        MoshiCodec.from_pretrained(spec.path, "cpu", torch.float32)


# --- prompts and text ---


def test_moshi_begins_with_nothing_and_takes_no_role(checkpoint):
    talker = MoshiTalker(checkpoint)
    assert talker.prompt("moshi", "") == [tiny.TEXT]
    with pytest.raises(BadInputError, match="takes no instructions"):
        talker.prompt("moshi", "You are a pirate.")
    with pytest.raises(BadInputError, match="voice 'erik' is not one of"):
        talker.prompt("erik", "")


def test_personaplex_begins_with_a_voice_and_a_role(personaplex):
    talker = MoshiTalker(personaplex)
    role, voice = tiny.TEXT + 1, 2 * tiny.TEXT + 1
    assert talker.prompt("NATM1", "") == [*range(voice + 9, voice + 18), *[role + 3] * 5]
    said = talker.prompt("NATF0", "hello")
    assert said[:14] == [*range(voice, voice + 9), *[role + 3] * 5]
    assert said[-6:] == [role + 3] * 6
    assert said[14:-6] == talker.prompt("NATF0", " <system> hello <system>")[14:-6]
    with pytest.raises(BadInputError, match=r"voice and role are .* frames, the limit is 1024"):
        talker.prompt("NATF0", "hello " * 500)
    assert len(SILENCE) == len(SINE) == 8


def test_text_is_pieces_without_padding(checkpoint):
    talker = MoshiTalker(checkpoint)
    ids = talker._pieces.encode("hello there")
    assert "".join(talker.text(token) for token in (3, 0, *ids, 3)) == " hello there"


def test_another_tokenizer_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path, text_card=97)
    with pytest.raises(BadInputError, match="has 96 ids, the language model 97"):
        MoshiTalker(path)


# --- weights ---


def test_every_published_name_has_a_place():
    for dep_q in (tiny.N_CODES, 2 * tiny.N_CODES):
        for name in tiny.language_model(dep_q):
            assert places(name, tiny.N_CODES) is not None, name
    assert places("encoder.model.0.conv.conv.weight", tiny.N_CODES) is None
    # Steps for the codes of the user are left out: none of the others sees them.
    assert places("linears.4.weight", 4) == []
    assert places("depformer.layers.0.self_attn.in_projs.3.weight", 4) == [
        ("depth.layers.0.qkv", Step(3))
    ]


def test_the_view_has_the_language_model_alone(checkpoint, tmp_path):
    view = talker_view(MoshiSpec.load(checkpoint), tmp_path)
    found = shards_with(view, PREFIXES)
    assert found.keys() == tiny.language_model().keys()
    assert not (view / tiny.CODEC).exists()
