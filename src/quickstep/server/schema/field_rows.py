"""What the reference says of one field; its class is declared at the field (`field_classes`).

The tables of `field_reference` are made of these; the tests try each kind in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quickstep.server.schema.field_classes import Hint, Refusal

__all__ = ["Effects", "Honoured", "Note", "Row"]


class Honoured(msgspec.Struct, frozen=True):
    """The visible effect, as a sentence; `otherwise` if it is a hint that some models lack."""

    effect: str
    otherwise: Hint | None = None


class Note(msgspec.Struct, frozen=True):
    """A note without effect: checked for its type, accepted, and why it changes nothing."""

    why: str


Row = Honoured | Note | Hint | Refusal
# What a field does: a sentence for its effect.
Effects = Mapping[str, str | Note]
