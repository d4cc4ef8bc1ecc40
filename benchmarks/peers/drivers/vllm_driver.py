"""vLLM's asynchronous engine, in its own environment."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time

from protocol import Run, Work, serve_driver


def main() -> None:
    """Drive one checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    loop = asyncio.new_event_loop()
    numbers = itertools.count()

    def opened():
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        async def make():
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=args.model,
                    dtype="bfloat16",
                    max_model_len=4096,
                    max_num_seqs=64,
                    enable_prefix_caching=True,
                )
            )

        engine = loop.run_until_complete(make())

        async def follow(work: Work, marks: list[float]) -> None:
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=work.num_outputs,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": work.prompt}
            async for output in engine.generate(prompt, sampling, f"r{next(numbers)}"):
                marks.extend([time.perf_counter()] * len(output.outputs[0].token_ids))

        async def all_of(works: list[Work], run: Run) -> None:
            await asyncio.gather(
                *(follow(work, mark) for work, mark in zip(works, run.marks, strict=True))
            )

        def run(works: list[Work]) -> Run:
            done = Run(time.perf_counter(), [[] for _ in works])
            loop.run_until_complete(all_of(works, done))
            return done

        return run

    serve_driver(opened)


if __name__ == "__main__":
    main()
