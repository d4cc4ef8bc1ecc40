"""`verify` with adapters that are loaded and evicted on the way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from quickstep.engine.assembly import load_weights
from quickstep.engine.llm import engine_config
from quickstep.model.interface import Model
from quickstep.runtime.steps import divided
from quickstep.verify import checker
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions, VerifyReport

OPTIONS = VerifyOptions(num_requests=40, seed=3, threads=(1,), rounds=2, num_adapters=12)


@pytest.fixture(autouse=True)
def scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those in which there is no room for all adapters."""
    monkeypatch.setattr(checker, "SCENARIOS", [one for one in checker.SCENARIOS if one.has_loads])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("verify") / "base"))


def verified(checkpoint: str, options: VerifyOptions = OPTIONS) -> VerifyReport:
    def load(threads: int) -> Model:
        sizes = {"num_threads": threads, "num_blocks": 8, "max_model_len": 128}
        return load_weights(engine_config(checkpoint, sizes), None).model

    return verify(load, options)


def test_adapters_that_come_and_go_change_no_bit(checkpoint: str) -> None:
    report = verified(checkpoint)
    assert report.first_mismatch is None
    loads = sum(scenario.runs.adapter_loads for scenario in report.scenarios.values())
    evictions = sum(scenario.runs.adapter_evictions for scenario in report.scenarios.values())
    assert report.comparisons > 80 and loads > evictions > 10
    assert sum(scenario.runs.adapters_retired for scenario in report.scenarios.values()) > 10


def test_rows_with_the_adapter_of_another_row_are_found(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = divided.adapters_of

    def shifted(rows, adapters):  # type: ignore[no-untyped-def]
        mine = found(rows, adapters)
        return dict(zip(mine, [*mine.values()][1:] + [*mine.values()][:1], strict=True))

    monkeypatch.setattr(divided, "adapters_of", shifted)
    assert verified(checkpoint, replace(OPTIONS, fail_fast=True)).first_mismatch is not None
