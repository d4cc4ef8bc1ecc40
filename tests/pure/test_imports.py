"""What importing must not cost: no torch below the runtime, no seconds at `import quickstep`."""

import json
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
