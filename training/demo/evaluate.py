"""Evaluation of the trained parts, without the server; prints one JSON line per part.

python -m training.demo.evaluate --work DIR [--only PART ...]
"""

import argparse
import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from training.demo import recordings, world
from training.demo.__main__ import SEED, Training, framed
from training.demo.hearing import Spelling, encode, heard_in_rooms
from training.demo.judge import Judge
from training.demo.talker import speak
from training.demo.unknown_sentences import unknown_sentences
from training.demo.voices import ANSWER_RATE_HZ, HeldOutCast

N_DISTRACTORS = 200
HELD_OUT_SEED = SEED + 1
SNR_DB = 15.0


def vocoder(training: Training) -> dict:
    """Answers decoded from their own codes, judged by the recogniser."""
    training.part("vocoder")
    judge = _judge()
    right = {"original": 0, "decoded": 0}
    for said in training.answers:
        codes = training.codebooks.encode(framed(said))
        right["original"] += judge.hear(said.sound, ANSWER_RATE_HZ) == said.text
        right["decoded"] += judge.hear(_decode(training, codes), ANSWER_RATE_HZ) == said.text
    return {**right, "n": len(training.answers), "ways": len(judge.sentences)}


@torch.no_grad()
def talker(training: Training) -> dict:
    """Answers spoken by talker and vocoder with the server's sampling settings."""
    training.part("vocoder")
    training.part("talker")
    judge, inputs = _judge(), training.talker_inputs()
    choose = torch.Generator().manual_seed(HELD_OUT_SEED)
    speaker = next(iter(training.model.config.talker_config.speaker_id.values()))
    context = inputs.user(training.ids("what is your name"))
    right, lengths, same = 0, 0, []
    wrong = []
    for said in training.answers:
        codes = training.codebooks.encode(framed(said))
        most = codes.shape[1] + 40
        made = speak(
            training.model.talker, inputs, context, speaker, training.ids(said.text), choose, most
        )
        both = min(len(made), codes.shape[1])
        same.append((made[:both, 0] == codes[0, :both]).float().mean().item() if both else 0.0)
        lengths += abs(len(made) - codes.shape[1]) <= 3
        heard = judge.hear(_decode(training, made.T), ANSWER_RATE_HZ) if both else None
        right += heard == said.text
        if heard != said.text:
            wrong.append([said.text[:60], (heard or "")[:60], len(made), codes.shape[1]])
    n = len(training.answers)
    return {
        "understood": right,
        "right_length": lengths,
        "n": n,
        "first_code_same": float(np.mean(same)),
        "wrong": wrong,
    }


@torch.no_grad()
def hearing(training: Training) -> dict:
    """Questions in held-out voices, spelt by the audio encoder alone (greedy CTC words)."""
    training.part("hearing")
    thinker = training.model.thinker
    right, clips = 0, _held_out(training)
    every_token = torch.arange(len(training.tokenizer))
    spelling = Spelling.of([every_token], thinker.model.embed_tokens)
    for heard in clips:
        [row] = encode(thinker.audio_tower, [heard.mel.float()])
        spelt = training.tokenizer.decode(spelling.spell(row)).strip()
        right += spelt == heard.text
    return {"spelt_exactly": right, "n": len(clips)}


PARTS = {"vocoder": vocoder, "talker": talker, "hearing": hearing}


def _held_out(training: Training):
    cast = HeldOutCast(random.Random(HELD_OUT_SEED))
    asked = training.recordings.cached("held_out", recordings.spoken_questions(2, 400, cast))
    return heard_in_rooms(asked, HELD_OUT_SEED, SNR_DB)


def _judge() -> Judge:
    distractors = islice(unknown_sentences(random.Random(HELD_OUT_SEED)), N_DISTRACTORS)
    return Judge([*world.answers(), *distractors])


@torch.no_grad()
def _decode(training: Training, codes: torch.Tensor) -> np.ndarray:
    wave = training.model.code2wav(codes[None])[0, 0]
    return functional.pad(wave, (0, 555)).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(args.work)
    for name in args.only:
        print(json.dumps({name: PARTS[name](training)}), flush=True)


if __name__ == "__main__":
    main()
