"""Style of the figures: fonts, colours that colour-blind readers can distinguish, saving."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

DPI = 150
# Okabe and Ito's palette.
BLACK = "#333333"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
RED = "#D55E00"
PURPLE = "#CC79A7"
ARMS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#777777"

SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    # As text, so that it can be searched and read aloud.
    "svg.fonttype": "none",
}


def settings() -> AbstractContextManager[None]:
    return matplotlib.rc_context(SETTINGS)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DPI, metadata={"Title": figure.get_suptitle()})
