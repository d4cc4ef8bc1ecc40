"""Quickstep: LLM inference and serving.

`LLM`, `SamplingParams` and the other public classes are imported on first use, so that importing
the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quickstep.version import __version__

if TYPE_CHECKING:
    from quickstep.engine.adapters import LoRARequest
    from quickstep.engine.beam_search import BeamSearchParams
    from quickstep.engine.llm import LLM
    from quickstep.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
    from quickstep.types import Grammar, Pooling, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "Grammar",
    "LoRARequest",
    "Pooling",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public class on first use (PEP 562)."""
    if name == "LLM":
        return import_module("quickstep.engine.llm").LLM
    if name == "LoRARequest":
        return import_module("quickstep.engine.adapters").LoRARequest
    if name == "BeamSearchParams":
        return import_module("quickstep.engine.beam_search").BeamSearchParams
    if name in ("RepetitionDetectionParams", "StructuredOutputsParams"):
        return getattr(import_module("quickstep.sampling_params"), name)
    if name in ("Grammar", "Pooling", "SamplingParams"):
        return getattr(import_module("quickstep.types"), name)
    raise AttributeError(f"module 'quickstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
