"""A device model in which every figure is 1."""

from dataclasses import fields

from sglang_live.extensions.planner.device_model.costs import (
    LinkCosts,
    TalkerCosts,
    ThinkerCosts,
    VocoderCosts,
)

KINDS = (("thinker", ThinkerCosts), ("talker", TalkerCosts), ("vocoder", VocoderCosts))
TEXT = 'name = "test"\nn_devices = 2\n' + "".join(
    f"\n[{name}]\n"
    + "".join(f'{f.name} = {{ value = 1, source = "test" }}\n' for f in fields(kind))
    for name, kind in (*KINDS, ("link", LinkCosts))
)
