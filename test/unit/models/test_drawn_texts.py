"""2,000 drawn texts on their way to a voice of one code: no crash, no runaway, no silence."""

import random

import pytest

from sglang_live.messages import TalkerInput
from sglang_live.models.chatterbox.parts import ChatterboxTalker
from sglang_live.models.chatterbox_turbo.parts import TurboTalker
from sglang_live.models.cosyvoice.parts import CosyVoiceTalker
from sglang_live.models.piece_talker import FrameTalker
from sglang_live.speakable.pieces import Limits
from sglang_live.speakable.style import script_of
from sglang_live.stages.talker.piece_speech import BOUND_CHARACTER_S, BOUND_SPARE_S, PieceSpeech
from test.chatterbox import checkpoint as tiny_chatterbox
from test.chatterbox_turbo import checkpoint as tiny_turbo
from test.cosyvoice import checkpoint as tiny_cosyvoice

N_TEXTS = 2000
# Of scripts: Latin, which all voices speak, Chinese, Japanese and Korean, and others.
LATIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZéßøñ"
ASIAN = "你好世界今天天气怎么样ひらがなカタカナ안녕하세요"
OTHER = "приветмирשלוםمرحباनमस्तेสวัสดี"
SIGNS = " \n\t.,!?;:'\"-–—…()[]{}<>|/\\*_`#&@$€£%°+=~^0123456789½²№😀👍🏽"
SIGNS += "\u200b\u00ad\ufeff\x00\x07\u202e"
SCRAPS = (
    *("```", "**", "https://a.com/b?c=d", "\\frac{1}{2}", "&amp;", "1. ", "- ", "# "),
    *("| a | b |\n|---|---|\n", "Dr. ", "12:30", "…" * 50, "9" * 80, "a" * 40),
    *("<|endofprompt|>", "[STOP]", "[SPACE]", "<|im_end|>", "a\u0301\u0302" * 20),
)


def drawn(seed: int) -> str:
    rng = random.Random(seed)
    kinds = [LATIN, ASIAN, OTHER, SIGNS, SCRAPS]
    weights = [rng.random() ** 2 for _ in kinds]
    n = rng.choice((1, 2, 5, 20))
    parts = []
    for kind in rng.choices(kinds, weights, k=n):
        word = "".join(rng.choices(kind, k=rng.randint(1, 8)))
        parts.append(word if rng.random() < 0.5 else word + " ")
    return "".join(parts)


@pytest.fixture(scope="module")
def talkers(tmp_path_factory) -> dict[str, FrameTalker]:
    folder = tmp_path_factory.mktemp("voices")
    of_cosyvoice = {
        f"cosyvoice{n}": CosyVoiceTalker(tiny_cosyvoice.build(folder / f"cosyvoice{n}", version=n))
        for n in (2, 3)
    }
    return of_cosyvoice | {
        "chatterbox": ChatterboxTalker(tiny_chatterbox.build(folder / "chatterbox")),
        "turbo": TurboTalker(tiny_turbo.build(folder / "turbo")),
    }


NAMES = "chatterbox", "turbo", "cosyvoice2", "cosyvoice3"
ENGLISH = NAMES[:2]


class Clock:
    def now_s(self) -> float:
        return 0.0


async def spoken_pieces(talker: FrameTalker, text: str, seed: int = 0):
    """The pieces of a text that comes in parts, and how many letters are left out."""
    speech, rng = PieceSpeech(talker, Clock()), random.Random(seed)
    begin = 0
    while begin < len(text):
        end = begin + rng.randint(1, 30)
        speech.add(TalkerInput("job", [], False, text[begin:end], end))
        begin = end
    speech.add(TalkerInput("job", [], True, "", len(text)))
    pieces = []
    while (piece := await speech.next()) is not None:
        pieces.append(piece)
    return pieces, speech.n_unspeakable


@pytest.mark.parametrize("names", [ENGLISH, NAMES[2:]], ids=["english", "asian"])
async def test_every_piece_of_any_text_is_bounded_and_has_a_prompt_without_marks(talkers, names):
    """They differ in their prompts alone: the pieces are the same."""
    cutter = talkers[names[0]]
    prompts = {name: talkers[name].prompt(talkers[name].voices[0], "") for name in names}
    longest, n_spoken = Limits().longest, 0
    for seed in range(N_TEXTS):
        pieces, _ = await spoken_pieces(cutter, drawn(seed), seed)
        for piece in pieces:
            assert 0 < len(piece.spoken) <= longest, seed
            assert piece.most_frames * cutter.frame_s <= BOUND_SPARE_S + BOUND_CHARACTER_S * longest
            assert piece.words, f"nothing is marked as heard of {piece.spoken!r}"
            for name, empty in prompts.items():
                talker = talkers[name]
                assert talker.style == cutter.style
                prompt = talker.prompt(talker.voices[0], piece.spoken)
                # A letter has at most four bytes, each a token of its own at worst.
                assert len(empty) < len(prompt) <= len(empty) + 4 * longest, seed
                # Marks and voices come as often as in a prompt without a text.
                for mark in {empty[0], empty[-1]}:
                    assert prompt.count(mark) == empty.count(mark), seed
                assert 0 <= talker.least_frames(piece.spoken) < piece.most_frames, seed
        n_spoken += bool(pieces)
    assert n_spoken > N_TEXTS // 2, "the case must not be trivial"


@pytest.mark.parametrize("name", NAMES)
async def test_a_text_with_words_that_the_voice_speaks_is_not_silent(talkers, name):
    talker = talkers[name]
    spoken_letters = LATIN if name in ENGLISH else LATIN + ASIAN
    for seed in range(N_TEXTS // 20):
        rng = random.Random(seed)
        words = ["".join(rng.choices(spoken_letters, k=rng.randint(2, 9))) for _ in range(12)]
        text = " ".join(words[: rng.randint(1, 12)])
        pieces, n_unspeakable = await spoken_pieces(talker, text, seed)
        assert pieces and not n_unspeakable, text


@pytest.mark.parametrize("name", NAMES)
async def test_letters_of_a_script_that_the_voice_lacks_are_left_out_and_counted(talkers, name):
    talker = talkers[name]
    lacking = OTHER + ASIAN if name in ENGLISH else OTHER
    for seed in range(N_TEXTS // 20):
        rng = random.Random(seed)
        text = "".join(rng.choices(lacking, k=rng.randint(1, 60)))
        pieces, n_unspeakable = await spoken_pieces(talker, text, seed)
        n_letters = sum(char.isalpha() for char in text)
        assert not pieces and n_unspeakable == n_letters, text
        assert all(script_of(char) not in talker.style.scripts for char in text if char.isalpha())
