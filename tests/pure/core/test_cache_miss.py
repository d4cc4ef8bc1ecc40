"""Why the prefix cache gave a prompt no more tokens, and what the hit rate counts."""

from __future__ import annotations

import pytest
from msgspec import structs
from scheduler_world import PROMPT, Setup, World, ask, finish

from quickstep.types import CacheMiss, Pooling, Request

OTHER = tuple(range(20, 28))


def served(world: World, request: Request) -> tuple[int, CacheMiss | None]:
    """Cached tokens, and why no more, after the request has ended."""
    world.add(request)
    finish(world)
    timings = world.received[f"{request.request_id}#0"].timings
    assert timings is not None
    return timings.num_cached_tokens, timings.cache_miss


def test_a_new_prompt_was_never_cached_and_a_repeated_one_computes_its_last_block() -> None:
    world = World(Setup())
    assert served(world, ask("a")) == (0, CacheMiss.NOT_CACHED)
    assert served(world, ask("b")) == (4, CacheMiss.LAST_BLOCK)
    assert served(world, ask("c", (*PROMPT[:4], *OTHER))) == (4, CacheMiss.NOT_CACHED)


def test_a_block_that_others_needed_was_evicted() -> None:
    world = World(Setup(num_blocks=6))
    served(world, ask("a", PROMPT * 2))
    served(world, ask("b", OTHER * 2))
    num_cached, miss = served(world, ask("c", PROMPT * 2))
    assert num_cached < 12
    assert miss is CacheMiss.EVICTED


def test_a_reset_counts_as_an_eviction_and_frees_no_block_in_use() -> None:
    world = World(Setup())
    served(world, ask("a"))
    world.add(ask("b"))
    world.plan()
    assert world.scheduler.reset_prefix_cache() > 0
    world.scheduler.check()
    finish(world)
    assert world.scheduler.reset_prefix_cache() > 0
    assert world.scheduler.stats().blocks.num_cached == 0
    assert served(world, ask("c")) == (0, CacheMiss.EVICTED)


@pytest.mark.parametrize("changed", [{"cache_salt": "x"}, {"adapter_id": "poet"}])
def test_a_miss_says_nothing_of_prompts_of_another_salt_or_adapter(changed: dict[str, str]) -> None:
    world = World(Setup())
    served(world, ask("a"))
    assert served(world, structs.replace(ask("b"), **changed)) == (0, CacheMiss.NOT_CACHED)
    world.scheduler.reset_prefix_cache()
    other = {name: value * 2 for name, value in changed.items()}
    assert served(world, structs.replace(ask("c"), **other)) == (0, CacheMiss.NOT_CACHED)


def test_what_needs_the_prompts_logits_or_states_reads_no_cache() -> None:
    world = World(Setup())
    served(world, ask("a"))
    scored = ask("b")
    scored = structs.replace(scored, sampling=structs.replace(scored.sampling, prompt_logprobs=0))
    assert served(world, scored) == (0, CacheMiss.PROMPT_LOGPROBS)
    pooled = structs.replace(ask("c"), pooling=Pooling.MEAN)
    assert served(world, pooled) == (0, CacheMiss.POOLING)
    assert served(World(Setup(prefix_caching=False)), ask("d")) == (0, CacheMiss.DISABLED)


def test_neither_a_preemption_nor_a_beam_counts_as_a_lookup() -> None:
    world = World(Setup(num_blocks=8, block_size=2, max_num_batched_tokens=8))
    world.add(ask("first", prompt=(0, 1), max_tokens=None))
    world.add(ask("second", prompt=PROMPT[2:7], max_tokens=None))
    world.add(structs.replace(ask("beam", max_tokens=1), is_continuation=True))
    finish(world)
    totals = world.scheduler.stats().totals
    assert totals.num_preemptions > 0
    assert (totals.prefix_query_tokens, totals.prefix_hit_tokens) == (2 + 5, 0)
