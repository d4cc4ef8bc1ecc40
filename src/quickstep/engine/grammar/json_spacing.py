"""How JSON under a grammar is spaced: on one line, a blank behind each comma and colon.

So `json.dumps` and chat templates write it, hence models have seen it; without the blanks a small
one loses its thread. A form that is fixed cannot be filled with white space up to the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ONE_LINE"]

# llguidance's options
ONE_LINE: Mapping[str, object] = MappingProxyType(
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)
