"""The server's line every ten seconds."""

from scheduler_world import Setup, World, ask, finish

from quickstep.core.accounting import SchedulerStats, Totals
from quickstep.core.resources.block_pool import PoolStats
from quickstep.engine.stats import EngineState, EngineStats
from quickstep.server.operate.metrics import TrafficLog


def stats(now_s: float, totals: Totals, num_requests: int = 0) -> EngineStats:
    return EngineStats(
        state=EngineState.RUNNING,
        failure="",
        now_s=now_s,
        last_step_s=None,
        busy_since_s=None,
        num_steps_in_flight=0,
        num_requests=num_requests,
        scheduler=SchedulerStats(
            num_waiting=1,
            num_running=2,
            num_preempted=1,
            num_in_flight=0,
            blocks=PoolStats(num_free=60, num_cached=15, num_used=25, num_hits=0, num_evictions=0),
            totals=totals,
        ),
    )


def test_an_idle_engine_says_nothing() -> None:
    log = TrafficLog(stats(0.0, Totals(num_steps=5)))
    assert log.line(stats(10.0, Totals(num_steps=5))) is None


def test_rates_are_since_the_last_line() -> None:
    log = TrafficLog(stats(0.0, Totals(num_steps=5, num_output_tokens=100)))
    totals = Totals(
        num_steps=9,
        num_prefill_tokens=400,
        num_output_tokens=300,
        prefix_query_tokens=400,
        prefix_hit_tokens=100,
    )
    assert log.line(stats(10.0, totals)) == (
        "prompt 40.0 tokens/s, generation 20.0 tokens/s, running 2, waiting 2, "
        "KV blocks in use 25.0%, prefix cache hits 25.0%"
    )
    assert log.line(stats(20.0, totals)) is None


def test_embedded_prompts_are_counted() -> None:
    log = TrafficLog(stats(0.0, Totals()))
    lines = [log.line(stats(n, Totals(num_steps=n)), embedded) for n, embedded in ((1, 3), (2, 3))]
    assert [str(line).endswith(", embedded 3") for line in lines] == [True, False]


def test_work_without_a_step_is_reported() -> None:
    log = TrafficLog(stats(0.0, Totals()))
    line = log.line(stats(10.0, Totals(), num_requests=1))
    assert line is not None
    assert line.startswith("prompt 0.0 tokens/s, generation 0.0 tokens/s")


def test_a_long_prompt_is_counted_as_steps_compute_it() -> None:
    """Not when it arrives, and neither what the cache gave."""
    world = World(Setup(max_num_batched_tokens=8, max_model_len=60))
    log = TrafficLog(stats(0.0, world.scheduler.stats().totals))
    world.add(ask("long", tuple(range(30, 54)), 4))
    rates = []
    for now_s in range(1, 5):
        line = log.line(stats(float(now_s), world.scheduler.stats().totals, num_requests=1))
        rates.append(str(line).partition(",")[0])
        world.plan()
        world.commit()
    assert rates == [f"prompt {num}.0 tokens/s" for num in (0, 8, 8, 8)]
    finish(world)
    world.add(ask("again", tuple(range(30, 54)), 4))
    finish(world)
    totals = world.scheduler.stats().totals
    assert totals.prefix_hit_tokens > 0
    assert totals.num_prefill_tokens == 48 - totals.prefix_hit_tokens
