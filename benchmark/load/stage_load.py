"""What the stages report of themselves, from the text of the server's /metrics."""

import re
from collections import defaultdict

# Stages report their load every two seconds.
PING_S = 2.5

_SERIES = re.compile(r"^sglang_live_stage_load\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Loads = dict[str, dict[str, float]]


def stage_loads(metrics: str) -> Loads:
    """Values by stage and name, summed over the stage's replicas."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for labels, value in _SERIES.findall(metrics):
        label = dict(_LABEL.findall(labels))
        if "stage" in label and "what" in label:
            found[label["stage"]][label["what"]] += float(value)
    return {stage: dict(values) for stage, values in found.items()}
