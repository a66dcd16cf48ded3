"""No code of the scheduler's thread waits for the device, apart from where results are due.

A new place fails here: move it to the host's copy of the values, copy with models/host_copy.py, or
list it with the reason why it does not wait.
"""

from collections import Counter
from pathlib import Path

import pytest

from .device_waits import PACKAGE, REASONS, waits_in

FOLDERS = (
    "bridge",
    "models/qwen3_omni",
    "models/qwen3_tts",
    "models/speech_lm",
    "engine_channel",
    "extensions/elastic",
    "extensions/lending",
)


def test_every_place_that_could_wait_for_the_device_has_a_reason():
    found = {}
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            counts = Counter(waits_in(path))
            if counts:
                places = {f"{w} x{n}" if n > 1 else w for w, n in counts.items()}
                found[path.relative_to(PACKAGE).as_posix()] = places
    assert found == {file: set(reasons) for file, reasons in REASONS.items()}


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("x.item()", ["f item"]),
        ("x.tolist()", ["f tolist"]),
        ("x.nonzero()", ["f nonzero"]),
        ("x.cpu()", ["f cpu"]),
        ("int(x.max())", ["f int"]),
        ("bool(x[0])", ["f bool"]),
        ("torch.tensor(y, device=d)", ["f tensor"]),
        ("x.to(d)", ["f to"]),
        ("x.to(device=d, dtype=torch.int64)", ["f to"]),
        ("x.to(torch.int64)", []),
        ("x.to(y.dtype)", []),
        ("x.to(dtype=torch.int64, copy=True)", []),
        ("torch.tensor(y)", []),
        ("int(text)", []),
        ("copy_to(x, d)", []),
    ],
)
def test_the_search_finds_reads_and_copies_and_no_conversions(tmp_path: Path, line, waits):
    path = tmp_path / "code.py"
    path.write_text(f"def f(x, y, d, text):\n    {line}\n")
    assert list(waits_in(path)) == waits
