"""The formats of tool calls that are tested: the known ones, and those that templates write."""

from __future__ import annotations

from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS, formats_of

TEMPLATES = {"mistral, named": "[TOOL_CALLS][ARGS]", "deepseek, fenced": "tool▁call▁begin```json"}
FORMATS = dict(TOOL_CALL_FORMATS)
FORMATS |= {name: formats_of(text).tool_calls for name, text in TEMPLATES.items()}
