"""Random lives of several models in one budget, with a virtual clock, and the rules one by one."""

from __future__ import annotations

import random

import pytest

from quickstep.core.model_residency import ModelResidency, ModelState, ResidencyStep

LOAD = {name: ResidencyStep(name, is_load=True) for name in "abcd"}
UNLOAD = {name: ResidencyStep(name, is_load=False) for name in "abcd"}


def residency(budget: int = 2, overtake_s: float = 10.0, **pinned: bool) -> ModelResidency:
    """Models a, b and c of one byte each, none in memory."""
    models = ModelResidency(budget, overtake_s)
    for name in "abc":
        models.add(name, 1, is_pinned=pinned.get(name, False))
    return models


def load(models: ModelResidency, name: str, request: int, now_s: float = 0.0) -> None:
    """Let a model be loaded for one request."""
    assert not models.request(name, request, now_s)
    steps, _ = models.plan(now_s)
    assert steps == [LOAD[name]]
    assert models.loaded(name, now_s) == [request]


def test_a_model_is_loaded_when_it_is_named_and_then_serves_at_once() -> None:
    models = residency()
    load(models, "a", 1)
    assert models.request("a", 2, 1.0)
    assert models.state("a") is ModelState.READY


def test_the_least_recently_used_idle_model_leaves() -> None:
    models = residency()
    load(models, "a", 1, 0.0)
    load(models, "b", 2, 1.0)
    models.end("b", 2, 2.0)
    models.end("a", 1, 3.0)
    assert not models.request("c", 3, 4.0)
    assert models.plan(4.0)[0] == [UNLOAD["b"]]
    assert models.plan(4.0)[0] == []
    models.unloaded("b")
    assert models.plan(4.0)[0] == [LOAD["c"]]
    assert models.state("b") is ModelState.ASLEEP


def test_no_model_leaves_that_need_not() -> None:
    models = ModelResidency(7)
    for name, num_bytes in {"a": 1, "b": 4, "c": 5}.items():
        models.add(name, num_bytes)
    load(models, "a", 1, 0.0)
    load(models, "b", 2, 1.0)
    models.end("a", 1, 2.0)
    models.end("b", 2, 3.0)
    assert not models.request("c", 3, 4.0)
    assert models.plan(4.0)[0] == [UNLOAD["b"]]


def test_a_model_with_requests_is_not_unloaded() -> None:
    models = residency(budget=1)
    load(models, "a", 1)
    assert not models.request("b", 2, 1.0)
    assert models.plan(9.0)[0] == []
    models.end("a", 1, 9.5)
    assert models.plan(9.5, busy={"a"})[0] == []
    assert models.plan(9.5)[0] == [UNLOAD["a"]]


def test_a_model_that_waits_too_long_gets_its_turn() -> None:
    models = residency(budget=1)
    load(models, "a", 1)
    assert not models.request("b", 2, 1.0)
    assert models.next_s() == 11.0
    assert models.plan(11.0) == ([], [])
    assert models.state("a") is ModelState.DRAINING
    assert not models.request("a", 3, 11.5)
    models.end("a", 1, 12.0)
    assert models.plan(12.0)[0] == [UNLOAD["a"]]
    models.unloaded("a")
    assert models.plan(12.0)[0] == [LOAD["b"]]
    assert models.loaded("b", 13.0) == [2]
    models.end("b", 2, 14.0)
    assert models.plan(14.0)[0] == [UNLOAD["b"]]
    models.unloaded("b")
    assert models.plan(14.0)[0] == [LOAD["a"]]
    assert models.loaded("a", 15.0) == [3]


def test_a_draining_model_takes_requests_again_when_the_starved_one_has_gone() -> None:
    models = residency(budget=1)
    load(models, "a", 1)
    assert not models.request("b", 2, 0.0)
    models.plan(10.0)
    assert not models.request("a", 3, 10.5)
    models.end("b", 2, 11.0)
    assert models.plan(11.0) == ([], [3])
    assert models.state("a") is ModelState.READY


def test_a_pinned_model_stays() -> None:
    models = residency(budget=1, a=True)
    load(models, "a", 1)
    models.end("a", 1, 1.0)
    assert models.free_for("b") == 0
    assert not models.unload("a")
    assert not models.request("b", 2, 2.0)
    assert models.plan(100.0)[0] == []
    assert models.state("a") is ModelState.READY


