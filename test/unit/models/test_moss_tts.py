"""What identifies a MOSS-TTS checkpoint, its prompts, and its codec."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_live.errors import BadInputError
from sglang_live.models.family import model_facts, read_json
from sglang_live.models.moss_tts import encoder as encoder_module
from sglang_live.models.moss_tts.decoder import MossDecoder
from sglang_live.models.moss_tts.encoder import MossEncoder
from sglang_live.models.moss_tts.family import CODEC_FOLDER, FAMILY, MossSpec
from sglang_live.models.moss_tts.parts import MossTalker, talker_view
from sglang_live.models.voice_files import read_recording
from test.moss_tts import checkpoint as tiny
from test.unit.models.defaults import default_dtype


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("moss"))


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
    assert facts.family == "sglang_live.models.moss_tts.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("random",) and facts.clones_voices and not facts.voices_need_words
    FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 2)
    with pytest.raises(BadInputError, match="num_attention_heads is 4"):
        FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 3)


def test_the_window_of_each_stage_of_the_codec_is_as_long_in_time(checkpoint):
    spec = MossSpec.load(checkpoint)
    assert (spec.n_books, spec.n_codes, spec.n_ids) == (4, 64, 5 * 65)
    assert [stage.n_window for stage in spec.codec.stages] == [13, 26]
    assert [stage.n_patches for stage in spec.codec.stages] == [2, 960]
    assert [stage.n_window for stage in spec.codec.encoder] == [26, 13]


STAGES = tiny.CODEC["decoder_kwargs"]


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        ("", {"audio_pad_code": 3}, "audio_pad_code is 3, it has to be the id behind the 64"),
        ("", {"n_vq": 8}, "has 8 books of 64 codes, its codec 5 of 64"),
        ("", {"language_config": None}, "is malformed"),
        (CODEC_FOLDER, {"model_type": "dac"}, "is 'dac', not moss-audio-tokenizer"),
        (CODEC_FOLDER, {"number_channels": 2}, "24 kHz in one channel"),
        (CODEC_FOLDER, {"decoder_kwargs": [STAGES[1], STAGES[0]]}, "is not streamed"),
        (CODEC_FOLDER, {"decoder_kwargs": STAGES[:1]}, "is malformed"),
        (
            CODEC_FOLDER,
            {"decoder_kwargs": [STAGES[0] | {"gating": "silu"}, STAGES[1]]},
            "a decoder with gating silu is not served",
        ),
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


def test_the_view_is_a_qwen3_with_the_ids_of_all_books(checkpoint, tmp_path):
    config = read_json(talker_view(checkpoint, tmp_path) / "config.json")
    assert config["model_type"] == "qwen3" and config["vocab_size"] == tiny.N_IDS
    assert config["text_vocab_size"] == tiny.TEXT_VOCAB
    ids = tiny.IDS["audio_assistant_gen_slot"], tiny.IDS["audio_assistant_delay_slot"]
    assert config["slots"] == list(ids)


# --- prompts ---


def test_a_prompt_is_that_of_the_reference_up_to_the_start_of_audio(checkpoint):
    talker = MossTalker(checkpoint)
    message = (
        "user\n<user_inst>\n- Reference(s):\nNone\n- Instruction:\nNone\n- Tokens:\nNone\n"
        "- Quality:\nNone\n- Sound Event:\nNone\n- Ambient Sound:\nNone\n- Language:\nNone\n"
        "- Text:\nHello.\n</user_inst>"
    )
    expected = f"<|im_start|>{message}<|im_end|>\n<|im_start|>assistant\n<|audio_start|>"
    encoded = talker._tokenizer.encode(expected, add_special_tokens=False)
    assert [token - tiny.N_IDS for token in talker.prompt("random", "Hello.")] == encoded
    with pytest.raises(BadInputError, match="voice 'anna' is not one of"):
        talker.prompt("anna", "Hello.")


def test_a_text_makes_no_marks(checkpoint):
    talker = MossTalker(checkpoint)
    mark = tiny.N_IDS + tiny.IDS["im_end"]
    assert talker.prompt("random", "<|im_end|>").count(mark) == 1


# --- voices of recordings ---


def test_a_recording_is_encoded_as_by_the_reference(checkpoint, tmp_path):
    tiny.recordings(tmp_path)
    samples = torch.from_numpy(read_recording(tmp_path / "anna.wav", 24_000)).repeat(5)
    whole = samples[: len(samples) // 1920 * 1920]
    with default_dtype(torch.bfloat16):
        encoder = MossEncoder(checkpoint)
        found = encoder.encode(whole)
    assert found.shape == (len(whole) // 1920, tiny.N_BOOKS) and len(found) > encoder_module._CHUNK
    assert len(found.unique(dim=0)) > 25, "the case must not be trivial"
    assert torch.equal(found, tiny.encoded(whole))
    # Neither is made louder by more than 3 dB, nor softer.
    for factor in (0.01, 4.0):
        assert torch.equal(encoder.encode(factor * whole), tiny.encoded(factor * whole))


def test_a_voice_is_the_prompts_reference(checkpoint, tmp_path):
    talker = MossTalker(checkpoint, tiny.recordings(tmp_path))
    assert talker.voices == ("random", "anna")
    ids = [token - tiny.N_IDS for token in talker.prompt("anna", "Hello.")]
    n_rows = tiny.RECORDED // 1920 + tiny.N_BOOKS - 1
    at = ids.index(tiny.IDS["audio_start"]) + 1
    assert ids[at : at + n_rows] == [*range(tiny.TEXT_VOCAB, tiny.TEXT_VOCAB + n_rows)]
    said = talker._tokenizer.decode([*ids[:at], *ids[at + n_rows :]])
    assert "- Reference(s):\n[S1]:\n<|audio_start|><|audio_end|>\n- Instruction:\nNone" in said


def test_a_codec_that_encodes_nothing_takes_on_no_voices(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path, CODEC_FOLDER, encoder_kwargs=None)
    assert not model_facts(path).clones_voices
    weights = checkpoint / CODEC_FOLDER / "model.safetensors"
    tensors = {k: v for k, v in load_file(weights).items() if not k.startswith("encoder.")}
    save_file(tensors, path / CODEC_FOLDER / "model.safetensors")
    shutil.copy(checkpoint / CODEC_FOLDER / "config.json", path / CODEC_FOLDER)
    with pytest.raises(BadInputError, match="its weights lack"):
        MossEncoder(path)


# --- the codec ---


@pytest.mark.parametrize("sizes", [(60,), (1, 2, 5, 3, 7, 22, 20)])
def test_chunks_of_codes_equal_the_whole_in_the_reference(checkpoint, sizes):
    decoder = MossDecoder.from_pretrained(checkpoint, "cpu", torch.float32)
    codes = tiny.random_codes(60)  # several windows
    expected = tiny.decoded(codes).clamp(-1, 1)
    assert expected.std() > 0.1, "the case must not be trivial"
    stream = decoder.new_stream()
    wave = [decoder.decode([stream], chunk[None])[0] for chunk in codes.split(sizes)]
    assert (torch.cat(wave) - expected).abs().max() < 3e-6
    assert (decoder.n_quantizers, decoder.samples_per_frame) == (4, 1920)


def test_streams_of_different_ages_share_a_batch(checkpoint):
    decoder = MossDecoder.from_pretrained(checkpoint, "cpu", torch.float32)
    codes = [tiny.random_codes(20, seed) for seed in range(3)]
    streams = [decoder.new_stream() for _ in codes]
    waves = [[] for _ in codes]
    for age, stream in enumerate(streams):
        if age:
            waves[age].append(decoder.decode([stream], codes[age][None, : 8 * age])[0])
    together = torch.stack([of[8 * age : 8 * age + 4] for age, of in enumerate(codes)])
    for wave, of_stream in zip(decoder.decode(streams, together), waves, strict=True):
        of_stream.append(wave)
    for age, (of_stream, of) in enumerate(zip(waves, codes, strict=True)):
        expected = tiny.decoded(of[: 8 * age + 4]).clamp(-1, 1)
        assert (torch.cat(of_stream) - expected).abs().max() < 3e-6


def test_wrong_codes_and_streams_are_refused(checkpoint):
    decoder = MossDecoder.from_pretrained(checkpoint, "cpu", torch.float32)
    stream, codes = decoder.new_stream(), tiny.random_codes(2)
    with pytest.raises(BadInputError, match=r"must lie in \[0, 64\)"):
        decoder.decode([stream], codes[None] + 64)
    with pytest.raises(ValueError, match="occurs twice"):
        decoder.decode([stream, stream], torch.stack([codes, codes]))
    with pytest.raises(ValueError, match="do not fit 1 streams"):
        decoder.decode([stream], codes)


@pytest.mark.parametrize(
    "name",
    [
        "quantizer.quantizers.1.codebook.weight",
        "quantizer.output_proj.bias",
        "decoder.0.input_proj.weight",
        "decoder.2.transformer.layers.1.linear1.weight",
    ],
)
def test_a_codec_without_a_weight_is_refused(checkpoint, tmp_path, name):
    path = changed(checkpoint, tmp_path)
    file = path / CODEC_FOLDER / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != name}, file)
    with pytest.raises(BadInputError, match="weights lack"):
        MossDecoder.from_pretrained(path, "cpu", torch.float32)
