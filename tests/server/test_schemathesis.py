"""Requests made from openapi.yaml itself: none ends in a 500, and every response is what the description says."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from pagestream.server.app import bare_app
from tests.server.conftest import Live, running

SCHEMA = schemathesis.openapi.from_dict(bare_app().openapi())
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
POSTS = [operation for operation in OPERATIONS if operation.method.upper() == "POST"]
UNHURRIED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def live():
    with running({"step_s": 0.0002, "context": 64, "allows_faults": False}) as server:
        yield server


def send(live: Live, case: schemathesis.Case) -> None:
    """One request; the model is mostly the one served, since all the others would say the same."""
    if isinstance(case.body, dict):
        case.body["model"] = "m"
        if "max_tokens" in case.body:
            case.body["max_tokens"] = 3
    response = case.call(base_url=live.url, timeout=60)
    assert response.status_code < 500, (case.body, response.text)
    case.validate_response(response, checks=[schemathesis.checks.not_a_server_error])
    if response.headers["content-type"][0].startswith("application/json"):
        case.operation.validate_response(response)


@pytest.mark.parametrize("operation", POSTS, ids=lambda operation: operation.path)
def test_what_the_description_allows_never_fails(live: Live, operation):
    @settings(max_examples=25, deadline=None, suppress_health_check=UNHURRIED, database=None, derandomize=True)
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        send(live, case)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("operation", POSTS, ids=lambda operation: operation.path)
def test_thousands_of_requests(live: Live, operation):
    @settings(max_examples=400, deadline=None, suppress_health_check=UNHURRIED, database=None)
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        send(live, case)

    check()
