"""What importing must not cost: no torch below the runtime, no seconds at `import quickstep`."""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json, sys, time
started = time.perf_counter()
import {module}
seconds = time.perf_counter() - started
heavy = [n for n in ("torch", "numpy", "transformers", "tokenizers", "jinja2") if n in sys.modules]
foreign = sorted({{
    n.partition(".")[0] for n in sys.modules
    if n.partition(".")[0] not in sys.stdlib_module_names and not n.startswith(("_", "quickstep"))
}})
print(json.dumps({{"seconds": seconds, "heavy": heavy, "foreign": foreign}}))
"""


def import_alone(module: str) -> dict[str, object]:
    """Import `module` in a fresh interpreter without site packages' start-up hooks."""
    code = PROBE.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "module",
    ["quickstep", "quickstep.types", "quickstep.core.scheduler", "quickstep.sim.simulate"],
)
def test_importing_the_core_loads_no_torch(module: str) -> None:
    assert import_alone(module)["heavy"] == []


def test_importing_quickstep_takes_less_than_a_fifth_of_a_second() -> None:
    # A promise of the package; the best of a few tries, since a busy machine delays any one.
    assert min(import_alone("quickstep")["seconds"] for _ in range(5)) < 0.2


def test_the_command_line_parses_without_torch() -> None:
    assert import_alone("quickstep.cli.main")["heavy"] == []


# What `quickstep serve` imports up to its event loop, and its worker up to its weights, each in
# the order of the command.
SERVER = """
from quickstep.cli import serve
from quickstep.engine.remote import launch, opening
import quickstep.engine.remote.engine, quickstep.server.run
"""
WORKER = """
from quickstep.engine.remote import worker
worker.defer_parts_of_torch()
from quickstep.engine.assembly import import_loading
import_loading()
"""
MET_LATER = """
import json, sys
print(json.dumps([name for name in {names!r} if name in sys.modules]))
"""


def imported_by(code: str, *names: str) -> list[str]:
    """Which of `names` are imported when `code` has run in a fresh interpreter."""
    code += MET_LATER.format(names=names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_server_listens_without_torch_or_numpy() -> None:
    # uvicorn, prometheus_client and tokenizers import more than the server needs (click, ready-made
    # tokenizers); deferring that saved no time: docs/design/0008.
    names = ["torch", "numpy", "rich", "sqlite3", "importlib.resources"]
    assert imported_by(SERVER, *names, "quickstep.text.gguf_tokenizer") == []


def test_the_worker_reads_weights_without_what_the_engine_around_them_imports() -> None:
    names = ["torch", "jinja2", "tokenizers", "asyncio", "uvloop", "ssl", "rich", "starlette"]
    names += ["importlib.metadata", "email"]  # 27 ms
    assert imported_by(WORKER, *names, "quickstep.engine.engine") == []


RARELY_NEEDED = (
    "torch",
    "jinja2",
    "difflib",
    "quickstep.text.chat_template",
    "quickstep.text.grammar.json_schema",
    "quickstep.text.tool_calls",
)


def test_the_engine_around_the_weights_needs_no_chat_template() -> None:
    code = """
from quickstep.engine.assembly import import_engine, import_loading
import_loading()
import_engine()
import quickstep.engine.remote.service
"""
    assert imported_by(code, *RARELY_NEEDED) == []


def test_the_library_reads_weights_before_it_imports_the_engine() -> None:
    """`import_engine` runs in a thread meanwhile, and templates are for conversations."""
    names = ["numpy", "asyncio", "tokenizers", "quickstep.engine.engine", *RARELY_NEEDED]
    assert imported_by("from quickstep import LLM, SamplingParams", *names) == []


def test_the_first_token_of_the_library_needs_no_chat_template() -> None:
    code = """
from quickstep import LLM, SamplingParams
with LLM("demo", max_model_len=64) as llm:
    llm.generate("def", SamplingParams(max_tokens=1), use_tqdm=False)
"""
    assert imported_by(code, *RARELY_NEEDED) == []


IMPORT_OF_NUMPY = """
import json, os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            found.append(os.environ.get("OPENBLAS_THREAD_TIMEOUT"))
found = []
sys.meta_path.insert(0, Finder())
from quickstep.engine.assembly import import_loading
import_loading()
found.append(os.environ.get("OPENBLAS_THREAD_TIMEOUT"))
print(json.dumps(found))
"""


@pytest.mark.parametrize("own", [None, "20"])
def test_threads_of_openblas_do_not_spin_while_weights_are_read(own: str | None) -> None:
    """Unless the environment says how long; it is as before when NumPy is imported."""
    environment = {**os.environ, **({} if own is None else {"OPENBLAS_THREAD_TIMEOUT": own})}
    command = [sys.executable, "-c", IMPORT_OF_NUMPY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [own or "4", own]
