"""The options of `LLM(...)`: vLLM's names, each to its place in an EngineConfig.

An unknown name is a ConfigError that names the nearest known one; nothing is ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypedDict, get_type_hints

from quickstep.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    PolicyName,
    SchedulerConfig,
)
from quickstep.errors import ConfigError

__all__ = ["LLMOptions", "engine_config"]


class LLMOptions(TypedDict, total=False):
    """Every option; None means the default. Units and meanings stand in `quickstep.config`."""

    revision: str | None
    dtype: str
    quantization: str | None
    device: str
    offline: bool
    num_threads: int | None
    pin_threads: bool
    block_size: int
    num_blocks: int | None
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str
    max_model_len: int | None
    allow_long_context: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int | None
    pipeline_depth: int
    policy: str | PolicyName
    inter_token_target_s: float
    priority_aging_s: float
    seed: int | None
    memory_bytes: int | None
    enforce_eager: bool


# option -> (section, field); the section "" is EngineConfig itself
_PLACES: Mapping[str, tuple[str, str]] = {
    "revision": ("load", "revision"),
    "dtype": ("load", "dtype"),
    "quantization": ("load", "quantization"),
    "device": ("load", "device"),
    "offline": ("load", "offline"),
    "num_threads": ("load", "num_threads"),
    "pin_threads": ("load", "pin_threads"),
    "block_size": ("cache", "block_size"),
    "num_blocks": ("cache", "num_blocks"),
    "num_gpu_blocks_override": ("cache", "num_blocks"),
    "kv_cache_memory_bytes": ("cache", "kv_cache_bytes"),
    "enable_prefix_caching": ("cache", "prefix_caching"),
    "kv_cache_dtype": ("cache", "kv_dtype"),
    "max_model_len": ("", "max_model_len"),
    "allow_long_context": ("", "allow_long_context"),
    "max_num_seqs": ("scheduler", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler", "max_num_batched_tokens"),
    "max_waiting": ("scheduler", "max_waiting"),
    "pipeline_depth": ("scheduler", "pipeline_depth"),
    "policy": ("scheduler", "policy"),
    "inter_token_target_s": ("scheduler", "inter_token_target_s"),
    "priority_aging_s": ("scheduler", "priority_aging_s"),
    "seed": ("", "seed"),
    "memory_bytes": ("", "memory_bytes"),
    "enforce_eager": ("", "enforce_eager"),
}


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that `LLM(model, **options)` asks for.

    Raises:
        ConfigError: An option is unknown, given twice by two names, or has a bad value.
    """
    sections: dict[str, dict[str, Any]] = {"load": {"model": model}, "cache": {}, "scheduler": {}}
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _PLACES:
            raise ConfigError(_unknown(name))
        if value is None:
            continue
        _check_type(name, value)
        section, field = _PLACES[name]
        fields = sections[section] if section else own
        if field in fields:
            raise ConfigError(f"{name} and another name of {field} are both given; keep one")
        fields[field] = _policy(value) if name == "policy" else value
    return EngineConfig(
        load=LoadConfig(**sections["load"]),
        cache=CacheConfig(**sections["cache"]),
        scheduler=SchedulerConfig(**sections["scheduler"]),
        **own,
    )


def _check_type(name: str, value: Any) -> None:
    """Integers pass for floats, truth values for neither."""
    wanted = get_type_hints(LLMOptions)[name]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    fits = isinstance(value, wanted) if wanted is not float else is_number or type(value) is float
    if not fits or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{name} is {value!r}, it must be of type {_type_name(wanted)}")


def _type_name(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)


def _policy(value: str | PolicyName) -> PolicyName:
    try:
        return PolicyName(value)
    except ValueError as error:
        names = ", ".join(policy.value for policy in PolicyName)
        raise ConfigError(f"policy is {value!r}, it must be one of {names}") from error


def _unknown(name: str) -> str:
    if name == "trust_remote_code":
        return "trust_remote_code does not exist here: a checkpoint's own code is never run"
    nearest = difflib.get_close_matches(name, _PLACES, n=1, cutoff=0.0)[0]
    return f"LLM has no option {name!r}; the nearest is {nearest!r}"