def test_an_idle_model_is_unloaded_after_its_time() -> None:
    models = residency()
    load(models, "a", 1)
    models.set_idle_s("a", 5.0)
    assert models.plan(100.0)[0] == []
    models.end("a", 1, 100.0)
    assert models.next_s() == 105.0
    assert models.plan(104.0)[0] == []
    assert models.plan(105.0)[0] == [UNLOAD["a"]]


def test_a_model_that_failed_refuses_its_requests_and_is_tried_again() -> None:
    models = residency()
    models.request("a", 1, 0.0)
    models.request("a", 2, 0.0)
    models.plan(0.0)
    assert models.failed("a") == [1, 2]
    assert models.plan(1.0)[0] == []
    assert not models.request("a", 3, 2.0)
    assert models.plan(2.0)[0] == [LOAD["a"]]


def test_as_many_models_are_loaded_at_the_start_as_fit_pinned_ones_first() -> None:
    models = residency(budget=2, c=True)
    models.preload(3)
    assert models.plan(0.0)[0] == [LOAD["a"], LOAD["c"]]


def test_a_model_that_is_larger_than_was_known_makes_idle_ones_leave() -> None:
    models = ModelResidency(5)
    for name, num_bytes in {"a": 2, "b": 2, "c": 0}.items():
        models.add(name, num_bytes)
    load(models, "a", 1, 0.0)
    load(models, "b", 2, 1.0)
    models.end("a", 1, 2.0)
    load(models, "c", 3, 3.0)
    models.set_bytes("c", 4)
    assert models.plan(4.0)[0] == [UNLOAD["a"]]
    assert models.plan(4.0)[0] == []  # `b` is busy
    models.unloaded("a")
    models.end("b", 2, 5.0)
    assert models.plan(5.0)[0] == [UNLOAD["b"]]
    models.unloaded("b")
    assert models.plan(6.0)[0] == []


@pytest.mark.parametrize("seed", range(60))
def test_random_lives_keep_the_budget_and_the_bound(seed: int) -> None:
    """Nothing beyond the budget but what was not known, nothing busy unloaded, nothing starved, all
    requests end.
    """
    choose = random.Random(seed)
    overtake_s, load_s, run_s = 5.0, 3.0, 4.0
    budget = choose.randint(3, 6)
    models = ModelResidency(budget, overtake_s)
    sizes = {name: choose.randint(1, 3) for name in "abcd"}
    unknown = 0
    for name, size in sizes.items():
        known = choose.choice([size, size, size - 1])  # until it has been loaded
        unknown += size - known
        models.add(name, known, idle_s=choose.choice([None, 2.0]))
    pending: list[tuple[float, str, str, int]] = []  # when, what, which model, which request
    held: dict[str, set[int]] = {name: set() for name in sizes}
    arrived: dict[int, float] = {}
    in_memory: dict[str, int] = {}
    longest_s = 0.0
    numbers = iter(range(10_000))

    def admit(name: str, requests: list[int], now_s: float) -> None:
        nonlocal longest_s
        for request in requests:
            longest_s = max(longest_s, now_s - arrived.pop(request))
            held[name].add(request)
            pending.append((now_s + choose.uniform(0.0, run_s), "end", name, request))

    now_s = 0.0
    owner: dict[int, str] = {}
    for tick in range(1200):
        now_s = tick * 0.25
        for event in [event for event in pending if event[0] <= now_s]:
            pending.remove(event)
            _, what, name, request = event
            if what == "end":
                held[name].discard(request)
                models.end(name, request, now_s)
            elif what == "loaded":
                models.set_bytes(name, sizes[name])
                admit(name, models.loaded(name, now_s), now_s)
            else:
                del in_memory[name]
                models.unloaded(name)
        if tick < 1000 and choose.random() < 0.4:
            name, request = choose.choice("abcd"), next(numbers)
            arrived[request], owner[request] = now_s, name
            if models.request(name, request, now_s):
                admit(name, [request], now_s)
        steps, admitted = models.plan(now_s)
        for request in admitted:
            admit(owner[request], [request], now_s)
        for step in steps:
            if step.is_load:
                in_memory[step.model] = sizes[step.model]
                pending.append((now_s + choose.uniform(0.0, load_s), "loaded", step.model, 0))
            else:
                assert not held[step.model], "a busy model was unloaded"
                pending.append((now_s + choose.uniform(0.0, 1.0), "unloaded", step.model, 0))
        assert sum(in_memory.values()) <= budget + unknown
    assert sum(in_memory.values()) <= budget
    assert not arrived and not any(held.values())
    # every other model may come first; each has its bound, its drain, its unloading and loading
    assert longest_s <= (len(sizes) - 1) * (overtake_s + 2 * run_s + 2 + 2 * load_s)
