"""What lies in deploy/ names only what there is."""

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from sglang_live.telemetry.metrics import GatewayMetrics

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana.json"
_OF_PROMETHEUS = ("_bucket", "_sum", "_count", "_total")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_series_that_exist():
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    known = {family.name for family in registry.collect()}
    known |= {"sglang_live_stage_up", "sglang_live_stage_load", "sglang_live_stage_starts"}
    for expression in expressions():
        for name in re.findall(r"sglang_live_\w+", expression):
            family = re.sub(rf"({'|'.join(_OF_PROMETHEUS)})$", "", name)
            assert family in known, expression


def test_the_dashboard_asks_for_what_stages_say():
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for expression in expressions():
        for what in re.findall(r'what="(\w+)"', expression):
            assert what in documented, expression


def test_every_panel_says_which_question_it_answers():
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel["description"].endswith(("?", ".")), panel["title"]


def test_images_are_built_by_the_script_that_everybody_uses():
    for path in sorted((ROOT / "deploy").glob("Dockerfile.*")):
        device = path.suffix[1:]
        assert f"scripts/setup.sh --device {device}" in path.read_text()
