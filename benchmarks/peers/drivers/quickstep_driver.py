"""Quickstep through its live engine, in-process."""

from __future__ import annotations

import argparse
import asyncio
import time

from protocol import Run, Work, serve_driver

from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.sampling_params import SamplingParams


async def _follow(engine: Engine, work: Work, marks: list[float]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=work.num_outputs, ignore_eos=True)
    async with engine.submit(work.prompt, sampling) as stream:
        async for delta in stream:
            marks.extend([time.perf_counter()] * len(delta.token_ids))


def main() -> None:
    """Drive one checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", required=True)
    args = parser.parse_args()
    loop = asyncio.new_event_loop()

    def opened():
        quantization = None if args.precision == "bf16" else args.precision
        load = LoadConfig(
            model=args.model,
            dtype="bfloat16",
            num_threads=args.threads,
            quantization=quantization,
        )
        engine = open_engine(EngineConfig(load=load, max_model_len=4096))
        loop.run_until_complete(engine.start())

        async def all_of(works: list[Work], run: Run) -> None:
            await asyncio.gather(
                *(_follow(engine, work, mark) for work, mark in zip(works, run.marks, strict=True))
            )

        def run(works: list[Work]) -> Run:
            done = Run(time.perf_counter(), [[] for _ in works])
            loop.run_until_complete(all_of(works, done))
            return done

        return run

    serve_driver(opened)


if __name__ == "__main__":
    main()
