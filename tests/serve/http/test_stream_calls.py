"""How many Python functions the server calls for each token of a stream, without the sockets.

Counted, not timed: from the engine's delta to the frame that is sent, with metrics. The engine is a
double, whose functions are not counted. `make counts` counts both processes.
"""

from __future__ import annotations

import asyncio

from client import CHAT, COMPLETIONS, MESSAGES, client_of
from count_calls import Calls
from fake_engine import FakeEngine, Script

from quickstep.server.app import create_app

FEW, MANY = 8, 72
# reading, counting, parsing, encoding and sending take one function each, and generators two
MOST_CALLS = {CHAT: 10.0, COMPLETIONS: 12.0}
BODIES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "hi"}}


def calls_of_stream(path: str, num_tokens: int) -> int:
    engine = FakeEngine(script=Script(words=("word ",) * num_tokens))

    async def run() -> int:
        calls = Calls()
        body = {"model": "fake", "stream": True, "max_tokens": num_tokens, **BODIES[path]}
        async with client_of(create_app(engine)) as client:
            await client.post(path, json=body)  # what only the first request does
            with calls.counted():
                response = await client.post(path, json=body)
        assert response.text.count("word ") == num_tokens
        return calls.num

    return asyncio.run(run())


def test_a_streamed_token_calls_no_more_functions_of_the_server_than_recorded() -> None:
    for path, bound in MOST_CALLS.items():
        per_token = (calls_of_stream(path, MANY) - calls_of_stream(path, FEW)) / (MANY - FEW)
        print(f"{path}: {per_token:.2f} calls per token")
        assert per_token <= bound
