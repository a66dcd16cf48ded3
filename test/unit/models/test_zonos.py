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
from sglang_live.models.voice_files import read_recording
from sglang_live.models.zonos.conditions import Conditions
from sglang_live.models.zonos.decoder import ZonosDecoder
from sglang_live.models.zonos.family import (
    CODEC_FOLDER,
    FAMILY,
    SPEAKER_FILES,
    SPEAKER_FOLDER,
    ZonosSpec,
)
from sglang_live.models.zonos.parts import N_PHONEMES, ZonosTalker, talker_view
from sglang_live.models.zonos.speaker import SpeakerEncoder, embeddings_of
from test.unit.models.defaults import default_dtype
from test.zonos import checkpoint as tiny
from test.zonos.checkpoint import espeak

__all__ = ["espeak"]
pytestmark = pytest.mark.usefixtures("espeak")
AUDIO = Path(__file__).parents[2] / "data" / "audio"
# Embeddings that Zonos' own code computes with the tiny weights.
SPEAKERS = Path(__file__).parents[2] / "zonos" / "speaker.json"


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
    assert facts.voices == ("random",) and facts.clones_voices and not facts.voices_need_words
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
    (path / SPEAKER_FOLDER / SPEAKER_FILES[1]).unlink()
    with pytest.raises(BadInputError, match=r"LDA-128.pt is missing"):
        model_facts(path)
    shutil.rmtree(path / SPEAKER_FOLDER)
    assert not model_facts(path).clones_voices
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


# --- voices of recordings ---


def test_an_embedding_is_that_of_the_reference(checkpoint):
    wanted = torch.tensor(json.loads(SPEAKERS.read_text())["sp_jfk.flac"])
    assert wanted.std() > 0.1, "the case must not be trivial"
    with default_dtype(torch.bfloat16):
        [found] = embeddings_of(checkpoint, [AUDIO / "sp_jfk.flac"])
    torch.testing.assert_close(found, wanted, atol=0, rtol=2**-8)  # bf16
    samples = torch.from_numpy(read_recording(AUDIO / "sp_jfk.flac", 16_000))
    found = SpeakerEncoder(checkpoint / SPEAKER_FOLDER).embed(samples)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)  # of 32


def test_a_voice_is_a_condition(checkpoint, tmp_path):
    talker = ZonosTalker(checkpoint, tiny.recordings(tmp_path))
    assert talker.voices == ("random", "anna")
    alone, said = talker.prompt("random", "Hi."), talker.prompt("anna", "Hi.")
    [at] = [n for n, pair in enumerate(zip(alone, said, strict=True)) if pair[0] != pair[1]]
    # The first condition behind the phonemes; its row is behind the frame of marks.
    assert alone[at] == min(alone[at:]) and said[at] == alone[-1] + 1


def test_what_is_no_speaker_encoder_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path)
    [recording] = tiny.recordings(tmp_path).glob("*.wav")
    file = path / SPEAKER_FOLDER / SPEAKER_FILES[0]
    torch.save({"weight": torch.zeros(2)}, file)
    with pytest.raises(BadInputError, match=r"is no speaker encoder of Zonos: 'front.conv1"):
        embeddings_of(path, [recording])
    file.write_bytes(b"no weights")
    with pytest.raises(BadInputError, match=r"cannot read .*ResNet293_SimAM_ASP_base.pt"):
        embeddings_of(path, [recording])


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
    assert ZonosSpec.load(checkpoint).codec.ahead_frames == decoder.n_tail_frames


def test_a_codec_without_a_weight_is_refused(checkpoint, tmp_path):
    path = changed(checkpoint, tmp_path)
    file = path / CODEC_FOLDER / "model.safetensors"
    tensors = load_file(file)
    for name in ("quantizer.quantizers.1.out_proj.bias", "decoder.block.0.conv_t1.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, file)
        with pytest.raises(BadInputError, match="weights lack"):
            ZonosDecoder.from_pretrained(path, "cpu", torch.float32)
