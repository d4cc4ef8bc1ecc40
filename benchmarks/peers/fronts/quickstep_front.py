"""Quickstep's engine behind the front: next to `quickstep serve` it shows what the front costs."""

from __future__ import annotations

from collections.abc import AsyncIterator

from http_front import front_arguments, serve

from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.assembly import open_engine
from quickstep.sampling_params import SamplingParams


class _InProcess:
    """The live engine on the front's event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    async def start(self) -> None:
        self._engine = open_engine(self._config)
        await self._engine.start()

    async def stream(self, prompt: list[int], num_outputs: int) -> AsyncIterator[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
        async with self._engine.generate(prompt, sampling) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    yield list(delta.token_ids)


if __name__ == "__main__":
    parser = front_arguments()
    parser.add_argument("--quantization")
    parser.add_argument("--max-model-len", type=int, required=True)
    args = parser.parse_args()
    load = LoadConfig(
        model=args.model,
        dtype="bfloat16",
        num_threads=args.threads,
        quantization=args.quantization,
    )
    engine = _InProcess(EngineConfig(load=load, max_model_len=args.max_model_len))
    serve(engine, args.host, args.port)
