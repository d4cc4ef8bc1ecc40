"""The server of scripts that `make clients` starts for other people's clients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

SERVER = Path(__file__).parents[2] / "clients" / "scripted_server.py"


def test_the_last_message_of_the_user_names_the_script() -> None:
    command = [sys.executable, str(SERVER)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        messages = [{"role": "user", "content": "reason"}]
        answer = httpx.post(f"{url}/chat/completions", json={"messages": messages}, timeout=60.0)
        process.communicate("")
    message = answer.json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Four.", "Two and two.")
    assert process.returncode == 0
