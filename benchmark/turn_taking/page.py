"""Write the tables and the chart of docs/turn_taking.md from the newest document of a run.

python -m benchmark.turn_taking.page
"""

from benchmark.summary import BEGIN, END, RESULTS, ROOT, newest
from benchmark.turn_taking.chart import draw
from benchmark.turn_taking.report import (
    INTERRUPTION_HEAD,
    SHARE_HEAD,
    end_table,
    interruption_table,
    share_table,
)
from sglang_live.interaction.vad import VadSettings

PAGE = ROOT / "docs" / "turn_taking.md"
CHART = ROOT / "docs" / "img" / "turn_taking.svg"


def measured(document: dict) -> str:
    """The text between the markers of the page."""
    names = sorted({recording["name"].split("/")[0] for recording in document["recordings"]})
    lines = [
        f"{document['device']}, commit {document['git_commit'][:9]}, split "
        f"`{document['config']['split']}`: {', '.join(names)}.",
        "",
        "**Ends of turns**, meetings and dialogues together:",
        "",
        *end_table(document["ends"]),
        "",
        SHARE_HEAD,
        "",
        *share_table(document["delays_at_false_cutoffs"]),
        "",
        INTERRUPTION_HEAD,
        "",
        *interruption_table(document["interruptions"], VadSettings().confirm_ms),
    ]
    return "\n".join(lines)


def main() -> None:
    document = newest(RESULTS, "turn_taking")
    assert document is not None, "no document: run python -m benchmark.turn_taking --json first"
    before, rest = PAGE.read_text().split(f"{BEGIN}\n")
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{measured(document)}\n{END}{after}")
    draw(document["ends"], CHART)


if __name__ == "__main__":
    main()
