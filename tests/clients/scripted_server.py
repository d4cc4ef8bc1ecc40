"""A server with a scripted engine, for what the demo model does not do: it reasons, calls two tools
at once, fails, is busy, or never answers. The last message of the user names the script.

    python tests/clients/scripted_server.py [--api-key KEY]

prints its URL. It runs with the server's packages, not with the clients'.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from fake_engine import FakeEngine, FakeStream, FakeTemplate, Script
from live_server import live_server
from surface_calls import saying

from quickstep.engine.tool_calls.formats import formats_of
from quickstep.errors import EngineError
from quickstep.server.api_keys import ApiKeys
from quickstep.server.options import ServerOptions
from quickstep.types import FinishReason, Request

TEMPLATE = "{% for tool in tools %}<tool_call>{% endfor %}{{ message.tool_calls }}</think>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
SCRIPTS = {
    "reason": saying("<think>Two and two.</think>Four."),
    "reason and call": saying(f"<think>Weather.</think>Let me see.\n{CALL % 'Bern'}"),
    "call twice": saying(f"{CALL % 'Bern'}\n{CALL % 'Basel'}"),
    "cut call": saying((CALL % "Bern")[:45], reason=FinishReason.MAX_TOKENS),
    "broken call": saying(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city"}}\n</tool_call>'
    ),
    "fail": Script(FinishReason.ERROR, error="the logits are NaN"),
    "never": Script(gate=asyncio.Event()),
    "no engine": Script(raises=EngineError("the engine has stopped")),
}


class ScriptedEngine(FakeEngine):
    """Answers with the script that the user's last message names, or else with the default one.

    "busy N" is refused N times before it is answered.
    """

    num_refused = 0

    def stream(self, request: Request) -> FakeStream:
        lines = bytes(request.prompt_token_ids).decode(errors="replace").splitlines()
        questions = [line for line in lines if line.startswith("user: ")]
        name = questions[-1].removeprefix("user: ") if questions else ""
        num_refusals = int(name.split()[1]) if name.startswith("busy ") else 0
        if self.num_refused < num_refusals:
            self.num_refused += 1
            raise EngineError("the engine is starting")
        self.num_refused = 0
        self.script = SCRIPTS.get(name, Script())
        return super().stream(request)


def main(argv: list[str]) -> None:
    keys = ApiKeys(argv[1:]) if argv[:1] == ["--api-key"] else ApiKeys()
    engine = ScriptedEngine(chat_template=FakeTemplate(formats_of(TEMPLATE)))
    with live_server(engine, ServerOptions(drain_s=0.0, api_keys=keys)) as server:
        print(f"serving scripts at {server.url}/v1", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
