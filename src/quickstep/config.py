"""Configuration of the engine: small frozen sections, each field documented with its unit.

A part receives its own section, never the whole. `EngineConfig` only groups them for the
command line and `LLM(...)`.
"""

from __future__ import annotations

import enum
import math

import msgspec

from quickstep.errors import ConfigError

__all__ = [
    "KV_DTYPES",
    "QUANTIZATIONS",
    "CacheConfig",
    "EngineConfig",
    "InputConfig",
    "LoadConfig",
    "PolicyName",
    "SchedulerConfig",
    "StreamConfig",
]

KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8")
QUANTIZATIONS = ("int8", "int8-g32", "int4", "int4-g64", "int4-g128")


class PolicyName(enum.Enum):
    """Scheduling policies by their command-line names."""

    MIXED = "mixed"
    PREFILL_FIRST = "prefill-first"


class CacheConfig(msgspec.Struct, frozen=True):
    """The paged KV cache.

    Attributes:
        block_size: Token positions per block (S).
        num_blocks: Blocks in the pool (B); None derives it from `kv_cache_bytes` or free memory.
        kv_cache_bytes: Budget for KV tensors in bytes; None derives it.
        prefix_caching: Keep full blocks of finished sequences for later prompts.
        kv_dtype: What keys and values are held in: `auto` (the model's dtype), `bfloat16`,
            `float16`, `float32`, or `int8` codes with a scale for each token and head.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size is {self.block_size}, it must be a power of two")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"--num-blocks is {self.num_blocks}, it must be at least 1")
        if self.kv_dtype not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise ConfigError(f"--kv-cache-dtype is {self.kv_dtype!r}, it must be one of {known}")


class SchedulerConfig(msgspec.Struct, frozen=True):
    """What a step may hold and how steps overlap.

    Attributes:
        max_num_seqs: Resident sequences, which is also the number of slots.
        max_num_batched_tokens: Tokens in a step (T), decode and prefill together.
        max_model_len: Longest sequence in tokens, prompt and output; `EngineConfig.max_model_len`
            resolved for the model and the memory.
        max_waiting: Queued sequences beyond which `add` refuses; None for no limit.
        pipeline_depth: Steps in flight: 1 waits for each, 2 plans the next while one runs.
        policy: How a step's tokens are split between phases.
        inter_token_target_s: The step time in seconds that `mixed` keeps prefill chunks under;
            twice that of the step's decode rows alone, where that is longer.
        priority_aging_s: Seconds since its arrival for which a request gains one level of priority,
            so that higher priorities cannot keep it waiting for ever.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    max_waiting: int | None = None
    pipeline_depth: int = 1
    policy: PolicyName = PolicyName.MIXED
    inter_token_target_s: float = 0.2
    priority_aging_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "pipeline_depth"):
            value = getattr(self, name)
            if value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}, it must be at least 1")
        if not self.inter_token_target_s > 0:
            value = self.inter_token_target_s
            raise ConfigError(f"--inter-token-target-s is {value}, it must be above 0")
        if not 0 < self.priority_aging_s < math.inf:
            value = self.priority_aging_s
            raise ConfigError(f"--priority-aging-s is {value}, it must be above 0 and finite")


class LoadConfig(msgspec.Struct, frozen=True):
    """Which weights to load and how.

    Attributes:
        model: A directory, a hub id, or `demo`.
        revision: Hub revision; None for the default branch.
        dtype: `auto` (the checkpoint's), `bfloat16`, `float16` or `float32`.
        device: `auto`, `cpu` or `cuda`.
        offline: Never touch the network; the environment's HF_HUB_OFFLINE is honoured as well.
        num_threads: CPU threads; None for one per core that the process may use.
        pin_threads: Keep each of them but the calling one on a CPU of its own.
        quantization: One of QUANTIZATIONS: matrices are rounded as they are loaded, and computed
            in integers; None keeps the dtype.
    """

    model: str = "demo"
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    offline: bool = False
    num_threads: int | None = None
    pin_threads: bool = False
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.quantization not in (None, *QUANTIZATIONS):
            known = f"{', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}"
            raise ConfigError(f"--quantization is {self.quantization!r}, it must be {known}")


class InputConfig(msgspec.Struct, frozen=True):
    """What preparing one request may take, before any of it is computed.

    Attributes:
        schema_bytes: UTF-8 of a JSON schema, a grammar, or all choices.
        schema_depth: Nested objects and lists of a schema.
        regex_bytes: UTF-8 of a regular expression.
        grammar_s: Processor time in seconds to compile a grammar.
        template_s: Seconds of processor time to render a conversation with the chat template.
    """

    schema_bytes: int = 512 * 1024
    schema_depth: int = 32
    regex_bytes: int = 2 * 1024
    grammar_s: float = 2.0
    template_s: float = 1.0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-schema-bytes", self.schema_bytes),
            ("--max-schema-depth", self.schema_depth),
            ("--max-regex-bytes", self.regex_bytes),
            ("--grammar-timeout-s", self.grammar_s),
            ("--template-timeout-s", self.template_s),
        ):
            if not value > 0:
                raise ConfigError(f"{flag} is {value:g}, it must be above 0")


class StreamConfig(msgspec.Struct, frozen=True):
    """What a request's stream may hold unread; beyond it the request is paused.

    It continues once its reader has come down to half of both.

    Attributes:
        max_unread_deltas: Pieces of news, of all its sequences together.
        max_unread_bytes: About what they hold: text, tokens, logprobs.
    """

    max_unread_deltas: int = 256
    max_unread_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("max_unread_deltas", "max_unread_bytes"):
            value = getattr(self, name)
            if value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}, it must be at least 1")


class EngineConfig(msgspec.Struct, frozen=True):
    """All sections, as the command line and `LLM(...)` fill them.

    Attributes:
        streams: None never pauses a request by itself.
        max_model_len: Longest sequence in tokens; None takes the model's longest, as far as the
            KV cache holds it.
        allow_long_context: Let `max_model_len` be above the model's limit: positions are scaled.
        seed: Seeds the draws of seeds for unseeded requests; None takes the system's entropy.
        memory_bytes: Cap on the engine's memory in bytes; None uses what the machine has free.
        enforce_eager: Run the model op by op instead of replaying captured steps; same bits.
    """

    load: LoadConfig = msgspec.field(default_factory=LoadConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    inputs: InputConfig = msgspec.field(default_factory=InputConfig)
    streams: StreamConfig | None = msgspec.field(default_factory=StreamConfig)
    max_model_len: int | None = None
    allow_long_context: bool = False
    seed: int | None = None
    memory_bytes: int | None = None
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len is {self.max_model_len}, it must be at least 1")
