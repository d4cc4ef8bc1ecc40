"""Stored fits: what is read back predicts the same, and what cannot be used is ignored."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from quickstep.cache_dir import cache_dir
from quickstep.core.cost_model import Coefficients, CostFit, LinearCostModel, StepLoad
from quickstep.core.overhead import EngineOverhead, StageTimes
from quickstep.engine.machine import usable_cores
from quickstep.engine.step_times import cost_fits
from quickstep.engine.step_times.cost_fits import (
    FitFile,
    FitKey,
    FitSaver,
    FitSource,
    find_calibration,
    fit_key,
)

KEY = FitKey("f" * 32, "1", "a CPU", 2, 2, "cpu", is_eager=False)
START = Coefficients.of_vocabulary(1000)
LOADS = [StepLoad.of_span(start, count) for start in (0, 10, 500) for count in (1, 16, 200)]


def true_seconds(load: StepLoad) -> float:
    return 3e-3 + 2e-5 * load.num_tokens + 1e-8 * load.num_pairs


def learnt(num_steps: int = 100, seed: int = 0, forgetting: float = 0.99) -> LinearCostModel:
    rng, model = Random(seed), LinearCostModel(START, forgetting)
    for _ in range(num_steps):
        load = rng.choice(LOADS)
        model.observe(load, true_seconds(load))
    return model


def fit_of(model: LinearCostModel) -> CostFit:
    fit = model.fit()
    assert fit is not None
    return fit


def test_a_stored_fit_gives_the_same_predictions_and_continues_alike(tmp_path: Path) -> None:
    model, file = learnt(), FitFile(tmp_path, KEY)
    assert LinearCostModel(START).fit() is None
    assert file.read() is None
    file.write(fit_of(model))
    again = LinearCostModel.of_fit(fit_of(model))
    read = file.read()
    assert read == fit_of(model) == fit_of(again)
    assert (again.range, again.num_steps) == (model.range, 100)
    for load in LOADS:
        assert again.seconds(load) == pytest.approx(model.seconds(load), rel=0.02)  # the pace
        for one in (model, again):
            one.observe(load, true_seconds(load))
    for load in LOADS:
        assert again.seconds(load) == pytest.approx(model.seconds(load), rel=0.02)


def test_what_a_calibration_found_is_kept_when_an_engine_saves_its_fit(tmp_path: Path) -> None:
    key = fit_key("f" * 32, "cpu", 2, is_eager=False)
    source, overhead = FitSource("/model", "int8", "auto"), EngineOverhead(1e-4, 1e-5)
    file = FitFile(tmp_path, key)
    assert find_calibration(tmp_path, source) is None
    file.write(fit_of(learnt()), overhead, source)
    file.write(fit_of(learnt(seed=1)))
    stored = find_calibration(tmp_path, source)
    assert stored == file.read_all()
    assert stored is not None
    assert (stored.overhead, stored.source) == (overhead, source)
    assert stored.fit == fit_of(learnt(seed=1))
    assert find_calibration(tmp_path, replace(source, quantization=None)) is None
    elsewhere = FitFile(tmp_path, replace(key, cpu="another CPU"))
    other = replace(source, path="/other")
    elsewhere.write(fit_of(learnt()), overhead, other)
    assert find_calibration(tmp_path, other) is None
    (tmp_path / "cost_fits" / "broken.json").write_bytes(b"{")
    assert find_calibration(tmp_path, source) == stored


def test_a_calibration_of_ranks_stages_or_fewer_threads_is_found_for_these_only(
    tmp_path: Path,
) -> None:
    source, cores = FitSource("/model", None, "auto"), usable_cores()
    halves = max(1, cores // 2)
    stages = StageTimes((0.4, 0.6), 1e-4)
    complete = fit_key("f" * 32, "cpu", cores, is_eager=False)
    FitFile(tmp_path, complete).write(fit_of(learnt()), None, source)
    staged = fit_key("f" * 32, "cpu", halves, False, (1, 2))
    FitFile(tmp_path, staged).write(fit_of(learnt()), None, source, stages)
    FitFile(tmp_path, staged).write(fit_of(learnt(seed=1)))  # by an engine, later
    found = find_calibration(tmp_path, source, split=(1, 2))
    assert found is not None
    assert (found.key, found.stages) == (staged, stages)
    assert find_calibration(tmp_path, source, split=(2, 1)) is None
    one = find_calibration(tmp_path, source)
    assert one is not None
    assert (one.key, one.stages) == (complete, None)
    half = fit_key("f" * 32, "cpu", halves, is_eager=False)
    FitFile(tmp_path, half).write(fit_of(learnt()), None, source)
    two = find_calibration(tmp_path, source, num_engines=2)
    assert two is not None
    assert two.key == half


def test_a_stored_fit_is_not_scaled_by_its_first_step() -> None:
    model = learnt()
    again = LinearCostModel.of_fit(fit_of(model))
    again.observe(LOADS[0], 0.1)
    assert again.seconds(LOADS[-1]) < 2 * model.seconds(LOADS[-1])


def test_solving_to_the_end_finds_the_machine_from_few_steps() -> None:
    model = learnt(num_steps=40, forgetting=1.0)
    model.converge()
    again = LinearCostModel.of_fit(fit_of(model))
    for load in LOADS:
        assert again.seconds(load) == pytest.approx(true_seconds(load), rel=0.02)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}'],
    ids=["empty", "cut", "list", "bytes", "incomplete"],
)
def test_a_broken_file_is_ignored_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    file = FitFile(tmp_path, KEY)
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.read() is None
    assert len(caplog.records) == 1
    file.write(fit_of(learnt()))
    assert file.read() is not None


@pytest.mark.parametrize("what", ["version", "key", "size", "negative"])
def test_a_file_of_another_format_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    file = FitFile(tmp_path, KEY)
    file.write(fit_of(learnt()))
    stored = msgspec.json.decode(file.path.read_bytes())
    match what:
        case "version":
            stored["version"] = 0
        case "key":
            stored["key"]["cpu"] = "another CPU"
        case "size":
            stored["fit"]["moment"].pop()
        case "negative":
            stored["fit"]["coefficients"]["row_s"] = -1.0
    file.path.write_bytes(msgspec.json.encode(stored))
    assert file.read() is None
    assert len(caplog.records) == 1


def test_a_fit_that_is_not_finite_cannot_be_made() -> None:
    fit = fit_of(learnt())
    with pytest.raises(ValueError, match="not finite"):
        replace(fit, moment=(math.nan, *fit.moment[1:]))


def test_each_model_and_machine_has_its_own_file(tmp_path: Path) -> None:
    changes = ({}, {"fingerprint": "e"}, {"num_threads": 1}, {"cpu": "b"}, {"is_eager": True})
    assert len({FitFile(tmp_path, replace(KEY, **change)).path for change in changes}) == 5


def test_the_key_names_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n")
    assert fit_key("f", "cpu", 2, False, root=tmp_path).cpu == "A CPU @ 2 GHz"
    assert fit_key("f", "cpu", 2, False, root=tmp_path / "none").cpu


def test_the_cache_is_where_the_user_has_it() -> None:
    assert cache_dir({"QUICKSTEP_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"QUICKSTEP_CACHE_DIR": ""}) is None
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/quickstep")
    home = Path.home() / ".cache/quickstep"
    assert cache_dir({}) == cache_dir({"XDG_CACHE_HOME": "relative"}) == home


def test_the_tests_do_not_write_into_the_users_cache() -> None:
    assert cache_dir() is None


def test_a_saver_continues_from_the_file_and_saves_at_the_end(tmp_path: Path) -> None:
    file = FitFile(tmp_path, KEY)
    file.write(fit_of(learnt()))
    saver = FitSaver.open(file, START)
    assert saver.model.num_steps == 100
    for _ in range(60):
        saver.model.observe(LOADS[0], 4e-3)
    asyncio.run(saver.close())
    read = file.read()
    assert read is not None
    assert read.num_steps == 160
    assert [one.name for one in file.path.parent.iterdir()] == [file.path.name]


def test_a_saver_saves_every_few_minutes_if_there_are_new_steps(tmp_path: Path) -> None:
    file = FitFile(tmp_path, KEY)
    saver = FitSaver.open(file, START)

    async def ticks() -> None:
        saver.tick(0.0)
        for _ in range(60):
            saver.model.observe(LOADS[0], 4e-3)
        saver.tick(100.0)
        assert not file.path.exists()
        saver.tick(200.0)
        await saver.close()

    asyncio.run(ticks())
    assert fit_of(saver.model) == file.read()
    file.path.unlink()
    asyncio.run(saver.close())  # nothing is new
    assert not file.path.exists()


def test_a_folder_that_cannot_be_written_costs_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cost_fits").write_text("a file")
    saver = cost_fits.FitSaver(learnt(), FitFile(tmp_path, KEY))
    for _ in range(2):
        for _ in range(60):
            saver.model.observe(LOADS[0], 4e-3)
        asyncio.run(saver.close())
    assert len(caplog.records) == 1


def test_nothing_is_stored_without_a_file() -> None:
    saver = FitSaver.open(None, START)
    for _ in range(60):
        saver.model.observe(LOADS[0], 4e-3)
    asyncio.run(saver.close())
    assert saver.model.num_steps == 60
