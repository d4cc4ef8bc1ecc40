"""Some moments of `benchmarks.flood`: every route is flooded, and another key is answered."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine

from benchmarks.flood import Effort, measured
from benchmarks.flood_cases import cases_of
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.operate.metrics import ServerMetrics
from quickstep.server.options import ServerOptions
from quickstep.server.routes import api_routes


def routes() -> set[tuple[str, str]]:
    engine, options = FakeEngine(), ServerOptions()
    models = ModelRegistry.of_one(engine, options)
    found = api_routes(models, ServerMetrics(models, options.metrics), options)
    return {(route.method, route.path.replace(":path", "")) for route in found}


def test_each_route_has_a_case() -> None:
    assert set(cases_of(routes())) == routes()
    with pytest.raises(KeyError, match="/v1/new"):
        cases_of([*routes(), ("GET", "/v1/new")])
    with pytest.raises(KeyError, match="/ping"):
        cases_of(routes() - {("GET", "/ping")})


def test_a_key_is_answered_on_each_route_while_another_one_floods_it() -> None:
    results = measured("demo", Effort(seconds=0.02, num_requests=3, num_connections=8))
    assert {result.route for result in results} == routes()
    assert [failure for result in results for failure in result.failures] == []
    for result in results:
        assert len(result.flooded_ms) >= 3 and len(result.quiet_ms) >= 2, result.route
        assert result.num_sent >= 8, f"{result.route} was not flooded"
        assert not result.floods.get(500), f"{result.route} failed"
