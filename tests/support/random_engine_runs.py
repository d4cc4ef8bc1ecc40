"""Random runs of live engines: nothing waits for ever, nothing is held, every answer is right.

A run is a function of one seed, up to the timing of the machine: an engine of the demo model with
random options (policy, drafts, few KV blocks, few places for adapters), in this process or in one
of its own that is killed now and then, and clients that come, read slowly, leave, search with
beams, and load, replace and unload adapters. Every answer is compared with that of the request
alone in a plain engine. With fresh seeds:

    python tests/support/random_engine_runs.py [--minutes 30] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from quickstep.config import EngineConfig, PolicyName, StreamConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.beam_search import BeamSearch, BeamSearchParams
from quickstep.engine.engine import Engine
from quickstep.engine.llm import engine_config
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.errors import EngineError, RequestError
from quickstep.model.checkpoint.source import bundled_drafts
from quickstep.types import FinishReason, Grammar, Request, SamplingParams

ADAPTERS = ("demo-docstrings", "demo-annotations", "demo-sql")
CHANGING = "changing"  # a name that gets one adapter after the other
MAX_MODEL_LEN = 192
RUN_LIMIT_S = 120.0  # after which a client waits for ever
_TEXTS = (
    "import os\n\ndef read(path):\n    ",
    "class Reader:\n    def __init__(self, ",
    "SELECT name, email FROM users WHERE ",
    "x = [1, 2, 3, 1, 2, 3, 1, 2, ",
    "if not isinstance(value, str):\n    raise TypeError(value)\n" * 3,
)
_GRAMMARS = (
    Grammar.of_json_object(),
    Grammar.of_regex("[a-z ]{3,30}[0-9.]"),
    Grammar.of_json_schema({"type": "array", "items": {"type": "number"}, "minItems": 2}),
)

AnyEngine = Engine | RemoteEngine
Answer = list[tuple[Any, ...]]  # (token ids, logprobs, text, end) of each sequence


@dataclass
class EngineRun:
    """What one run did; `faults` should be empty."""

    seed: int
    faults: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_kills: int = 0


def random_options(rng: Random) -> tuple[dict[str, Any], int | None]:
    """Options of an engine, and how many deltas of a stream may be unread."""
    names = bundled_drafts("demo")
    methods = [{"method": "ngram"}, {"method": "suffix"}, *({"model": name} for name in names)]
    chosen = rng.choice(([], rng.sample(methods, 1), rng.sample(methods, 1), methods))
    drafts = {"num_speculative_tokens": rng.choice((1, 3, 8)), "tree_width": rng.choice((1, 2, 4))}
    options = {
        "num_threads": 1,
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": rng.choice((12, 16, 24, 60)),
        "max_num_seqs": rng.randint(4, 16),
        "max_num_batched_tokens": rng.choice((16, 24, 64, 512)),
        "policy": rng.choice(list(PolicyName)),
        "inter_token_target_s": rng.choice((0.002, 0.2)),
        "enable_prefix_caching": rng.random() < 0.8,
        "pipeline_depth": rng.choice((1, 1, 2)),
        "priority_aging_s": rng.choice((0.05, 10.0)),
        "batch_timeout_s": 0.01,
        "enable_lora": True,
        "max_loras": rng.randint(1, 3),
    }
    if options["num_blocks"] == 24:  # no draw of its own: what follows stays as it was
        options["pipeline_parallel_size"] = 2
    if chosen:
        configs = [{**one, **drafts} for one in chosen]
        options["speculative_config"] = configs[0] if len(configs) == 1 else configs
    return options, rng.choice((None, 2, 5))


def random_request(rng: Random, encode: Callable[[str], list[int]], number: int) -> Request:
    """A request that the plain engine can answer alone."""
    ids = encode(rng.choice(_TEXTS) + rng.choice(("", "a", "foo(bar)", rng.choice(_TEXTS))))
    ids += [rng.randrange(1000) for _ in range(rng.choice((0, 0, 3, 20)))]
    grammar = rng.choice(_GRAMMARS) if rng.random() < 0.25 else None
    sampling = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 0.0, 0.8, 1.2)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 0, 20)),
        max_tokens=rng.randint(1, 40),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.7)),
        dry_multiplier=rng.choice((0.0, 0.0, 0.8)),
        seed=rng.randrange(2**50),
        logprobs=rng.choice((None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, None, 1)),
        stop=rng.choice(((), (), ("\n\n",), ("(", "x = "))),
        ignore_eos=grammar is None and rng.random() < 0.5,
        grammar=grammar,
    )
    return Request(
        f"q{number}",
        tuple(ids[:110]),
        sampling,
        adapter=rng.choice(("", "", *ADAPTERS, CHANGING)),
        priority=rng.choice((0, 0, 1, -1)),
        tenant=rng.choice(("a", "b", "c/x")),
        cache_salt=rng.choice(("", "", "s")),
        speculation=rng.random() < 0.9,
    )


async def answer(
    engine: AnyEngine, request: Request, leaves_after: int | None = None, pause_s: float = 0.0
) -> Answer:
    """The sequences of a request, up to where its client leaves.

    Raises:
        RequestError: It was refused.
        EngineError: It ended with an error.
    """
    found: list[list[Any]] = [[[], [], "", None] for _ in range(request.sampling.n)]
    held = await engine.prepare(request)
    num_deltas = 0
    async with engine.stream(request) as stream:
        if isinstance(engine, RemoteEngine):
            await stream.accepted()
        del held
        async for delta in stream:
            one = found[delta.index]
            one[0] += delta.token_ids
            one[1] += delta.logprobs
            one[2] += delta.text
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineError(delta.error)
            if delta.finish_reason is not None:
                one[3] = delta.finish_reason
            num_deltas += 1
            if leaves_after is not None and num_deltas >= leaves_after:
                break
            if pause_s:
                await asyncio.sleep(pause_s)
    return [tuple(one) for one in found]


async def beams(engine: AnyEngine, request: Request) -> Answer:
    """The hypotheses of a beam search over the prompt of a request."""
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    search = BeamSearch(
        engine.stream,
        Request("", request.prompt_token_ids),
        params,
        engine.tokenizer.eos_token_ids,
        max_model_len=engine.max_model_len,
        vocab_size=engine.model.vocab_size if isinstance(engine, Engine) else 2**31,
    )
    search.start()
    return [(one.token_ids, one.logprobs, one.score) for one in await search.run()]


def is_start_of(cut: Answer, complete: Answer) -> bool:
    """Whether a client that left had the beginning of an answer."""
    return all(
        part[0] == whole[0][: len(part[0])] and part[1] == whole[1][: len(part[1])]
        for part, whole in zip(cut, complete, strict=True)
    )


class Plain:
    """The plain engine: one request at a time, without drafts or a prefix cache."""

    def __init__(self) -> None:
        options = {"num_threads": 1, "max_model_len": MAX_MODEL_LEN, "num_blocks": 64}
        options |= {"enable_prefix_caching": False, "enable_lora": True, "max_loras": 8}
        self.engine = open_engine(engine_config("demo", options))

    async def start(self) -> None:
        await self.engine.start()
        for name in ADAPTERS:
            await self.engine.load_adapter(name, name)

    async def answers(self, request: Request) -> list[Answer]:
        """What a request may get: several if its adapter is one that changes."""
        names = ADAPTERS if request.adapter == CHANGING else (request.adapter,)
        return [await answer(self.engine, replace(request, adapter=name)) for name in names]


async def one_run(seed: int, plain: Plain, num_requests: int = 24) -> EngineRun:
    """A complete run; the engine is closed at its end."""
    rng, run = Random(seed), EngineRun(seed)
    options, unread = random_options(rng)
    streams = None if unread is None else StreamConfig(unread)
    config = replace(engine_config("demo", options), streams=streams)
    has_process = rng.random() < 0.25
    engine: AnyEngine
    if has_process:
        engine = RemoteEngine(config)
        await engine.open()
    else:
        engine = open_engine(config)
    await engine.start()
    try:
        await _live(engine, config, plain, rng, run, num_requests)
    finally:
        await engine.stop()
    return run


async def _live(
    engine: AnyEngine, config: EngineConfig, plain: Plain, rng: Random, run: EngineRun, num: int
) -> None:
    for name in (*ADAPTERS, CHANGING):
        await engine.load_adapter(name, rng.choice(ADAPTERS) if name == CHANGING else name)
    requests = [random_request(rng, plain.engine.tokenizer.encode, number) for number in range(num)]
    clients: list[Awaitable[None]] = [
        _client(engine, plain, request, Random(rng.random()), run) for request in requests
    ]
    others = [asyncio.create_task(_change_adapters(engine, Random(rng.random())))]
    if isinstance(engine, RemoteEngine):
        others.append(asyncio.create_task(_kill(engine, Random(rng.random()), run)))
    try:
        async with asyncio.timeout(RUN_LIMIT_S):
            await asyncio.gather(*clients)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await _settle(engine)
    except TimeoutError:
        run.faults.append(f"something waits for ever: {engine.stats()}")
        return
    except AssertionError as error:
        run.faults.append(f"at the end: {error}")


async def _client(
    engine: AnyEngine, plain: Plain, request: Request, rng: Random, run: EngineRun
) -> None:
    """One client; a request whose engine was killed is sent again."""
    await asyncio.sleep(rng.random() * 0.4)
    leaves_after = rng.randint(1, 20) if rng.random() < 0.2 else None
    pause_s = 0.01 if rng.random() < 0.25 else 0.0
    searches = rng.random() < 0.15
    while True:  # ended by the limit of the run
        try:
            if searches:
                found = await beams(engine, request)
            else:
                found = await answer(engine, request, leaves_after, pause_s)
            break
        except RequestError as error:
            if request.adapter != CHANGING:  # that one is unloaded now and then
                run.faults.append(f"{request.request_id}: {error}")
            return
        except EngineError as error:
            if not isinstance(engine, RemoteEngine):
                run.faults.append(f"{request.request_id}: {error}")
                return
            await asyncio.sleep(0.05)
    run.num_answers += 1
    if searches:
        is_right = found == await beams(plain.engine, request)
    elif leaves_after is None:
        is_right = found in await plain.answers(request)
    else:
        is_right = any(is_start_of(found, one) for one in await plain.answers(request))
    if not is_right:
        run.faults.append(f"{request.request_id} got another answer than alone: {found}")


async def _change_adapters(engine: AnyEngine, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.random() * 0.1)
        try:
            if rng.random() < 0.2:
                await engine.unload_adapter(CHANGING)
            else:
                await engine.load_adapter(CHANGING, rng.choice(ADAPTERS))
        except (RequestError, EngineError):
            pass  # it is not loaded, or its process was killed


async def _kill(engine: RemoteEngine, rng: Random, run: EngineRun) -> None:
    for _ in range(2):
        await asyncio.sleep(0.1 + rng.random() * 0.4)
        if (process_id := engine.process_id) is not None:
            os.kill(process_id, signal.SIGKILL)
            run.num_kills += 1


async def _settle(engine: AnyEngine) -> None:
    """Wait until nothing is held. Raises AssertionError if something stays."""
    held: object = None
    for _ in range(100):
        stats = engine.stats()
        scheduler = stats.scheduler
        held = stats.num_requests or scheduler.blocks.num_used or scheduler.num_waiting
        if not held:
            break
        await asyncio.sleep(0.05)
    assert not held, f"{held} are held: {engine.stats()}"
    if isinstance(engine, Engine):
        engine._scheduler.check()
        places = engine._scheduler.held.adapters
        assert places is not None
        adapters = places.residency._adapters.values()
        running = [adapter for adapter in adapters if adapter.num_running]
        assert not running, f"{running} are in use and nothing runs"


async def _run(first_seed: int, until_s: float) -> int:
    plain, number, num_answers, num_kills = Plain(), 0, 0, 0
    await plain.start()
    while time.monotonic() < until_s:
        run = await one_run(first_seed + number, plain)
        number, num_answers = number + 1, num_answers + run.num_answers
        num_kills += run.num_kills
        if run.faults:
            print(f"seed {run.seed}: {len(run.faults)} faults", *run.faults[:5], sep="\n  ")
            return 1
    await plain.engine.stop()
    print(
        f"{number} runs from seed {first_seed}: {num_answers} answers, {num_kills} kills, 0 faults"
    )
    return 0


def main() -> int:
    """Live with fresh seeds until a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    seed = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    print(f"from seed {seed}", flush=True)
    return asyncio.run(_run(seed, time.monotonic() + args.minutes * 60))


if __name__ == "__main__":
    sys.exit(main())
