"""`python -m benchmarks.kv_tiers`: stored KV blocks on a real shape with random weights.

    restart    the first token of one prompt: cold, and by a new engine that restores it
    sessions   conversations in turn whose KV is three times the pool, with and without a directory
    unused     a batch of new short prompts, for which restores never pay, with and without
    flips      random bits of the files are flipped, and each prompt is compared with its first
               answer: `--flips 10000` takes a while on the shape `demo`, and is meant for it

Printed are medians and extremes of the repeats, `cached_tokens`, and whether the outputs have the
same bits. The exit code is 1 if bits differ.

    --shape qwen2.5-0.5b --prompts 8192 16384 --sessions 50 --threads 2 --repeats 3 --directory DIR
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TypeVar

import msgspec

from benchmarks.machine import describe_machine
from quickstep.bench.measured_engine import open_shape, random_prompt
from quickstep.bench.shapes import SHAPES
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.types import Request, SamplingParams

_BLOCK_SIZE = 16
_TURN_TOKENS = 1024  # of a session, at its beginning
_ANSWER_TOKENS = 16
_SHORT_TOKENS = 24
_SAVE_S = 0.03  # in which a prompt's blocks are stored
_POOLS = 3  # the sessions' KV, in pools
_T = TypeVar("_T")


class Answer(msgspec.Struct, frozen=True):
    """What a request gave; `content` are its tokens and their log-probabilities."""

    first_s: float
    end_s: float
    num_cached: int
    num_restored: int
    content: tuple[object, ...]


def opened(args: argparse.Namespace, num_tokens: int, directory: Path | None) -> Engine:
    """An engine with a pool for so many tokens."""
    config = EngineConfig(
        load=LoadConfig("demo", device="cpu", num_threads=args.threads),
        cache=CacheConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=-(-num_tokens // _BLOCK_SIZE) + 8,
            kv_cache_dir=None if directory is None else str(directory),
            kv_cache_disk_bytes=None if directory is None else args.disk_bytes,
        ),
        scheduler=SchedulerConfig(max_num_seqs=16),
        max_model_len=None if args.shape == "demo" else max(*args.prompts, 2048) + 256,
        seed=0,
    )
    if args.shape == "demo":
        return open_engine(config)
    return open_shape(config, args.shape, SHAPES[args.shape], seed=0).engine


async def answered(engine: Engine, prompt: Sequence[int]) -> Answer:
    """Generate greedily after a prompt."""
    sampling = SamplingParams(
        max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1
    )
    started_s, first_s = time.perf_counter(), None
    content: list[object] = []
    timings = None
    async for delta in engine.stream(Request("", tuple(prompt), sampling)):
        if delta.token_ids and first_s is None:
            first_s = time.perf_counter() - started_s
        content += zip(delta.token_ids, delta.logprobs, strict=True)
        timings = delta.timings or timings
    assert timings is not None and first_s is not None, "the request has ended"
    end_s = time.perf_counter() - started_s
    return Answer(
        first_s, end_s, timings.num_cached_tokens, timings.num_restored_tokens, tuple(content)
    )


def run(engine: Engine, work: Callable[[Engine], Awaitable[_T]]) -> _T:
    """Start an engine, work with it, and stop it."""

    async def started() -> _T:
        await engine.start()
        try:
            # the cost model learns what computing takes
            for seed in range(4):
                await answered(engine, random_prompt(Random(1000 + seed), 250, 200))
            return await work(engine)
        finally:
            await engine.stop()

    return asyncio.run(started())


def restart(args: argparse.Namespace, directory: Path) -> bool:
    """One prompt, cold and after a restart; returns whether the bits are the same."""
    is_same = True
    for num_tokens in args.prompts:
        cold: list[Answer] = []
        restored: list[Answer] = []
        for repeat in range(args.repeats):
            prompt = random_prompt(Random(repeat), 250, num_tokens)
            for answers in (cold, restored):
                engine = opened(args, num_tokens + 512, directory)
                answers.append(run(engine, lambda engine, prompt=prompt: answered(engine, prompt)))
            shutil.rmtree(directory, ignore_errors=True)
        pairs = zip(cold, restored, strict=True)
        is_same &= all(one.content == other.content for one, other in pairs)
        cold_s = [answer.first_s for answer in cold]
        restored_s = [answer.first_s for answer in restored]
        print(
            f"{num_tokens} tokens: first token cold {_spread(cold_s, 2)} s, restored "
            f"{_spread(restored_s, 3)} s ({median(cold_s) / median(restored_s):.1f} x), "
            f"{restored[0].num_cached} cached, "
            f"{restored[0].num_restored} restored, bits {'equal' if is_same else 'DIFFER'}"
        )
    return is_same


def sessions(args: argparse.Namespace, directory: Path) -> bool:
    """Conversations in turn, each continued once in each round."""
    num_tokens = args.sessions * (_TURN_TOKENS + args.rounds * 2 * _ANSWER_TOKENS)

    async def work(engine: Engine) -> tuple[float, list[Answer]]:
        prompts = [random_prompt(Random(seed), 250, _TURN_TOKENS) for seed in range(args.sessions)]
        answers = []
        started_s = time.perf_counter()
        for round_number in range(args.rounds):
            for number, prompt in enumerate(prompts):
                answer = await answered(engine, prompt)
                answers.append(answer)
                seed = args.sessions * round_number + number
                prompt += [token for token, _ in answer.content]  # type: ignore[misc]
                prompt += random_prompt(Random(-1 - seed), 250, _ANSWER_TOKENS)
        return time.perf_counter() - started_s, answers

    found: dict[str, list[tuple[float, list[Answer]]]] = {"without": [], "with": []}
    for _ in range(args.repeats):
        for name, place in (("without", None), ("with", directory)):
            engine = opened(args, max(num_tokens // _POOLS, 2 * _TURN_TOKENS), place)
            found[name].append(run(engine, work))
        shutil.rmtree(directory, ignore_errors=True)
    return _compared(f"{args.sessions} sessions, {args.rounds} rounds", found)


def unused(args: argparse.Namespace, directory: Path) -> bool:
    """Short new prompts, 16 at a time."""

    async def work(engine: Engine) -> tuple[float, list[Answer]]:
        rng = Random(5)
        prompts = [random_prompt(rng, 250, _SHORT_TOKENS) for _ in range(args.short_prompts)]
        answers, started_s = [], time.perf_counter()
        for start in range(0, len(prompts), 16):
            batch = [answered(engine, prompt) for prompt in prompts[start : start + 16]]
            answers += await asyncio.gather(*batch)
        return time.perf_counter() - started_s, answers

    found: dict[str, list[tuple[float, list[Answer]]]] = {"without": [], "with": []}
    for _ in range(args.repeats):
        for name, place in (("without", None), ("with", directory)):
            found[name].append(run(opened(args, 16 * 256, place), work))
        shutil.rmtree(directory, ignore_errors=True)
    return _compared(f"{args.short_prompts} short prompts", found)


def _compared(title: str, found: dict[str, list[tuple[float, list[Answer]]]]) -> bool:
    """Print seconds with and without a directory; returns whether the bits are the same."""
    spent_s = {name: [each_s for each_s, _ in runs] for name, runs in found.items()}
    ratios = [
        without_s / with_s
        for without_s, with_s in zip(spent_s["without"], spent_s["with"], strict=True)
    ]
    contents = [
        [answer.content for answer in answers] for runs in found.values() for _, answers in runs
    ]
    is_same = all(content == contents[0] for content in contents)
    num_restored = sum(answer.num_restored for answer in found["with"][0][1])
    print(
        f"{title}: without {_spread(spent_s['without'], 2)} s, with a directory "
        f"{_spread(spent_s['with'], 2)} s, ratios of the pairs {_spread(ratios, 3)}, "
        f"{num_restored} tokens restored, bits {'equal' if is_same else 'DIFFER'}"
    )
    return is_same


def _spread(values: Sequence[float], digits: int) -> str:
    """The median with the least and the largest."""
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def flips(args: argparse.Namespace, directory: Path) -> bool:
    """Flip a bit of a file, evict, ask again."""
    rng = Random(11)
    prompts = [random_prompt(Random(number), 250, 800) for number in range(4)]

    async def work(engine: Engine) -> tuple[int, int]:
        expected = [(await answered(engine, prompt)).content for prompt in prompts]
        num_wrong = num_restored = 0
        for number in range(args.flips):
            files = sorted(directory.glob("*/*.kv"))
            if files:
                path = rng.choice(files)
                content = bytearray(path.read_bytes())
                place = rng.randrange(8 * len(content))
                content[place // 8] ^= 1 << place % 8
                path.write_bytes(content)
            await asyncio.sleep(_SAVE_S)  # what was answered last is stored
            await engine.reset_prefix_cache()
            which = rng.randrange(len(prompts))
            answer = await answered(engine, prompts[which])
            num_wrong += answer.content != expected[which]
            num_restored += bool(answer.num_restored)
            if number % 1000 == 999:
                print(f"{number + 1} flips: {num_wrong} wrong, {num_restored} restored", flush=True)
        return num_wrong, num_restored

    num_wrong, num_restored = run(opened(args, 8192, directory), work)
    print(f"{args.flips} flips: {num_wrong} wrong answers, {num_restored} requests restored")
    return not num_wrong


def main() -> int:
    """Measure the named parts, all but `flips` by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_tiers")
    parser.add_argument("parts", nargs="*", default=["restart", "sessions", "unused"])
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=[*SHAPES, "demo"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short-prompts", type=int, default=160)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--disk-bytes", type=int, default=20_000_000_000)
    parser.add_argument(
        "--directory", type=Path, help="on the disk to measure; by default a temporary one"
    )
    args = parser.parse_args()
    print(describe_machine())
    works = {"restart": restart, "sessions": sessions, "unused": unused, "flips": flips}
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        results = [works[part](args, Path(name) / part) for part in args.parts]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
