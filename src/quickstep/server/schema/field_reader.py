"""Reads the fields of one request: typed, known, and each one honoured, reported or refused.

An API makes a reader for each body, decodes with it, and passes `ignored` on: the answer has it as
the header `x-quickstep-ignored`.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from quickstep.errors import RequestError
from quickstep.server.openai.request_types import invalid_json, unknown_field, validation_error
from quickstep.server.options import FieldRules
from quickstep.server.schema.field_classes import Hint, findings
from quickstep.server.schema.unknown_fields import take_out_unknown

__all__ = ["FieldReader", "loosened_keyword"]

_Schema = TypeVar("_Schema", bound=msgspec.Struct)
_POSITION = re.compile(r"\[\d+\]")
_MAX_IGNORED = 64


class FieldReader:
    """Decodes one request's body and collects the fields that have no effect."""

    def __init__(self, rules: FieldRules) -> None:
        self._rules = rules
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """The paths of fields without effect, without positions: `messages[].mood`. Bounded."""
        return tuple(self._ignored)

    def decode(self, body: bytes, schema: type[_Schema]) -> _Schema:
        """The typed request. Raises RequestError with the path of the first wrong field."""
        try:
            # decoding the text first refuses invalid UTF-8 in skipped values as well
            text = body.decode()
            try:
                fields = msgspec.json.decode(text, type=schema)
            except msgspec.ValidationError:  # what follows the wrong field may be no JSON
                value = msgspec.json.decode(text)
                return self.convert(value, schema)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_json(error) from None
        self._judge(fields, "")
        return fields

    def convert(self, value: Any, schema: type[_Schema], path: str = "") -> _Schema:
        """A decoded part of a body, at `path`, as its type; what is unknown is taken out of it.

        Raises RequestError with the path of the first wrong field.
        """
        for place in take_out_unknown(value, schema, path):
            if self._rules.refuse_unknown:
                raise unknown_field(place, schema, path)
            self._report(place)
        try:
            fields = msgspec.convert(value, schema)
        except msgspec.ValidationError as error:
            raise validation_error(error, schema, path) from None
        self._judge(fields, path)
        return fields

    def ignore(self, path: str, why: str) -> None:
        """Report a hint that has no effect here. Raises RequestError where hints are refused."""
        if self._rules.refuse_hints:
            raise RequestError(
                f"{path} has no effect: {why}; leave it out, or start the server without --strict",
                param=path,
            )
        self._report(path)

    def _judge(self, fields: msgspec.Struct, path: str) -> None:
        for finding in findings(fields, path):
            why = finding.declared.why
            if isinstance(finding.declared, Hint):
                self.ignore(finding.path, why)
            else:
                raise RequestError(f"{finding.path} is not supported: {why}", param=finding.path)

    def _report(self, path: str) -> None:
        if len(self._ignored) < _MAX_IGNORED:
            self._ignored[_POSITION.sub("[]", path)] = None


def loosened_keyword(path: str) -> RequestError:
    """The refusal, where hints are refused, of a schema's keyword that is not enforced exactly."""
    return RequestError(
        f"{path} is enforced less strictly than it says; change the schema, or start the server "
        "without --strict",
        param=path,
    )
