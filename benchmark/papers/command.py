"""The command of a paper: its experiments one after the other, a document, and a picture.

The document is written after each experiment. A second run with the same file continues it.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.load.provenance import facts
from benchmark.papers.experiments import Experiment, Row, rows_of, show, to_json
from benchmark.papers.picture import Panel, draw
from benchmark.simulate.config import SimulateConfig

Panels = Callable[[dict[str, list[Row]]], list[Panel]]


class Paper:
    """
    Args:
        name: of the documents.
        panels: of the picture, from the rows of all experiments.
    """

    def __init__(self, name: str, title: str, experiments: Sequence[Experiment], panels: Panels):
        self._name, self._title = name, title
        self._experiments, self._panels = experiments, panels

    def main(self, description: str | None) -> None:
        options = self._parse(description)
        config = SimulateConfig(repeats=options.repeats, seed=options.seed)
        document = self._document(options.json, config)
        for experiment in self._experiments:
            if not experiment.name.startswith(options.only):
                continue
            if experiment.name not in document["experiments"]:
                rows = rows_of(experiment, options.repeats, options.seed)
                show(experiment, rows)
                document["experiments"][experiment.name] = to_json(experiment, rows)
                if options.json is not None:
                    options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        if options.picture is not None:
            found = {
                name: [Row.from_json(row) for row in one["rows"]]
                for name, one in document["experiments"].items()
            }
            draw(self._title, self._panels(found), options.picture)

    def _document(self, path: Path | None, config: SimulateConfig) -> dict[str, Any]:
        settings = {"repeats": config.repeats, "seed": config.seed}
        if path is not None and path.exists():
            document: dict[str, Any] = json.loads(path.read_text("utf-8"))
            if document["config"] != settings:
                raise SystemExit(f"{path} has another configuration: name another file")
            return document
        known = facts(config.device_model) | {"device": f"simulated: {config.server.model.name}"}
        return {"benchmark": self._name, **known, "config": settings, "experiments": {}}

    def _parse(self, description: str | None) -> argparse.Namespace:
        names = [one.name for one in self._experiments]

        def begins(text: str) -> str:
            if any(name.startswith(text) for name in names):
                return text
            raise argparse.ArgumentTypeError(f"no experiment begins so: {'; '.join(names)}")

        parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
        parser.add_argument("--repeats", type=int, default=3, help="seeds (default: %(default)s)")
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument(
            "--only", type=begins, default="", metavar="NAME", help="those whose names begin so"
        )
        parser.add_argument("--json", type=Path, help="write the document, or continue it")
        parser.add_argument("--picture", type=Path, help="draw the curves, SVG or PNG")
        return parser.parse_args()
