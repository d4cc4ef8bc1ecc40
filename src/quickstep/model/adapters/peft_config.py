"""`adapter_config.json` of a PEFT checkpoint: ranks, scales and target modules.

Read once when an adapter is opened, before any tensor. What changes the computation and is not
implemented is refused by the name of its key. Patterns are regular expressions of the file's
author, so only those are accepted that cannot take exponential time. Source: peft's `LoraConfig`
and `BaseTuner` (https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields, read_json

CONFIG_FILE = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERN_LEN = 512
_MAX_QUANTIFIERS = 6

# Keys that do not change what a trained adapter computes.
_HARMLESS = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "runtime_config",
    "qalora_group_size",
)
# Keys whose effect is not implemented, each with what it is.
_REFUSED = MappingProxyType(
    {
        "use_dora": "DoRA",
        "fan_in_fan_out": "transposed weights",
        "layer_replication": "repeated layers",
        "trainable_token_indices": "trained embeddings of single tokens",
        "alora_invocation_tokens": "activated LoRA",
        "use_qalora": "QALoRA",
        "use_bdlora": "block-diagonal LoRA",
        "arrow_config": "Arrow routing",
    }
)
# Initialisations that also change the base model's weights.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


class PEFTConfig(msgspec.Struct, frozen=True):
    """What a LoRA checkpoint says of itself. Module names are those of the base model, such as
    `model.layers.0.self_attn.q_proj`.

    Attributes:
        target_modules: A regular expression for complete names, or the ends of names.
        target_parameters: The ends of names of parameters that are no linear layers' own.
        exclude_modules: The same for modules that are no targets.
        layers_to_transform: The only layers with targets; None for all.
        layers_pattern: Names of the list of layers, for `layers_to_transform`; () for any.
        rank_pattern, alpha_pattern: Regular expressions of ends of names, and their values, the
            first match before `rank` and `alpha`.
        ensure_weight_tying: A change of the embedding is one of a tied output projection as well.
        biases: Which biases of the base model were trained: `none`, those of targets (`lora_only`),
            or `all`.
        lora_bias: B has a bias.
        modules_to_save: Ends of the names of modules that were trained completely.
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    ensure_weight_tying: bool
    biases: str
    lora_bias: bool
    modules_to_save: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        return int(_first_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What multiplies B A."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether a linear layer or embedding is one of the targets."""
        if _named(self.exclude_modules, module):
            return False
        if self.target_modules == "all-linear":
            return not module.endswith(("lm_head", "embed_tokens"))
        if isinstance(self.target_modules, str):
            return _named(self.target_modules, module)
        return _named(self.target_modules, module) and self._in_layers(module)

    def targets_parameter(self, name: str) -> bool:
        """Whether a parameter is one of `target_parameters`."""
        return _named(self.target_parameters, name)

    def saves(self, module: str) -> bool:
        """Whether the checkpoint has the complete module in place of the base model's."""
        return module.endswith(self.modules_to_save)

    def trains_bias(self, module: str) -> bool:
        """Whether the bias that a linear layer of the base model has was trained."""
        return self.biases == "all" or (self.biases == "lora_only" and self.targets(module))

    def _in_layers(self, module: str) -> bool:
        """Whether its layer is one of `layers_to_transform`."""
        if self.layers_to_transform is None:
            return True
        if not self.layers_pattern:
            found = re.match(r".*?\.[^.]*\.(\d+)\.", module)
            return found is not None and int(found[1]) in self.layers_to_transform
        names = "|".join(map(re.escape, self.layers_pattern))
        found = re.match(rf"(?:.*?\.)?(?:{names})\.(\d+)\.", module)
        return found is not None and int(found[1]) in self.layers_to_transform


def read_peft_config(directory: Path) -> PEFTConfig:
    """Read and check `adapter_config.json`.

    Raises:
        ConfigError: It is missing, malformed, or asks for something that is not implemented.
    """
    file = directory / CONFIG_FILE
    try:
        size = file.stat().st_size
    except OSError:
        raise ConfigError(f"{directory} holds no {CONFIG_FILE}, so it is no adapter") from None
    if size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} has {size} bytes, more than the {_MAX_CONFIG_BYTES} allowed")
    values = read_json(file)
    fields = ConfigFields(values, {}, str(file))
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{file} is of peft_type {kind!r}; only LORA adapters are supported")
    for key, what in _REFUSED.items():
        if fields.value(key):
            raise ConfigError(f"{file} sets {key!r} ({what}), which Quickstep does not implement")
    biases = fields.text("bias") or "none"
    if biases not in ("none", "all", "lora_only"):
        raise ConfigError(f"{file} sets 'bias' to {biases!r}; known are none, all and lora_only")
    init = fields.value("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING):
        raise ConfigError(
            f"{file} sets 'init_lora_weights' to {init!r}, which changes the base model's weights; "
            "convert the adapter (in peft: `save_pretrained(path_initial_model_for_weight_"
            "conversion=...)`)"
        )
    config = PEFTConfig(
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        use_rslora=fields.flag("use_rslora"),
        target_modules=_modules(fields, "target_modules"),
        target_parameters=_names(fields, "target_parameters"),
        exclude_modules=_modules(fields, "exclude_modules"),
        layers_to_transform=_layers(fields),
        layers_pattern=_layer_names(fields),
        rank_pattern=_patterns(fields, "rank_pattern"),
        alpha_pattern=_patterns(fields, "alpha_pattern"),
        ensure_weight_tying=fields.flag("ensure_weight_tying"),
        biases=biases,
        lora_bias=fields.flag("lora_bias"),
        modules_to_save=_names(fields, "modules_to_save"),
    )
    alphas = (config.alpha, *config.alpha_pattern.values())
    if not all(math.isfinite(alpha) for alpha in alphas):
        raise ConfigError(f"{file} has a 'lora_alpha' that is no finite number")
    if any(rank < 1 or rank != int(rank) for rank in config.rank_pattern.values()):
        raise ConfigError(f"{file} has a rank in 'rank_pattern' that is no positive integer")
    fields.refuse_unread({key: values.get(key) for key in _HARMLESS})
    return config


def _named(modules: str | Sequence[str], name: str) -> bool:
    """Whether a name matches an expression as a whole, or ends with one of several names."""
    if isinstance(modules, str):
        return bool(modules) and re.fullmatch(modules, name) is not None
    return any(name == module or name.endswith(f".{module}") for module in modules)


def _first_match(patterns: Mapping[str, float], name: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _modules(fields: ConfigFields, key: str) -> str | tuple[str, ...]:
    value = fields.value(key)
    if isinstance(value, str):
        return value if value == "all-linear" else _checked_pattern(fields.source, key, value)
    return _names(fields, key)


def _names(fields: ConfigFields, key: str) -> tuple[str, ...]:
    names = fields.sequence(key) or ()
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{fields.source} has something other than names in {key!r}")
    return tuple(map(str, names))


def _layers(fields: ConfigFields) -> frozenset[int] | None:
    value = fields.value("layers_to_transform")
    layers = [value] if isinstance(value, int) else fields.sequence("layers_to_transform")
    if not layers:
        return None
    if not all(isinstance(layer, int) and layer >= 0 for layer in layers):
        raise ConfigError(f"{fields.source} has 'layers_to_transform' that are no layer numbers")
    return frozenset(layer for layer in layers if isinstance(layer, int))


def _layer_names(fields: ConfigFields) -> tuple[str, ...]:
    value = fields.value("layers_pattern")
    names = [value] if isinstance(value, str) else fields.sequence("layers_pattern")
    return tuple(str(name) for name in names or () if name)


def _patterns(fields: ConfigFields, key: str) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for pattern, value in (fields.mapping(key) or {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{fields.source} has {value!r} in {key!r}, which is no number")
        found[_checked_pattern(fields.source, key, pattern)] = float(value)
    return found


def _checked_pattern(source: str, key: str, pattern: str) -> str:
    """A regular expression without nested quantifiers, so that it takes polynomial time."""
    quantifiers = len(re.findall(r"(?<!\\)[*+{]", pattern))
    nested = re.search(r"\)[*+{]", pattern) is not None
    backward = re.search(r"\\[1-9]|\(\?P=", pattern) is not None
    if len(pattern) > _MAX_PATTERN_LEN or quantifiers > _MAX_QUANTIFIERS or nested or backward:
        raise ConfigError(
            f"{source} has a regular expression in {key!r} that is too complex: {pattern[:80]!r}; "
            "list the names of the modules"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{source} has no regular expression in {key!r}: {error}") from None
    return pattern
