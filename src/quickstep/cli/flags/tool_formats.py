"""The flags that say how a model writes calls and reasoning, where its template does not."""

from __future__ import annotations

import argparse

__all__ = ["add_format_flags"]


def add_format_flags(group: argparse._ActionsContainer) -> None:
    """`--tool-call-parser` and `--reasoning-parser`; the names are vLLM's."""
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of tool calls: hermes, llama3_json, pythonic, mistral, deepseek_v3, granite, "
        "harmony, or none (default: what the chat template tells)",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of reasoning: think, mistral, harmony, or none (default: what the chat "
        "template tells)",
    )
