"""What identifies a Higgs checkpoint, its prompts, its codec and its weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.family import model_facts, read_json
from sglang_live.models.higgs_v2.decoder import HiggsDecoder
from sglang_live.models.higgs_v2.encoder import HiggsEncoder, resampled
from sglang_live.models.higgs_v2.family import CODEC_FOLDER, FAMILY, HiggsSpec
from sglang_live.models.higgs_v2.parts import HiggsTalker, talker_view
from sglang_live.models.voice_files import read_recording
from test.higgs_v2 import checkpoint as tiny
from test.unit.models.defaults import default_dtype

# The first and the last samples that torchaudio 2.11 makes of the sound in the test.
TORCHAUDIO = (0.309577, 0.182088, 1.023964, 0.740064, 0.748717, 1.202845, 0.526789, 0.678315)
FIRST_TEXT = tiny.N_BOOKS * tiny.BOOK


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("higgs"))


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
    assert facts.family == "sglang_live.models.higgs_v2.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("random",) and facts.clones_voices and facts.voices_need_words


def test_the_published_sizes_are_those_of_transformers(checkpoint, tmp_path):
    published = HiggsAudioV2Config(codebook_size=1026)
    path = changed(checkpoint, tmp_path, **json.loads(published.to_json_string()))
    codec = path / CODEC_FOLDER / "config.json"
    sizes = {"codebook_size": 1024, "target_bandwidths": [0.5, 1, 1.5, 2]}
    codec.write_text(json.dumps(read_json(codec) | sizes))
    spec = HiggsSpec.load(path)
    assert (spec.n_books, spec.book_size, spec.begin_id, spec.end_id) == (8, 1026, 1024, 1025)
    with torch.device("meta"):
        weights = HiggsAudioV2ForConditionalGeneration(published).state_dict()
    assert weights["audio_lm_head.weight"].shape == (8 * 1026, 3072)
    FAMILY.check_ranks(path, "talker", "--talker.tp-size", 8)
    with pytest.raises(BadInputError, match="num_attention_heads is 24"):
        FAMILY.check_ranks(path, "talker", "--talker.tp-size", 5)


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        ("", {"architectures": ["HiggsAudioModel"]}, "in its first layout"),
        ("", {"num_codebooks": 8}, "has 8 codebooks, its codec 4"),
        ("", {"audio_stream_eos_id": 3}, "have to be ids of the 66 in a book"),
        ("", {"num_codebooks": None}, "is malformed|has None codebooks"),
        (CODEC_FOLDER, {"model_type": "dac"}, "is 'dac', not higgs_audio_v2_tokenizer"),
        (CODEC_FOLDER, {"sample_rate": 16_000}, "a codec of 16000 Hz is not served"),
    ],
)
def test_what_cannot_be_served_is_refused(checkpoint, tmp_path, folder, changes, message):
    with pytest.raises(BadInputError, match=message):
        model_facts(changed(checkpoint, tmp_path, folder, **changes))


def test_a_checkpoint_without_its_codec_or_tokenizer_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(BadInputError, match="has no tokenizer"):
        model_facts(path)
    shutil.rmtree(path / CODEC_FOLDER)
    with pytest.raises(BadInputError, match=r"tokenizer is missing: put config.json"):
        model_facts(path)


def test_the_view_has_the_weights_of_speech_alone(checkpoint, tmp_path):
    view = talker_view(checkpoint, tmp_path)
    config = read_json(view / "config.json")
    assert config["vocab_size"] == FIRST_TEXT and config["text_vocab_size"] == tiny.TEXT_VOCAB
    assert config["eos_token_id"] == FIRST_TEXT - 1 and config["model_type"] == "llama"


# --- prompts ---


def test_a_prompt_is_that_of_the_reference_and_ends_with_a_frame_of_marks(checkpoint):
    talker = HiggsTalker(checkpoint)
    *ids, last = talker.prompt("random", " Hello. ")
    expected = (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Generate audio following instruction.\n\n<|scene_desc_start|>\n"
        "Audio is recorded from a quiet room.\n<|scene_desc_end|><|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>"
    )
    encoded = talker._tokenizer.encode(expected, add_special_tokens=False)
    assert [token - FIRST_TEXT for token in ids] == encoded
    assert last == FIRST_TEXT + tiny.TEXT_VOCAB
    with pytest.raises(BadInputError, match="voice 'anna' is not one of"):
        talker.prompt("anna", "Hello.")


def test_a_text_makes_no_marks(checkpoint):
    talker = HiggsTalker(checkpoint)
    mark = FIRST_TEXT + tiny.IDS["<|eot_id|>"]
    plain = talker.prompt("random", "Hello.").count(mark)
    assert talker.prompt("random", "<|eot_id|>").count(mark) == plain


def test_a_tokenizer_without_the_marks_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path)
    document = (path / "tokenizer.json").read_text().replace("scene_desc_start", "other")
    (path / "tokenizer.json").write_text(document)
    with pytest.raises(BadInputError, match=r"tokenizer lacks <\|scene_desc_start\|>"):
        HiggsTalker(path)


# --- voices of recordings ---


@pytest.fixture(scope="module")
def voices(tmp_path_factory) -> Path:
    """A recording that is no whole number of frames."""
    return tiny.recordings(tmp_path_factory.mktemp("voices"))


def test_a_recording_is_encoded_as_by_the_reference(checkpoint, voices):
    samples = torch.from_numpy(read_recording(voices / "anna.wav", 24_000))
    whole = samples[: len(samples) // 960 * 960]
    with default_dtype(torch.bfloat16):
        found = HiggsEncoder(checkpoint).encode(whole)
    assert found.shape == (len(whole) // 960, tiny.N_BOOKS)
    assert min(len(book.unique()) for book in found.T) > 10, "the case must not be trivial"
    assert torch.equal(found, tiny.encoded(whole))


def test_sound_is_resampled_as_by_torchaudio():
    at = torch.arange(31)
    sound = (0.3 * at).sin() + 0.5 * (2.1 * at).cos()
    found = resampled(sound, 24_000, 16_000)
    assert len(found) == 21
    torch.testing.assert_close(found[:4], torch.tensor(TORCHAUDIO[:4]), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[-4:], torch.tensor(TORCHAUDIO[4:]), atol=1e-6, rtol=0)
    assert torch.equal(resampled(sound, 16_000, 16_000), sound)


def test_a_voice_is_a_turn_before_the_text(checkpoint, voices):
    talker = HiggsTalker(checkpoint, voices)
    assert talker.voices == ("random", "anna")
    alone, said = talker.prompt("random", "Hello."), talker.prompt("anna", "Hello.")
    n_same = next(n for n, pair in enumerate(zip(alone, said, strict=False)) if pair[0] != pair[1])
    words = talker._tokenizer.decode([i - FIRST_TEXT for i in said if i < alone[-1]])
    turn = (
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>"
    )
    both = f"{turn.format(tiny.ANNA_SAYS)}<|audio_eos|><|eot_id|>{turn.format('Hello.')}"
    assert words.endswith(both) and n_same > 90
    rows = [token - alone[-1] for token in said if token >= alone[-1]]
    n_frames = tiny.RECORDED // 960
    assert rows == [*range(1, n_frames + tiny.N_BOOKS + 2), 0]


def test_what_is_no_voice_is_refused(checkpoint, voices, tmp_path):
    folder = tmp_path / "voices"
    shutil.copytree(voices, folder)
    (folder / "anna.txt").unlink()
    with pytest.raises(BadInputError, match=r"this model needs the words of each recording"):
        HiggsTalker(checkpoint, folder)
    path = changed(checkpoint, tmp_path)
    weights = path / CODEC_FOLDER / "model.safetensors"
    tensors = {k: v for k, v in load_file(weights).items() if not k.startswith("semantic_model")}
    save_file(tensors, weights)
    with pytest.raises(BadInputError, match="encodes no recordings"):
        HiggsEncoder(path)


# --- the codec ---


@pytest.mark.parametrize("sizes", [(40,), (1, 2, 5, 3, 7, 22)])
def test_chunks_of_codes_equal_the_whole_in_the_reference(checkpoint, sizes):
    # In float32 the random network makes 1e-4 of the roundings, in the reference as well.
    decoder = HiggsDecoder.from_pretrained(checkpoint, "cpu", torch.float64)
    codes = tiny.random_codes(40)
    expected = tiny.decoded(codes, torch.float64).clamp(-1, 1)
    assert expected.std() > 0.1, "the case must not be trivial"
    tail = torch.full((decoder.n_tail_frames, tiny.N_BOOKS), END_CODE)
    stream = decoder.new_stream()
    wave = [decoder.decode([stream], chunk[None])[0] for chunk in (*codes.split(sizes), tail)]
    found = torch.cat(wave)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-6
    assert (decoder.n_quantizers, decoder.samples_per_frame) == (4, 960)
    assert HiggsTalker(checkpoint).ahead_frames == decoder.n_tail_frames == 10


def test_a_codec_without_a_weight_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path)
    from safetensors.torch import load_file, save_file

    file = path / CODEC_FOLDER / "model.safetensors"
    tensors = load_file(file)
    for name in ("quantizer.quantizers.1.project_out.bias", "acoustic_decoder.conv2.bias"):
        save_file({k: v for k, v in tensors.items() if k != name}, file)
        with pytest.raises(BadInputError, match="weights lack"):
            HiggsDecoder.from_pretrained(path, "cpu", torch.float32)
