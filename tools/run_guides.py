"""Run what README and docs/guide say, as a reader does: `make docs-test`.

A page is a session in a folder of its own, with real processes. `quickstep serve` starts a server
on a free port, which takes the place of 8000 in what follows; every other statement has to end with
exit code 0, and every answer of `curl` has to be a success.
`tests/serve/command/test_guide_blocks.py` checks the same blocks faster, within one process. What
blocks print is the subject of `write_guide_outputs.py`, except for those of `docs/guide/why`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
SHELLS = ("sh", "bash")
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
SERVE = re.compile(r"^(\w+=\S+ )*quickstep serve\b")
ENGINE = "quickstep engine "  # runs until the page ends
HEREDOC = re.compile(r"<<'?(?P<end>\w+)'?")
# Why a statement is not run.
NOT_RUN: Mapping[str, str] = {
    r"\bQwen/": "downloads a checkpoint",
    r"\bbig-model\b|\bMODEL --": "has a placeholder",
    r"^docker ": "builds an image",
    r"^(kubectl|helm) ": "needs a cluster",
    r"^pip install |^make demo": "installs",
    r"--otlp-traces-endpoint": "needs the extra otel",
    r"--sweep |--rate 2,8,32 ": "write_guide_outputs.py runs it",
}
# Files of a page by its YAML blocks, in their order.
YAML_FILES: Mapping[str, Sequence[str]] = {"usage.md": ("prices.yaml", "keys.yaml")}
# These read what a server writes at its end.
AFTER_THE_SERVER = "quickstep replay "
START_S = 60.0


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [Block(match["language"], match["text"]) for match in FENCE.finditer(text)]


def statements(text: str) -> Iterator[str]:
    """The shell statements of a block; quotations, continuations and here-documents are not cut."""
    pending: list[str] = []
    for line in text.splitlines():
        pending.append(line)
        statement = "\n".join(pending)
        if is_complete(statement):
            if statement.strip():
                yield statement
            pending = []
    assert not pending, f"the block ends within a statement: {pending}"


def is_complete(statement: str) -> bool:
    """Whether the shell would run it."""
    document = HEREDOC.search(statement)
    if document is not None:
        return statement.splitlines()[-1] == document["end"]
    try:
        shlex.split(statement, comments=True)
    except ValueError:  # an open quotation
        return False
    return not statement.endswith("\\")


def reason_not_to_run(statement: str) -> str | None:
    """Why a statement is left out, if it is."""
    found = (why for pattern, why in NOT_RUN.items() if re.search(pattern, statement))
    return next(found, None)


class Session:
    """The processes of one page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 8000
        self._server: subprocess.Popen[bytes] | None = None
        self._engines: list[subprocess.Popen[bytes]] = []
        binaries = folder / ".bin"
        binaries.mkdir()
        for name, command in (
            ("quickstep", f'exec "{sys.executable}" -m quickstep "$@"'),
            ("python", f'exec "{sys.executable}" "$@"'),
        ):
            (binaries / name).write_text(f"#!/bin/sh\n{command}\n")
            (binaries / name).chmod(0o755)
        (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        self._environment = {
            **os.environ,
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "CURL_HOME": str(folder),
            "QUICKSTEP_CACHE_DIR": str(folder / ".cache"),
        }

    def run(self, block: Block) -> None:
        """Run a block. Raises CalledProcessError."""
        if block.language in SHELLS:
            for statement in statements(block.text):
                why = reason_not_to_run(statement)
                first = statement.splitlines()[0]
                print(f"  {first[:110]}{'' if why is None else f'   [not run: {why}]'}", flush=True)
                if why is None:
                    self._run_statement(statement.replace("MODEL", "demo"))
        elif block.language == "python" and reason_not_to_run(block.text) is None:
            print("  python ...", flush=True)
            self._run_statement("python - <<'END'\n" + block.text + "END")

    def _run_statement(self, statement: str) -> None:
        if SERVE.match(statement):
            self.serve(re.sub(r"\s+#.*$", "", statement))
            return
        if statement.startswith(ENGINE):
            self.listen(statement)
            return
        if statement.startswith("quickstep trace "):  # 8000 is its default
            statement = re.sub(r"\s+#.*$", "", statement) + " --url http://localhost:8000"
        if statement.startswith(AFTER_THE_SERVER):
            self.end()
        elif self._server is None and ":8000" in statement:
            self.serve("quickstep serve")
        self._check(statement)

    def _check(self, script: str) -> None:
        script = re.sub(r"(localhost|127\.0\.0\.1):8000", rf"\1:{self._port}", script)
        script = script.replace("https://localhost/", f"https://localhost:{self._port}/")
        command = ["bash", "-e", "-o", "pipefail", "-c", script]
        environment = self._environment
        if self._server is not None:
            environment = {**environment, "SERVER": str(self._server.pid)}
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            done.check_returncode()

    def serve(self, statement: str) -> None:
        """Start the server of a statement in place of the one that runs, and send it a request."""
        self.end()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = ["bash", "-c", f"exec env {statement} --port {self._port}"]
        self._server = subprocess.Popen(
            command, cwd=self._folder, env=self._environment, stderr=subprocess.PIPE
        )
        assert self._server.stderr is not None
        scheme = "https" if "--ssl-certfile" in statement else "http"
        url = f"{scheme}://localhost:{self._port}"
        deadline = time.monotonic() + START_S
        while subprocess.run(["curl", "-sk", f"{url}/ready", "-o", "/dev/null"]).returncode:
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{statement}: {self._server.stderr.read().decode()}")
            time.sleep(0.1)
        body = '{"prompt": "def f(", "max_tokens": 8}'
        headers = ["-H", "authorization: Bearer SECRET", "-H", "x-request-id: REQUEST_ID"]
        subprocess.run(
            ["curl", "-sk", f"{url}/v1/completions", "--json", body, *headers, "-o", "/dev/null"],
            check=True,
        )

    def listen(self, statement: str) -> None:
        """Start an engine, and wait until it listens."""
        command = ["bash", "-c", f"exec {statement}"]
        engine = subprocess.Popen(
            command, cwd=self._folder, env=self._environment, stderr=subprocess.PIPE
        )
        self._engines.append(engine)
        assert engine.stderr is not None
        if not any(b" listens on " in line for line in engine.stderr):
            raise RuntimeError(f"{statement}: it did not listen")

    def close(self) -> None:
        """End the server and the engines."""
        self.end()
        for engine in self._engines:
            engine.send_signal(signal.SIGTERM)
            engine.communicate(timeout=START_S)
        self._engines.clear()

    def end(self) -> None:
        """End the server, if one runs."""
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            self._server.communicate(timeout=START_S)
            self._server = None


def main(arguments: Sequence[str]) -> int:
    """Run all pages, or those whose names are given."""
    failed = []
    for page in PAGES:
        if arguments and page.name not in arguments:
            continue
        print(page.relative_to(ROOT), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = blocks(page)
            texts = [block.text for block in found if block.language == "yaml"]
            for name, text in zip(YAML_FILES.get(page.name, ()), texts, strict=False):
                (Path(folder) / name).write_text(text)
            session = Session(Path(folder))
            try:
                for block in found:
                    session.run(block)
            except (subprocess.CalledProcessError, RuntimeError) as error:
                print(f"FAILED: {error}", file=sys.stderr)
                failed.append(page.name)
            finally:
                session.close()
    print(f"failed: {', '.join(failed)}" if failed else "all blocks ran")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
