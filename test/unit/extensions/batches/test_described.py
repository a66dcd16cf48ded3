"""Requests of all shapes to the Batch API: each gets a response that is described."""

import tempfile
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from sglang_live.extensions.batches.config import ROUTES
from sglang_live.extensions.batches.extension import NoBatches
from sglang_live.extensions.batches.store import Store
from test.unit.extensions.batches.batches import app_with
from test.unit.gateway.fakes import FakeOrchestrator, app_of

_CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance)
_FOLDER = tempfile.TemporaryDirectory()


class OpenStore(Store):
    """Stays open: the application starts and stops once for each request."""

    def close(self) -> None:
        """At the end of the process."""


store = OpenStore(Path(_FOLDER.name))
schema = schemathesis.openapi.from_asgi("/openapi.json", app_with(FakeOrchestrator(), store))


@schema.include(path_regex="^/v1/(files|batches)").parametrize()
@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_response_is_one_that_is_described(case):
    case.call_and_validate(checks=_CHECKS)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_described(route):
    path, method = route
    assert method.lower() in schema.raw_schema["paths"][path]


def test_a_server_without_a_folder_describes_none():
    without = schemathesis.openapi.from_asgi(
        "/openapi.json", app_of(FakeOrchestrator(), additions=[NoBatches().gateway])
    )
    assert not [path for path, _ in ROUTES if path in without.raw_schema["paths"]]
