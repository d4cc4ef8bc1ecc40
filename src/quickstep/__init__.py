"""Quickstep: LLM inference and serving.

`LLM`, `SamplingParams` and the like are loaded on first use: importing the package alone takes no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quickstep.engine.beam_search import BeamSearchParams
    from quickstep.engine.llm import LLM
    from quickstep.types import Grammar, Pooling, SamplingParams

__all__ = ["LLM", "BeamSearchParams", "Grammar", "Pooling", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The public classes, by PEP 562."""
    if name == "LLM":
        return import_module("quickstep.engine.llm").LLM
    if name == "BeamSearchParams":
        return import_module("quickstep.engine.beam_search").BeamSearchParams
    if name in ("Grammar", "Pooling", "SamplingParams"):
        return getattr(import_module("quickstep.types"), name)
    raise AttributeError(f"module 'quickstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
