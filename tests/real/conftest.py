"""Real public models in Quickstep, in transformers and in llama.cpp: `make real`.

transformers dequantizes the same GGUF file to float32, so it is exact; what was measured is printed
as a table at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.real import models
from quickstep import LLM
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint

_MEASURED = pytest.StashKey[list[tuple[str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MEASURED] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_MEASURED]
    width = max((len(name) for name, _ in rows), default=0)
    if rows:
        terminalreporter.section("measured on real models")
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
    """50 kB of docstrings of the standard library's public functions."""
    return models.documentation()


@pytest.fixture(scope="session")
def gemma3_file() -> Path:
    """Gemma 3 270M, put together from its packages once."""
    found = models.gemma3(Path("build") / "real")
    if found is None:
        pytest.skip("Gemma's packages are not installed; `make real` installs them")
    return found
