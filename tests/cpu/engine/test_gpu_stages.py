"""The stages of `benchmarks.gpu` exist, and start on a Python that has little more than torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import gpu_runs
from op_checks.cases import OPS

ROOT = Path(__file__).parents[3]
# Of an image with torch, what Quickstep and its tests use, and what that needs.
BARE = {
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors"),
    *("huggingface-hub", "hf-xet", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
    *("jinja2", "markupsafe", "pyyaml", "rich", "pygments", "markdown-it-py", "mdurl"),
    *("uvloop", "prometheus-client", "filelock", "fsspec", "sympy", "mpmath", "networkx"),
    *("typing-extensions", "packaging", "tqdm", "regex", "requests", "certifi", "idna"),
    *("urllib3", "charset-normalizer", "httpx", "httpcore", "h11", "anyio", "click"),
    *("typer", "shellingham", "annotated-doc", "setuptools", "sortedcontainers", "attrs"),
    *("pluggy", "iniconfig", "execnet", "psutil"),
}
BRING = ("msgspec", "llguidance")
# Modules of other packages are not found, as if these were not installed.
BLOCKER = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in BLOCKED:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def bare_environment(folder: Path, brought: tuple[str, ...]) -> dict[str, str]:
    """Variables for a Python without most of what is installed here."""
    allowed = {*BARE, *brought}
    blocked = [
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if not allowed.intersection(name.lower().replace("_", "-") for name in names)
    ]
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"BLOCKED = {blocked!r}\n{BLOCKER}")
    paths = (str(folder), str(ROOT / "src"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OUT": str(folder / "out")}


def start(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "correct", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_a_bare_python_is_refused_with_the_packages_to_install(tmp_path: Path) -> None:
    ran = start(bare_environment(tmp_path / "bare", ()))
    assert ran.returncode == 1
    assert "missing packages: msgspec, llguidance\n" in ran.stderr


def test_a_bare_python_with_two_wheels_runs_stages(tmp_path: Path) -> None:
    environment = bare_environment(tmp_path / "bare", BRING)
    assert "exactness" in start(environment, "--list").stdout
    ran = start(environment, "--only", "exactness")
    reports = list((tmp_path / "bare" / "out").glob("*.md"))
    assert ran.returncode == 0, reports[0].read_text()
    assert "missing" not in ran.stderr
    assert "| exactness | mismatches | 0 | <= 0 | hit |" in reports[0].read_text()


def test_every_op_has_a_stage() -> None:
    assert set(gpu_runs.OPS) == set(OPS)


def test_the_tests_of_ops_that_stages_name_exist() -> None:
    named = {
        one for stage in gpu_runs.stages("correct", "cuda") for one in stage.argv if "::" in one
    }
    (file,) = {one.partition("::")[0] for one in named}
    flags = ("-o", "addopts=", "--collect-only", "-q", "-p", "no:cacheprovider")
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, file], capture_output=True, text=True, cwd=ROOT
    )
    triton = {one for one in listed.stdout.splitlines() if "-triton]" in one}
    assert named == triton


def test_steps_of_one_batch_are_measured_without_a_profile() -> None:
    sizes = ("--batches", "1", "--prompts", "32")
    flags = ("--device", "cpu", "--kernels", "native", "--shape", "tiny2", *sizes)
    command = [sys.executable, "-m", "benchmarks.gpu_measures", "steps", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row.get("batch") or row["prompt"] for row in rows] == [1, 32]
