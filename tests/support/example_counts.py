"""How many examples a property test tries: few of `make test`, many of `make verify-long`.

`make test` tries the same examples every time, so that more of them find nothing new; the long form
searches with new seeds (`--hypothesis-profile=search`).
"""

from __future__ import annotations

from hypothesis import settings


def searching() -> bool:
    """Whether pytest runs with `--hypothesis-profile=search`."""
    return settings().max_examples == settings.get_profile("search").max_examples


def examples(num: int, **others: int) -> settings:
    """`num` examples, or as many as a search tries, with these other settings."""
    asked = settings.get_profile("search").max_examples if searching() else 0
    return settings(max_examples=max(num, asked), deadline=None, **others)
