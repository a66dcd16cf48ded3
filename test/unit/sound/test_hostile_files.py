"""Hostile files: decoding them costs little memory and time, and ends in sound or an error."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sglang_live.errors import BadInputError
from sglang_live.sound.decoder import Limits, decode_samples

FORMATS = Path(__file__).parents[2] / "data" / "formats"
ROOT = Path(__file__).parents[3]
N_DRAWS = int(os.environ.get("SOUND_FUZZ_DRAWS", "3000"))
# Files have about 4 KB: a decoder that needs longer loops.
PATIENCE_S = 20.0
LIMITS = Limits(max_s=30)


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    command = [sys.executable, "-W", "ignore", "-m", "test.unit.sound.bombs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_bomb_costs_a_hundred_megabytes(results):
    assert len(results) == 18
    assert {name: one for name, one in results.items() if one["grown_mb"] >= 100} == {}


def test_a_file_that_is_too_long_is_an_error_on_every_path(results):
    decoded = {name for name, one in results.items() if one["error"] is None}
    # Really short, or, with a minute, within the bound of SGLang's own API.
    assert {name.rpartition(",")[0] for name in decoded} <= {
        "a flac of 2**36 samples",  # has a tenth of a second
        "50 minutes of silence as ogg",
    }
    assert "50 minutes of silence as ogg, uploaded" not in decoded


def mutated(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        # Half of the changes are in the header.
        end = len(changed) if draw.random() < 0.5 else min(len(changed), 96)
        at = draw.randrange(end)
        match draw.randrange(5):
            case 0:
                changed[at] = draw.randrange(256)
            case 1:
                changed[at] ^= 1 << draw.randrange(8)
            case 2:
                changed[at : at + 4] = draw.choice((b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff"))
            case 3:
                del changed[at : at + draw.randrange(1, 64)]
            case 4:
                changed[at:at] = changed[at : at + draw.randrange(1, 64)]
        if not changed:
            return b""
    return bytes(changed[: draw.randrange(len(changed) + 1)] if draw.random() < 0.1 else changed)


def test_a_damaged_file_is_decoded_within_bounds_or_refused():
    draw = random.Random(22)
    originals = [path.read_bytes() for path in sorted(FORMATS.iterdir()) if path.suffix != ".py"]
    originals = [data for data in originals if len(data) < 20_000]
    n_decoded = 0
    for _ in range(N_DRAWS):
        data = mutated(draw.choice(originals), draw)
        began_s = time.monotonic()
        try:
            audio = decode_samples(data, rate_hz=16_000, limits=LIMITS)
        except BadInputError:
            continue
        finally:
            assert time.monotonic() - began_s < PATIENCE_S, data.hex()
        n_decoded += 1
        assert 0 < len(audio) <= 30 * 16_000 + 16
        assert np.isfinite(audio).all()
        assert np.abs(audio).max() <= 1.0
    assert N_DRAWS / 10 < n_decoded < N_DRAWS
