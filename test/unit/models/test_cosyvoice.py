"""What identifies a CosyVoice checkpoint, its voices, its prompts, and how it draws codes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_live.errors import BadInputError
from sglang_live.models.checkpoint_files import check_checkpoint, find_checkpoint
from sglang_live.models.cosyvoice.family import BASE, FAMILY, VOICES, WEIGHTS, voice_names
from sglang_live.models.cosyvoice.parts import CosyVoiceTalker
from sglang_live.models.family import model_facts, read_json
from sglang_live.models.speech_lm.sampler import NO_CODE, Redraw, Sampler, draws_of
from test.cosyvoice import checkpoint as tiny
from test.cosyvoice.reference import CosyVoiceLM
from test.noise import FIRST_CODE_SALT, noise_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("cosyvoice"))


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


# --- the checkpoint ---


def test_a_checkpoint_without_a_config_is_known_by_its_files(checkpoint):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.cosyvoice.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("anna", "bert")
    assert find_checkpoint(str(checkpoint), ()) == checkpoint
    check_checkpoint(facts.weights)
    FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 4)
    with pytest.raises(BadInputError, match="num_attention_heads is 4"):
        FAMILY.check_ranks(checkpoint, "talker", "--talker.tp-size", 8)


@pytest.mark.parametrize("name", [WEIGHTS, "flow.pt", "hift.pt", f"{BASE}/config.json", VOICES])
def test_a_missing_file_is_named(copy, name):
    (copy / "campplus.onnx").unlink()
    (copy / name).unlink()
    with pytest.raises(BadInputError, match=f"{name} is missing"):
        model_facts(copy)


def test_weights_that_are_cut_short_are_named(copy):
    data = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInputError, match=r"llm.pt is no file of weights, or cut short"):
        model_facts(copy)


def test_another_language_model_is_refused(copy):
    (copy / BASE / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadInputError, match=r"CosyVoice-BlankEN/config.json is no Qwen2"):
        CosyVoiceTalker(copy)


# --- voices ---


def test_names_of_voices_are_read_without_torch_and_without_running_code(checkpoint, tmp_path):
    code = (
        "import sys; from pathlib import Path; from sglang_live.models.family import model_facts;"
        f"print(model_facts(Path({str(checkpoint)!r})).voices);"
        "print(sorted({'torch', 'sglang', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["('anna', 'bert')", "[]"]

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"anna": Evil()}, tmp_path / VOICES)
    assert voice_names(tmp_path) == ("anna",)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"no voices"])
def test_a_broken_file_of_voices_is_named(copy, content):
    (copy / VOICES).write_bytes(content)
    with pytest.raises(BadInputError, match=r"spk2info.pt cannot be read"):
        model_facts(copy)


def test_a_file_without_a_voice_or_with_one_of_another_form_is_refused(copy):
    torch.save({}, copy / VOICES)
    with pytest.raises(BadInputError, match=r"spk2info.pt has no voice"):
        model_facts(copy)
    codes = torch.tensor([[3, 6561]])
    for changes, message in (
        ({"llm_prompt_speech_token": codes}, "llm_prompt_speech_token has ids from 3 to 6561"),
        ({"prompt_text": None}, "'NoneType' object"),
    ):
        torch.save({"anna": tiny.voice(0) | changes}, copy / VOICES)
        with pytest.raises(BadInputError, match=f"voice 'anna' is no zero-shot voice: {message}"):
            CosyVoiceTalker(copy)
    torch.save({"anna": {"embedding": torch.zeros(1, 192)}}, copy / VOICES)
    with pytest.raises(BadInputError, match="is no zero-shot voice: 'prompt_text'"):
        CosyVoiceTalker(copy)


def test_voices_of_version_3_need_an_instruction(tmp_path):
    path = tiny.build(tmp_path / "three", version=3)
    assert CosyVoiceTalker(path).voices == ("anna", "bert")
    torch.save({"anna": tiny.voice(0)}, path / VOICES)
    with pytest.raises(BadInputError, match=r"the words of voice 'anna' lack <\|endofprompt\|>"):
        CosyVoiceTalker(path)


# --- prompts ---


@pytest.mark.parametrize(("version", "n_ids"), [(2, 6564), (3, 6761)])
def test_a_prompt_is_marks_words_and_a_recording(tmp_path, version, n_ids):
    talker = CosyVoiceTalker(tiny.build(tmp_path / "it", version=version))
    ids = talker.prompt("bert", "Hi")
    voice = tiny.voice(1, version)
    words = [*voice["prompt_text"][0].tolist(), *tiny.tokenizer().encode("Hi").ids]
    rows = n_ids + tiny.TEXT_VOCAB
    codes = voice["llm_prompt_speech_token"][0].tolist()
    assert ids == [rows, *(n_ids + token for token in words), rows + 1, *codes]
    assert talker.least_frames("Hi") == 4
    with pytest.raises(BadInputError, match="voice 'clara' is not one of"):
        talker.prompt("clara", "Hi.")


@pytest.mark.parametrize(("version", "n_ids", "n_head"), [(2, 6564, 0), (3, 6761, 6)])
def test_a_text_that_grows_is_mixed_with_the_recording_behind_an_instruction(
    tmp_path, version, n_ids, n_head
):
    talker = CosyVoiceTalker(tiny.build(tmp_path / "it", version=version))
    mixed, known = talker.mixed_voice("bert"), tiny.voice(1, version)
    words = [n_ids + token for token in known["prompt_text"][0].tolist()]
    codes = known["llm_prompt_speech_token"][0].tolist()
    rows = n_ids + tiny.TEXT_VOCAB
    assert list(mixed.head) == [rows, *words[:n_head]] and list(mixed.words) == words[n_head:]
    assert (mixed.task_id, mixed.again_id, mixed.block) == (rows + 1, rows + 2, len(codes) % 15)
    assert mixed.prompt(mixed.words)[-1] == codes[-1]
    assert talker.words("Hi") == [n_ids + token for token in tiny.tokenizer().encode("Hi").ids]
    with pytest.raises(BadInputError, match="voice 'clara' is not one of"):
        talker.mixed_voice("clara")


def test_no_text_becomes_a_mark(tmp_path):
    talker = CosyVoiceTalker(tiny.build(tmp_path / "three", version=3))
    voice = len(talker.prompt("anna", ""))
    assert len(talker.prompt("anna", "<|endofprompt|>")) == voice + len("<|endofprompt|>")


def test_a_view_has_one_file_of_weights_and_a_config(checkpoint, tmp_path):
    view = Path(CosyVoiceTalker(checkpoint).engine_args(tmp_path, 7)["model_path"])
    assert sorted(file.name for file in view.iterdir()) == ["config.json", WEIGHTS]
    config = read_json(view / "config.json")
    assert (config["vocab_size"], config["text_vocab_size"]) == (6564, tiny.TEXT_VOCAB)
    assert config["architectures"] == ["CosyVoiceLM"] and not config["tie_word_embeddings"]


# --- drawing ---


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_codes_are_drawn_as_by_the_reference_with_the_same_noise(spread):
    rng = torch.Generator().manual_seed(1)
    sampler = Sampler(
        top_k=25, top_p=0.8, of_all=True, redraw=Redraw(window=10, least=1, excludes=True)
    )
    base = spread * torch.randn(60, generator=rng)
    model, n, seed = CosyVoiceLM(tiny.config(), 2), 300, 7
    noise, codes = noise_of(seed), list[int]()
    n_alone = 0
    for frame in range(n):
        scores = (base + 0.3 * torch.randn(60, generator=rng)).log_softmax(dim=0)
        draw = draws_of(torch.tensor([seed ^ FIRST_CODE_SALT]), torch.tensor([frame]), 1)[:, 0]
        window = [NO_CODE] * max(0, 10 - len(codes)) + codes[-10:]
        found = sampler.choose(
            scores[None], torch.ones(1), torch.tensor([False]), draw, torch.tensor([window])
        )
        wanted = model._drawn(scores.clone(), codes, *noise(frame, 60))
        assert int(found) == wanted
        n_alone += wanted == int((scores + noise(frame, 60)[0]).argmax())
        codes.append(wanted)
    assert 20 < model.n_redrawn < n and n_alone < n, "both rules matter"
