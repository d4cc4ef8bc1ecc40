"""compressed-tensors' `quantization_config`: which modules are held how. No torch.

Groups of modules, each with a scheme for its weights and activations; `targets` and `ignore` are
names, classes (`Linear`) or regular expressions (`re:...`), names before classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields

__all__ = ["Schemes", "WeightScheme", "read_schemes"]

_SOURCE = "config.json's quantization_config"
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_STRATEGIES = ("channel", "group", "tensor")
_EXPRESSION = "re:"


class WeightScheme(msgspec.Struct, frozen=True):
    """How the weights of a group of modules are held; `group_size` None for all inputs."""

    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    group_size: int | None


class Schemes(msgspec.Struct, frozen=True):
    """All groups of a checkpoint, and the modules that are left whole."""

    groups: tuple[WeightScheme, ...]
    ignored: tuple[str, ...]

    def of(self, module: str) -> WeightScheme | None:
        """The scheme of a module, None where it is to be whole."""
        if any(_names(entry, module) for entry in self.ignored):
            return None
        for group in self.groups:
            if any(_names(target, module) for target in group.targets):
                return group
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        return next((group for group in self.groups if kind in group.targets), None)


def read_schemes(config: Mapping[str, object]) -> Schemes:
    """Read and check a `quantization_config`. Raises ConfigError."""
    fields = ConfigFields(config, {}, _SOURCE)
    status = fields.text("quantization_status")
    if status not in ("", "compressed", "frozen"):
        raise ConfigError(f"{_SOURCE} has the status {status!r}; save the model compressed")
    _refuse(fields)
    groups = fields.mapping("config_groups")
    if not groups:
        raise ConfigError(f"{_SOURCE} has no config_groups, so nothing says what is quantised")
    form = fields.text("format")
    schemes = tuple(_scheme(str(name), group, form) for name, group in groups.items())
    return Schemes(schemes, _texts(fields.sequence("ignore")))


def _refuse(fields: ConfigFields) -> None:
    """Raise ConfigError for what changes the computation and is not done here."""
    sparsity = fields.mapping("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(
            f"{_SOURCE} has sparse weights ({sparsity['format']}); dense is supported"
        )
    for name, what in (
        ("kv_cache_scheme", "a quantised KV cache"),
        ("transform_config", "rotated weights"),
    ):
        if fields.mapping(name):
            raise ConfigError(f"{_SOURCE} asks for {what} ({name}), which is not supported")


def _scheme(name: str, group: object, outer_format: str) -> WeightScheme:
    where = f"{_SOURCE}, {name},"
    if not isinstance(group, Mapping):
        raise ConfigError(f"{where} must be an object")
    fields = ConfigFields(group, {"format": outer_format}, where)
    weights = fields.mapping("weights")
    if weights is None:
        raise ConfigError(f"{where} quantises no weights; only that is supported")
    form = fields.text("format")
    weight_fields = ConfigFields(
        weights, {"type": "int", "symmetric": True, "strategy": "channel"}, f"{where} weights"
    )
    kind, bits = weight_fields.text("type"), weight_fields.optional_integer("num_bits")
    if form not in _FORMATS or kind != "int":
        known = ", ".join(_FORMATS)
        raise ConfigError(
            f"{where} holds weights of {kind}{bits} as {form or 'no named format'}; supported are "
            f"int4 and int8 as {known}"
        )
    if bits not in (4, 8):
        raise ConfigError(f"{where} holds weights of {bits} bits; 4 and 8 are supported")
    strategy = weight_fields.text("strategy")
    if strategy not in _STRATEGIES:
        known = ", ".join(_STRATEGIES)
        raise ConfigError(f"{where} has the strategy {strategy!r}; supported are {known}")
    _check_activations(fields, where)
    size = weight_fields.integer("group_size") if strategy == "group" else None
    return WeightScheme(
        _texts(fields.sequence("targets")), bits, weight_fields.flag("symmetric"), size
    )


def _check_activations(fields: ConfigFields, where: str) -> None:
    for part in ("input_activations", "output_activations"):
        values = fields.mapping(part)
        if values is None:
            continue
        kind = f"{values.get('type', 'int')}{values.get('num_bits')}"
        if kind != "int8" or values.get("dynamic") is not True or part.startswith("output"):
            raise ConfigError(
                f"{where} has {part} of {kind}, dynamic {values.get('dynamic')}; supported are "
                "dynamic int8 inputs, or none"
            )


def _texts(values: Sequence[object] | None) -> tuple[str, ...]:
    return tuple(str(value) for value in values or ())


def _names(entry: str, module: str) -> bool:
    """Whether an entry of `targets` or `ignore` is this module's name, or matches it."""
    if not entry.startswith(_EXPRESSION):
        return entry == module
    try:
        return re.match(entry.removeprefix(_EXPRESSION), module) is not None
    except re.error as error:
        raise ConfigError(f"{_SOURCE} has a bad expression {entry!r}: {error}") from None
