"""SmolLM2-135M-Instruct, a real public model, in Quickstep and in transformers: `make real`.

transformers dequantizes the same GGUF file to float32, so it is exact; what was measured is printed
as a table at the end.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from quickstep import LLM
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint

_TEXT_BYTES = 50_000
_MEASURED = pytest.StashKey[list[tuple[str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MEASURED] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_MEASURED]
    width = max((len(name) for name, _ in rows), default=0)
    if rows:
        terminalreporter.section("measured on smollm2")
    for name, value in rows:
        terminalreporter.write_line(f"{name:<{width}}  {value}")


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Rows of the table at the end: what, value."""
    return request.config.stash[_MEASURED]


@pytest.fixture(scope="session")
def file() -> Path:
    return find_checkpoint(LoadConfig(model="smollm2")).path


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=4096) as engine:
        yield engine


@pytest.fixture(scope="session")
def exact(file: Path) -> Any:
    """transformers' model of the same file, dequantized to float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="session")
def documentation() -> str:
    """50 kB of docstrings of the standard library's public functions and classes, by name."""
    texts: list[str] = []
    for module in sorted(info.name for info in pkgutil.iter_modules([_library()])):
        if module.startswith("_") or module in ("antigravity", "this", "idlelib", "turtledemo"):
            continue
        try:
            members = inspect.getmembers(import_module(module), inspect.isfunction)
        except ImportError:  # for another system
            continue
        for name, member in members:
            text = inspect.getdoc(member)
            if not name.startswith("_") and member.__module__ == module and text:
                texts.append(f"{module}.{name}: {text}\n\n")
    return "".join(texts)[:_TEXT_BYTES]


def _library() -> str:
    import sysconfig

    return sysconfig.get_path("stdlib", vars={"base": sys.base_prefix})
