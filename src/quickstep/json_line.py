"""JSON as one line for every reader: of event streams, of JSON lines, of logs.

JSON escapes line feeds, but not the three other characters at which readers such as Python's
`str.splitlines` end a line. All writers of lines encode here.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

_ENCODE = msgspec.json.Encoder().encode
# NEL, LINE SEPARATOR and PARAGRAPH SEPARATOR in UTF-8; in JSON they can only be in strings
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def json_line(content: object, encode: Callable[[object], bytes] = _ENCODE) -> bytes:
    """The JSON of a value without any line end, also none after it; by an encoder's `encode`."""
    encoded = encode(content)
    for end, escape in _LINE_ENDS:
        encoded = encoded.replace(end, escape)
    return encoded
