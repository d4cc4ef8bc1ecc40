"""Complete runs of a scheduler, each a function of one seed, for the tests that need many.

Inputs are narrow on purpose: two letters, lengths at block edges, repeated prompts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

from msgspec import structs
from scheduler_world import Setup, World, open_scheduler, run_alone, weak_digest
from shadow_executor import EOS, STOP, Trouble

from quickstep.config import PolicyName
from quickstep.core.resources.block_pool import chain_digest
from quickstep.core.scheduler import Scheduler
from quickstep.types import Pooling, Request, RequestClass, Resumed, SamplingParams, StepPlan

_ADAPTERS = (("", "", "", "poet"), ("", "poet", "coder", "lawyer", "cook"))


def draw_setup(rng: Random) -> Setup:
    block_size = rng.choice((1, 2, 4))
    setup = Setup(
        num_blocks=rng.randint(3, 14),
        block_size=block_size,
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice((1, 3, 4, 8, 16, 32)),
        max_model_len=rng.choice((8, 16, 17, 32)),
        pipeline_depth=rng.randint(1, 3),
        policy=rng.choice(list(PolicyName)),
        prefix_caching=rng.random() < 0.85,
        digest=rng.choice((chain_digest, chain_digest, weak_digest)),
        inter_token_target_s=rng.choice((0.001, 0.004, 0.1)),
        priority_aging_s=rng.choice((0.01, 0.1, 10.0)),
        halves=rng.random() < 0.3,
        max_drafts=rng.choice((0, 0, 1, 2, 5)),
        token_s=rng.choice((1e-4, 1e-4, 1e-3)),
    )
    # without a draw, so that what follows stays as it is
    has_stages = (setup.num_blocks + setup.max_num_seqs) % 4 == 0
    has_states = (3 * setup.num_blocks + setup.max_num_seqs + setup.max_model_len) % 5 < 2
    num_slots = 2 + (setup.num_blocks + setup.max_model_len) % (setup.max_num_seqs + 4)
    return replace(
        setup,
        num_stages=setup.pipeline_depth if has_stages else 1,
        state_slots=num_slots if has_states else 0,
        state_interval=setup.block_size * (1 + setup.num_blocks % 3),
    )


def draw_crowded_setup(rng: Random) -> Setup:
    """More sequences of unequal tenants than a step has tokens, all with drafts."""
    return replace(
        draw_setup(rng),
        num_blocks=40,
        max_num_seqs=rng.randint(4, 8),
        max_num_batched_tokens=rng.choice((3, 4, 6)),
        pipeline_depth=1,
        num_stages=1,
        policy=PolicyName.FAIR,
        halves=False,
        max_drafts=5,
        token_s=1e-4,
    )


def draw_adapters(rng: Random, setup: Setup) -> Setup:
    """Few places and bytes for the adapters, some of them pinned: many wait, and priorities differ.

    The lengths of their names are their sizes: poet 4, coder 5, lawyer 6, cook 4.
    """
    return replace(
        setup,
        max_loras=rng.choice((1, 1, 2, 3)),
        lora_bytes=rng.choice((None, None, 6, 10, 12)),
        pinned=frozenset(rng.choice(((), (), ("poet",), ("lawyer",)))),
    )


def random_request(rng: Random, setup: Setup, request_id: str, alike: bool = False) -> Request:
    """`alike` requests have one prompt, cut at different lengths, so that they share blocks."""
    length = max(1, setup.block_size * rng.randint(0, 4) + rng.choice((-1, 0, 0, 1)))
    head, tail = (0, 0) if alike else rng.choice(((0, 0), (0, 1), (1, 0)))
    turn = rng.choice((0, 1, setup.block_size, 2 * setup.block_size))
    prompt = tuple(head if position < turn else tail for position in range(length))
    pooling = rng.choice((None, None, None, None, Pooling.MEAN, Pooling.LAST))
    max_tokens = rng.choice((0, 1, 2, 3, 5, 8, 12, None))
    sampling = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)) if setup.max_num_seqs > 2 and not pooling else 1,
        max_tokens=max_tokens,
        min_tokens=0 if max_tokens == 0 else rng.choice((0, 0, 1)),
        prompt_logprobs=0 if max_tokens == 0 else rng.choice((None, None, None, 0)),
        stop_token_ids=rng.choice(((), (STOP,))),
        ignore_eos=rng.random() < 0.3,
    )
    return Request(
        request_id,
        prompt,
        sampling,
        retain_s=(0.0, 0.0, 0.02, 5.0)[length % 4],  # without a draw
        seed=rng.randint(0, 1),
        eos_token_ids=frozenset({EOS}),
        priority=rng.choice((0, 0, 0, -1, 1)),
        adapter_id="" if alike else rng.choice(_ADAPTERS[setup.max_loras is not None]),
        cache_salt="" if alike else rng.choice(("", "", "", "tenant")),
        timeout_s=rng.choice((None, None, None, rng.choice((0.0, 0.01, 0.1)))),
        pooling=pooling,
        tenant=rng.choice(("", "a", "b", "b/user")),
        request_class=rng.choice(list(RequestClass)),
        tenant_weight=rng.choice((0.5, 1.0, 3.0)),
    )


def resumed_request(rng: Random, setup: Setup, request: Request) -> Request:
    """The request after another engine has generated a part of each sequence, or all of it."""
    if request.prompt_only or request.adapter_id or not World(setup).add(request):
        return request
    parts = []
    for one in run_alone(request, setup):
        num_tokens = rng.randint(0, len(one.token_ids))
        is_finished = num_tokens == len(one.token_ids)
        num_scores = rng.randint(0, len(one.prompt_logprobs))
        parts.append(Resumed(one.index, tuple(one.token_ids[:num_tokens]), is_finished, num_scores))
    resumed = structs.replace(request, resumed=tuple(parts))
    return resumed if resumed.indices else request


def draw_trouble(rng: Random, plan: StepPlan) -> tuple[Trouble, frozenset[int]]:
    trouble = rng.choice((Trouble.ROWS, Trouble.EARLY, Trouble.MIDWAY))
    count = rng.randint(1, len(plan.rows))
    return trouble, frozenset(rng.sample(range(len(plan.rows)), count))


def random_run(
    seed: int,
    open_one: Callable[[Setup], Scheduler] = open_scheduler,
    num_calls: int = 60,
    draw: Callable[[Random], Setup] = draw_setup,
    has_adapters: bool = False,
    resumes: bool = False,
    stores: bool = False,
) -> World:
    """a complete run of a scheduler from one seed, verified at its end. With `has_adapters` most
    requests have one, and adapters come and go. With `resumes` another engine began most of them.
    With `stores` evicted KV blocks come back.
    """
    rng = Random(seed)
    max_loras = Random(seed).choice((None, None, None, 1, 2))
    setup = replace(draw(rng), max_loras=max_loras)
    setup = draw_adapters(rng, setup) if has_adapters else setup
    if stores and setup.prefix_caching and setup.use_kv_cache:
        setup = replace(setup, stored_blocks=2 * setup.num_blocks)
    world = World(setup, open_one)
    has_trouble, alike = rng.random() < 0.4, rng.random() < 0.4 and not has_adapters
    calls = ("abort", "abort-one", "expire", "advance")
    if has_adapters:
        calls += ("retire", "retire", "advance", "advance")
    if rng.random() < 0.4:
        calls += ("pause", "pause", "pause", "resume")
    for number in range(num_calls):
        if number % 2 == 0:
            world.move_blocks(fails=number % 20 == 0)
        if stores and number % 3 == 0:
            world.scheduler.reset_prefix_cache()
        match rng.choice(("add", "add", "plan", "plan", "plan", "commit", "commit", "other")):
            case "add":
                request = random_request(rng, world.setup, f"r{number}", alike)
                if resumes and rng.random() < 0.7:
                    request = resumed_request(rng, world.setup, request)
                world.add(request)
            case "plan":
                world.plan()
            case "commit" if world.in_flight:
                if has_trouble and rng.random() < 0.3:
                    world.commit(*draw_trouble(rng, world.in_flight[0]))
                else:
                    world.commit()
            case _:
                _other_call(rng, world, calls)
    world.drain()
    world.verify()
    return world


def _other_call(rng: Random, world: World, calls: tuple[str, ...]) -> None:
    match rng.choice(calls):
        case "abort" if world.received:
            world.abort(rng.choice(list(world.received.values())).request.request_id)
        case "abort-one" if world.received:
            one = rng.choice(list(world.received.values()))
            world.abort(one.request.request_id, one.index)
        case "expire":
            world.expire()
        case "pause" if world.received:
            world.pause(rng.choice(list(world.received.values())).request.request_id)
        case "resume" if world.paused:
            world.resume(rng.choice(sorted(world.paused)))
        case "retire":
            world.retire(rng.choice(_ADAPTERS[True][1:]))
        case "advance" if world.loading and rng.random() < 0.5:
            world.finish_load(fails=rng.random() < 0.1)
        case _:
            world.advance(rng.choice((0.001, 0.05, 2.0)))


def main() -> int:
    """Runs with fresh seeds until a fault: for `make verify-long`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    end_s, seed = time.monotonic() + 60 * args.minutes, args.seed
    while time.monotonic() < end_s:
        for draw, has_adapters in (
            (draw_setup, False),
            (draw_setup, True),
            (draw_crowded_setup, False),
        ):
            try:
                random_run(seed, num_calls=100, draw=draw, has_adapters=has_adapters)
            except BaseException:
                print(f"seed {seed}, {draw.__name__}, has_adapters={has_adapters}")
                raise
        seed += 1
    print(f"{seed - args.seed} seeds from {args.seed}, three runs each: no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
