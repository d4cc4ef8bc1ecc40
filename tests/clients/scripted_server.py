"""A server with a scripted engine, for what the demo model does not do: it reasons, calls two tools
at once, edits a file, fails, is busy, or never answers. The last message of the user names the
script.

    python tests/clients/scripted_server.py [--api-key KEY]

prints its URL. It runs with the server's packages, not with the clients'.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fake_engine import FakeEngine, FakeStream, FakeTemplate, Script
from live_server import live_server
from route_calls import saying

from quickstep.errors import EngineError
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import FinishReason, Request

MAX_MODEL_LEN = 2**20  # bytes: an agent's prompt has 80,000
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


EDIT = re.compile(
    r"^(?:user: )?replace (?P<old>\S+) by (?P<new>\S+) in (?P<file>\S+)$", re.MULTILINE
)


def edit(prompt: str) -> Script | None:
    """The next step of an agent whose user wants a text replaced in a file, with the tools of
    Claude Code or of Codex; None for other prompts.
    """
    wanted = EDIT.search(prompt)
    if wanted is None or "\ntool={" not in prompt:
        return None
    old, new, file = wanted.groups()
    if '"name": "exec_command"' in prompt:
        calls = [("exec_command", {"cmd": f"sed -i s/{old}/{new}/ {file}"})]
    else:
        change = {"file_path": file, "old_string": old, "new_string": new}
        calls = [("Read", {"file_path": file}), ("Edit", change)]
    num_done = len(re.findall(r"^tool: ", prompt, re.MULTILINE))
    if num_done == len(calls):
        return saying("It is done.")
    name, arguments = calls[num_done]
    call = json.dumps({"name": name, "arguments": arguments})
    return saying(f"<tool_call>\n{call}\n</tool_call>")


class ScriptedEngine(FakeEngine):
    """Answers with the script that the user's last message names, or else with the default one.

    "busy N" is refused N times before it is answered, "replace A by B in FILE" is for agents.
    """

    num_refused = 0

    def stream(self, request: Request) -> FakeStream:
        prompt = bytes(request.prompt_token_ids).decode(errors="replace")
        lines = prompt.splitlines()
        questions = [line for line in lines if line.startswith("user: ")]
        name = questions[-1].removeprefix("user: ") if questions else ""
        num_refusals = int(name.split()[1]) if name.startswith("busy ") else 0
        if self.num_refused < num_refusals:
            self.num_refused += 1
            raise EngineError("the engine is starting")
        self.num_refused = 0
        self.script = edit(prompt) or SCRIPTS.get(name, Script())
        return super().stream(request)


def main(argv: list[str]) -> None:
    keys = ApiKeys(argv[1:]) if argv[:1] == ["--api-key"] else ApiKeys()
    engine = ScriptedEngine(
        chat_template=FakeTemplate(formats_of(TEMPLATE)), max_model_len=MAX_MODEL_LEN
    )
    logging.basicConfig(level=logging.INFO)
    options = ServerOptions(drain_s=0.0, api_keys=keys, access_log=True)
    with live_server(engine, options) as server:
        print(f"serving scripts at {server.url}/v1", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
