"""Requests of all shapes: each gets an answer that the description of the routes allows."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .fakes import FakeOrchestrator, app_of

_CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)

schema = schemathesis.openapi.from_asgi("/openapi.json", app_of(FakeOrchestrator()))


@schema.parametrize()
@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_is_described(case):
    case.call_and_validate(checks=_CHECKS)
