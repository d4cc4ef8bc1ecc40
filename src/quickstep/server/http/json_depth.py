"""How deep a JSON text is nested, before anything is built of it.

Only whole-text passes of the interpreter's own C code, so that 4 MiB of anything take
milliseconds each and other threads get their turns between them:

    [{"a\\"]": 1}, []]   escapes out    [{"a]": 1}, []]    only brackets and quotes   [{"]"}[]]
    strings out          [{}[]]         one kind           [[][]]
    each `[]` removed    [], then nothing: two levels

Malformed text gets some verdict, deep or not: the decoder refuses it afterwards.
"""

from __future__ import annotations

from quickstep.errors import RequestError

__all__ = ["check_json_depth"]

_QUOTES_AND_BRACKETS = b'"[]{}'
_OTHERS = bytes(sorted(set(range(256)) - set(_QUOTES_AND_BRACKETS)))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def check_json_depth(body: bytes, limit: int) -> None:
    """Raise RequestError if `body` holds more than `limit` levels of objects and lists."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    if b"\\" in body:
        # backslashes stand in strings only, and pair from the left
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    body = body.translate(_ONE_KIND, _OTHERS)
    # Two quotes side by side change nothing for what is inside a string and what is not.
    while b'""' in body:
        body = body.replace(b'""', b"")
    body = b"".join(body.split(b'"')[::2])
    for _ in range(limit):
        shorter = body.replace(b"[]", b"")
        if len(shorter) == len(body):
            break
        body = shorter
    if b"[]" in body or body.count(b"[") > limit:
        raise RequestError(f"the body's JSON is nested more than {limit} levels deep")
