"""A device model with another link to host memory."""

import re
from pathlib import Path


def with_link(device_model: Path, gb_per_s: float, folder: Path) -> Path:
    """Write a copy of a device model into this folder, whose link has this speed both ways.

    The speed is in the name of the modelled device, and so in every result.
    """
    speed = f'{{ value = {gb_per_s:g}, source = "chosen for this run" }}'
    text, n_changed = re.subn(
        r"^(to_(?:device|host)_gb_per_s) = .*$",
        rf"\1 = {speed}",
        device_model.read_text("utf-8"),
        flags=re.M,
    )
    assert n_changed == 2, "a device model has a speed for each direction"
    name = f", link of {gb_per_s:g} GB/s"
    text = re.sub(r'^(name = ".*)"$', rf'\1{name}"', text, count=1, flags=re.M)
    copy = folder / f"link_{gb_per_s:g}_{device_model.name}"
    copy.write_text(text, "utf-8")
    return copy
