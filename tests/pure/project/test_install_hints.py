"""What a user reads where a part of Quickstep is not installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quickstep.cli.main import main
from quickstep.errors import ConfigError
from quickstep.ops.native import backend
from quickstep.ops.native.suffix import SuffixDrafts
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.tensors import CPU, Device

ROOT = Path(__file__).parents[3]
READ_BY_USERS = [
    *[ROOT / name for name in ("README.md", "Dockerfile", "Makefile", "CONTRIBUTING.md")],
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "src").rglob("*.py"),
]
# `pip install quickstep`, `quickstep[torch]`: what pip would take from PyPI.
NAME_ON_PYPI = re.compile(r"pip install [^\n`]*\bquickstep\b(?!-)|\bquickstep\[[a-z]")


@pytest.fixture
def library_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(backend, "library_path", lambda: tmp_path / "libquickstep.so")


def test_no_text_installs_the_other_project_of_our_name_from_pypi() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in READ_BY_USERS
        for match in NAME_ON_PYPI.finditer(file.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.usefixtures("library_is_missing")
@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_without_the_library_the_cause_comes_first(kernels: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_ops(CPU, kernels)
    message = str(raised.value)
    assert "the native kernels are not built" in message and "install g++" in message
    assert message.find("install g++") < (message + "pip install '.[torch]'").find("pip install")


@pytest.mark.usefixtures("library_is_missing")
def test_without_the_library_suffix_decoding_says_why() -> None:
    with pytest.raises(ConfigError, match="the native kernels are not built"):
        SuffixDrafts(max_match=8, max_spec_factor=1.0, min_prob=0.1, max_indexed=100)


@pytest.mark.usefixtures("library_is_missing")
@pytest.mark.parametrize("command", [("generate", "x"), ("verify", "--requests", "2"), ("demo",)])
def test_commands_without_the_library_end_with_one_sentence(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("quickstep: the native kernels are not built")
    assert errors.count("\n") == 1


def test_a_library_that_does_not_load_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libquickstep.so"
    broken.write_bytes(b"no library")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(backend, "library_path", lambda: broken)
    with pytest.raises(ConfigError, match=r"the native kernels cannot be loaded: .*libquickstep"):
        resolve_ops(CPU)


def test_native_kernels_on_a_gpu_are_refused_without_advice_about_compilers() -> None:
    with pytest.raises(ConfigError, match="they run on CPUs, not on cuda"):
        resolve_ops(Device("cuda", 0), "native")


def test_a_build_without_a_compiler_fails_with_one_sentence_unless_requested(
    tmp_path: Path,
) -> None:
    cmake = shutil.which(
        "cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert cmake is not None, "the extra `dev` installs it"

    def configure(name: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [cmake, "-S", str(ROOT), "-B", str(tmp_path / name), *options],
            env={**os.environ, "CXX": str(tmp_path / "no-compiler")},
            capture_output=True,
            text=True,
        )

    failed = configure("all")
    assert failed.returncode != 0
    sentence = " ".join(failed.stderr.split())
    assert "need a C++ compiler and none was found: install g++" in sentence
    assert "pip install -C cmake.define.QUICKSTEP_NATIVE=OFF '.[torch]'" in sentence
    assert configure("none", "-DQUICKSTEP_NATIVE=OFF").returncode == 0
