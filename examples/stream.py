"""Stream two requests at once from the asynchronous engine, and abort one of them.

Run: python examples/stream.py
"""

import argparse
import asyncio

from quickstep import SamplingParams
from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine


async def follow(engine: Engine, name: str, prompt: str, max_tokens: int, limit: int) -> None:
    """Print each delta; abort the request after `limit` deltas."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    num_deltas = 0
    async with engine.generate(prompt, params) as stream:
        async for delta in stream:
            print(f"[{name}] {delta.text!r}")
            num_deltas += 1
            if num_deltas == limit:
                engine.abort(stream.request_id)


async def main(model: str) -> None:
    engine = open_engine(EngineConfig(load=LoadConfig(model=model)))
    await engine.start()
    try:
        await asyncio.gather(
            follow(engine, "a", "import json\n", 16, limit=100),
            follow(engine, "b", "def main():\n", 1000, limit=8),
        )
    finally:
        await engine.stop()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--model", default="demo", help="a Hugging Face id or a directory (default: demo)"
)
asyncio.run(main(parser.parse_args().model))
