"""Configuration of the engine: small frozen sections, each field documented with its unit.

Each part of the engine receives only its own section. `EngineConfig` groups them for the command
line and `LLM(...)`.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError

KERNELS = ("auto", "reference", "native", "triton")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "fp8")
MAX_SPECULATIVE_TOKENS = 16
QUANTIZATIONS = ("int8", "int8-g32", "int4", "int4-g64", "int4-g128", "fp8")

_T = TypeVar("_T")
_MAX_THREADS = 1024
_MAX_LORAS = 64  # in compute memory
_MAX_REPLICAS = 64
_MAX_RANKS = 64
_ADAPTER_NAME_BYTES = 255  # as many as a folder's name may have


class ContentFormat(enum.Enum):
    """What chat templates read of a message's content, by the command line's names."""

    AUTO = "auto"
    STRING = "string"
    OPENAI = "openai"


class PolicyName(enum.Enum):
    """Scheduling policies by their command-line names."""

    MIXED = "mixed"
    PREFILL_FIRST = "prefill-first"
    DECODE_FIRST = "decode-first"
    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    FAIR = "fair"
    STATIC = "static"
    DYNAMIC = "dynamic"
    LENGTH_GROUPED = "length-grouped"


class SpeculationMethod(enum.Enum):
    """What proposes draft tokens: `auto` is `suffix` and, for each model, also what its checkpoint
    holds: `draft`, `medusa`, `eagle` or `eagle3`.
    """

    OFF = "off"
    AUTO = "auto"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT = "draft"
    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"


class SpeculativeSampling(enum.Enum):
    """When a draft is accepted: `exact` if it is the token that is sampled without drafts,
    `rejection` with the probability that it has (the standard; tokens then depend on the drafts).
    """

    EXACT = "exact"
    REJECTION = "rejection"


class CacheConfig(msgspec.Struct, frozen=True):
    """The paged KV cache.

    Attributes:
        block_size: Token positions per block (S).
        num_blocks: Blocks in the pool (B); None derives it from `kv_cache_bytes` or free memory.
        kv_cache_bytes: Memory for KV tensors in bytes; None derives it from free memory.
        prefix_caching: Keep full blocks of finished sequences for later prompts.
        kv_dtype: Dtype of keys and values: `auto` (the model's dtype), `bfloat16`, `float16`,
            `float32`, `int8` with a scale per token and head, or `fp8` (e4m3) without scales.
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
    """The size of a step, and how steps overlap.

    Attributes:
        max_num_seqs: Resident sequences, which is also the number of slots.
        max_num_batched_tokens: Tokens in a step (T), decode and prefill together.
        max_model_len: Longest sequence in tokens, prompt and output; `EngineConfig.max_model_len`
            resolved for the model and the memory.
        max_waiting: Waiting sequences beyond which `add` rejects a request; None for no limit.
        pipeline_depth: Steps in flight: 1 waits for each step, 2 plans the next while one runs.
            None: 2 where decode steps are CUDA graphs, else 1.
        policy: Who is served first, and how a step's tokens are split between phases
            (`core.policies`).
        inter_token_target_s: Limit of the step time in seconds, by which `mixed` chooses the size
            of prefill chunks; or twice the time of the decode rows, if that is longer.
        priority_aging_s: Waiting time in seconds after which a request gains one level of priority,
            so that requests of higher priority cannot delay it for ever.
        batch_timeout_s: With the policies `dynamic` and `length-grouped`, how long the oldest
            request waits in seconds for others, before its batch begins.
        num_speculative_tokens: Most drafts of a row; 0 turns speculation off. The engine takes it
            from its `SpeculationConfig`.
        use_kv_cache: False computes all tokens of a sequence again for each of its tokens, to see
            what the cache saves; the tokens are the same.
        max_loras: LoRA adapters in compute memory (`core.resources.adapter_residency`); None if
            adapters are no resource: every adapter is always there. The engine takes it from its
            `LoRAConfig`.
        lora_bytes: What they take together; None for no limit.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    max_waiting: int | None = None
    pipeline_depth: int | None = None
    policy: PolicyName = PolicyName.MIXED
    inter_token_target_s: float = 0.2
    priority_aging_s: float = 10.0
    batch_timeout_s: float = 0.1
    num_speculative_tokens: int = 0
    use_kv_cache: bool = True
    max_loras: int | None = None
    lora_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "pipeline_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}, it must be at least 1")
        if not self.inter_token_target_s > 0:
            value = self.inter_token_target_s
            raise ConfigError(f"--inter-token-target-s is {value}, it must be above 0")
        if not 0 < self.priority_aging_s < math.inf:
            value = self.priority_aging_s
            raise ConfigError(f"--priority-aging-s is {value}, it must be above 0 and finite")
        if not 0 <= self.batch_timeout_s < math.inf:
            value = self.batch_timeout_s
            raise ConfigError(f"--batch-timeout-s is {value}, it must be at least 0 and finite")
        if not self.use_kv_cache and self.num_in_flight > 1:
            raise ConfigError("--no-kv-cache needs --pipeline-depth 1: a step needs all tokens")

    @property
    def num_in_flight(self) -> int:
        """Most steps in flight."""
        return self.pipeline_depth or 1


_METHODS_WITH_MODEL = (
    SpeculationMethod.DRAFT,
    SpeculationMethod.MEDUSA,
    SpeculationMethod.EAGLE,
    SpeculationMethod.EAGLE3,
)


class ProposerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What proposes draft tokens; the names of the fields are vLLM's.

    Attributes:
        method: What it is.
        model: With `draft`, a smaller checkpoint with the same tokenizer; with `medusa`, that of
            the heads; with `eagle` and `eagle3`, that of the layer; with `auto`, any of them.
        revision: Hub revision of `model`; None for the default branch.
        quantization: One of QUANTIZATIONS for a draft model; None keeps its dtype.
    """

    method: SpeculationMethod = SpeculationMethod.AUTO
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        method = self.method
        if method in _METHODS_WITH_MODEL and self.model is None:
            raise ConfigError(f"--speculative-method {method.value} needs --speculative-model")
        for name in ("revision", "quantization"):
            if self.model is None and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, but no --speculative-model is given to "
                    "which it applies; leave it out"
                )
        can_have_model = method in (SpeculationMethod.AUTO, *_METHODS_WITH_MODEL)
        if self.model is not None and not can_have_model:
            raise ConfigError(
                f"--speculative-model is {self.model}, but --speculative-method {method.value} "
                "uses no model; leave one of them out"
            )


class SpeculationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding; the names of the fields are vLLM's where it has them.

    Attributes:
        proposers: What proposes drafts, each of another method; () for no speculation. Where there
            are several, each sequence has the drafts that are predicted to gain most.
        num_speculative_tokens: Most drafts of a row; how many it gets is decided step by step
            (`core.drafts.control`).
        sampling: When a draft is accepted.
        tree_width: With `medusa`, `eagle` and `eagle3`, most drafts that follow the same token; 1
            for chains.
        prompt_lookup_min: With `ngram`, the shortest match in tokens.
        prompt_lookup_max: With `ngram`, the longest match that is looked for, in tokens.
        suffix_decoding_max_tree_depth: With `suffix`, the longest match that is looked for.
        suffix_decoding_max_spec_factor: With `suffix`, the most drafts per token of the match.
        suffix_decoding_min_token_prob: With `suffix`, the least estimated probability of a draft.
        suffix_decoding_max_cached_tokens: With `suffix`, tokens of recent outputs that are kept to
            find matches in, over all tenants; 0 searches a sequence's own text only.
    """

    proposers: tuple[ProposerConfig, ...] = (ProposerConfig(),)
    num_speculative_tokens: int = 8
    sampling: SpeculativeSampling = SpeculativeSampling.EXACT
    tree_width: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_tokens: int = 100_000

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if not 1 <= count <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"--num-speculative-tokens is {count}, it must be 1 to {MAX_SPECULATIVE_TOKENS}; "
                "--speculative-method off turns speculation off"
            )
        if not 1 <= self.tree_width <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"--speculative-tree-width is {self.tree_width}, it must be 1 (no trees) to "
                f"{MAX_SPECULATIVE_TOKENS}"
            )
        if not self.is_on and self.sampling is SpeculativeSampling.REJECTION:
            raise ConfigError(
                "--speculative-sampling rejection samples with drafts, but --speculative-method is "
                "off; leave one of them out"
            )
        models = [proposer.model for proposer in self.proposers if proposer.model is not None]
        twice = next((model for model in models if models.count(model) > 1), None)
        if twice is not None:
            raise ConfigError(f"--speculative-model {twice} is given twice; name it once")
        for method in _METHODS_WITH_MODEL:
            same = [proposer.model for proposer in self.proposers if proposer.method is method]
            if len(same) > 1:
                raise ConfigError(
                    f"--speculative-method {method.value} takes one --speculative-model, but "
                    f"{' and '.join(map(str, same))} are given; keep one of them"
                )

    @property
    def is_on(self) -> bool:
        """Whether anything proposes drafts."""
        return bool(self.proposers)

    @staticmethod
    def of_fields(
        fields: Mapping[str, Any] | Sequence[Mapping[str, Any]], source: str
    ) -> SpeculationConfig:
        """From JSON, named `source` in errors: an object with the fields of a proposer and those
        for all of them, or a list of such objects, a proposer each. Raises ConfigError.
        """
        objects = [fields] if isinstance(fields, Mapping) else list(fields)
        if not objects:
            raise ConfigError(f"{source} is an empty list; name a method, or leave it out")
        proposers: list[ProposerConfig] = []
        shared: dict[str, Any] = {}
        for place, one in enumerate(objects, 1):
            where = source if len(objects) == 1 else f"{source}, object {place}"
            if not isinstance(one, Mapping):
                raise ConfigError(f"{where} is {one!r}, it must be a JSON object")
            if "proposers" in one:
                raise ConfigError(f"{where} has no field `proposers`; give a list of objects")
            of_one = {name: one[name] for name in ProposerConfig.__struct_fields__ if name in one}
            proposer = _converted(of_one, ProposerConfig, where)
            if proposer.model is not None or proposer not in proposers:
                proposers.append(proposer)
            for name in one.keys() - of_one.keys():
                if shared.setdefault(name, one[name]) != one[name]:
                    raise ConfigError(
                        f"{source}: {name} is {shared[name]!r} and {one[name]!r}, but it holds for "
                        "all proposers; give one value"
                    )
        is_on = [one for one in proposers if one.method is not SpeculationMethod.OFF]
        if is_on and len(is_on) < len(proposers):
            raise ConfigError(f"{source} has the method off and others; leave one of them out")
        return replace(_converted(shared, SpeculationConfig, source), proposers=tuple(is_on))


def _converted(fields: Mapping[str, Any], wanted: type[_T], source: str) -> _T:
    try:
        return msgspec.convert(fields, wanted)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


class LoadConfig(msgspec.Struct, frozen=True):
    """Which weights to load and how.

    Attributes:
        model: A directory, a hub id, or `demo`.
        revision: Hub revision; None for the default branch.
        dtype: `auto` (the checkpoint's), `bfloat16`, `float16` or `float32`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        kernels: One of KERNELS: PyTorch's ops (`reference`), those compiled for CPUs (`native`), or
            Triton's; `auto` chooses by the device (`ops.resolve`).
        offline: Never use the network; the environment variable HF_HUB_OFFLINE works too.
        num_threads: CPU threads; None for one per core that the process may use.
        pin_threads: Pin each of them, except the calling one, to its own CPU.
        quantization: One of QUANTIZATIONS: weights are quantized while loading, and matrix
            products are computed in integers, for `fp8` in e4m3; None keeps the dtype.
        tensor_parallel_size: Processes that compute every step together, each with a part of every
            matrix and of the threads; the bits are those of one.
    """

    model: str = "demo"
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    offline: bool = False
    num_threads: int | None = None
    pin_threads: bool = False
    quantization: str | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.tensor_parallel_size <= _MAX_RANKS:
            raise ConfigError(
                f"--tensor-parallel-size is {self.tensor_parallel_size}, it must be from 1 to "
                f"{_MAX_RANKS}"
            )
        if self.num_threads is not None and not 1 <= self.num_threads <= _MAX_THREADS:
            raise ConfigError(
                f"--threads is {self.num_threads}, it must be from 1 to {_MAX_THREADS}"
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            known = f"{', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}"
            raise ConfigError(f"--quantization is {self.quantization!r}, it must be {known}")


def adapter_name_problem(name: str) -> str | None:
    """What is wrong with the name of a LoRA adapter, as the end of a sentence; None for nothing.

    Names come from clients, flags and folders, and go into JSON, logs, metrics and paths.
    """
    if not name:
        return "is empty; an adapter needs a name"
    if not name.isprintable():  # so no line break and no lone surrogate of bytes that are no UTF-8
        return "has characters that cannot be printed"
    num_bytes = len(name.encode())
    if num_bytes > _ADAPTER_NAME_BYTES:
        return f"has {num_bytes} bytes, the limit is {_ADAPTER_NAME_BYTES}"
    return None


class LoRAConfig(msgspec.Struct, frozen=True):
    """LoRA adapters.

    Attributes:
        modules: (name, directory) of the adapters that are opened at the start; as many as fit are
            loaded then.
        max_loras: Adapters in compute memory at the same time.
        max_lora_rank: The largest rank of an adapter.
        max_cpu_loras: Adapters in memory at the same time, those in compute memory included: so
            many more stay in host memory after an eviction. None for `max_loras`.
        directory: Each of its folders is an adapter, which is opened when a request first names it.
        pinned: Names of adapters that are never evicted.
        memory_bytes: What adapters may take in compute memory together; None for the `max_loras`
            largest of those that are known at the start.
        allowed_dirs: Where clients may load adapters from, with `directory`.
        dtype: `auto` holds adapters in the model's dtype, `int8` in half of that of bfloat16.
    """

    modules: tuple[tuple[str, str], ...] = ()
    max_loras: int = _MAX_LORAS
    max_lora_rank: int = 256
    max_cpu_loras: int | None = None
    directory: str | None = None
    pinned: tuple[str, ...] = ()
    memory_bytes: int | None = None
    allowed_dirs: tuple[str, ...] = ()
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "int8"):
            raise ConfigError(f"--lora-dtype is {self.dtype!r}, it must be auto or int8")
        for name in ("max_loras", "max_lora_rank", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-").replace("memory", "lora-memory")
                raise ConfigError(f"--{flag} is {value}, it must be at least 1")
        names = [name for name, _ in self.modules]
        for name in names:
            if (problem := adapter_name_problem(name)) is not None:
                raise ConfigError(f"--lora-modules: the name {name[:100]!a} {problem}")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"--lora-modules names {twice!r} twice")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras is {self.max_cpu_loras}, it must be at least --max-loras, which "
                f"is {self.max_loras}"
            )
        if len(set(self.pinned)) >= self.max_loras:
            raise ConfigError(
                f"--lora-pin names {len(set(self.pinned))} adapters, which leaves no place for "
                f"others in --max-loras {self.max_loras}"
            )
        for directory in (self.directory, *self.allowed_dirs):
            if directory is not None and not os.path.isdir(directory):  # noqa: PTH112
                flag = "--lora-dir" if directory == self.directory else "--lora-allowed-dirs"
                raise ConfigError(f"{flag} is {directory}, which is no directory")

    def itemsize(self, of_model: int) -> int:
        """Bytes of an element of an adapter, of a model whose elements have `of_model` bytes."""
        return 1 if self.dtype == "int8" else of_model

    @staticmethod
    def usual_max_loras(max_cpu_loras: int | None) -> int:
        """`max_loras` where none is given: not above the `max_cpu_loras` that is."""
        return _MAX_LORAS if max_cpu_loras is None else min(_MAX_LORAS, max_cpu_loras)

    @property
    def num_host_loras(self) -> int:
        """Adapters in host memory, besides those in compute memory."""
        return (self.max_cpu_loras or self.max_loras) - self.max_loras

    @property
    def client_dirs(self) -> tuple[str, ...]:
        """Where clients may load adapters from."""
        return self.allowed_dirs if self.directory is None else (self.directory, *self.allowed_dirs)


class InputConfig(msgspec.Struct, frozen=True):
    """How requests are prepared before the model computes anything, and the limits of it.

    Attributes:
        chat_template: The text of a chat template in place of the checkpoint's.
        content_format: What templates read of a message's content; `auto` finds out.
        schema_bytes: Size in UTF-8 of a JSON schema, a grammar, or all choices.
        schema_depth: Nesting depth of a schema.
        regex_bytes: Size in UTF-8 of a regular expression.
        grammar_s: CPU time in seconds to compile a grammar.
        template_s: CPU time in seconds to render the chat template.
    """

    schema_bytes: int = 512 * 1024
    schema_depth: int = 32
    regex_bytes: int = 2 * 1024
    grammar_s: float = 2.0
    template_s: float = 1.0
    chat_template: str | None = None
    content_format: ContentFormat = ContentFormat.AUTO

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
    """Limits of unread output in a request's stream; beyond either, the request is paused.

    It continues when the reader has reduced both to half of the limit.

    Attributes:
        max_unread_deltas: Deltas of all its sequences together.
        max_unread_bytes: Their approximate size: text, tokens, logprobs.
    """

    max_unread_deltas: int = 256
    max_unread_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("max_unread_deltas", "max_unread_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}, it must be at least 1")


class RecordingConfig(msgspec.Struct, frozen=True):
    """A recording of what the scheduler does (`core.recordings.recording`).

    Attributes:
        path: The file; earlier ones are kept as FILE.1, FILE.2 and so on.
        is_full: With prompts, sampling and outputs; otherwise without text and tokens.
    """

    path: str
    is_full: bool = False


class RouterName(enum.Enum):
    """Which of several engines with the same model gets a request (`core.router`)."""

    PREDICTED = "predicted"
    PREFIX = "prefix"
    FEWEST_REQUESTS = "fewest-requests"
    ROUND_ROBIN = "round-robin"


class ReplicaConfig(msgspec.Struct, frozen=True):
    """The engines that serve one model.

    Attributes:
        num_replicas: How many there are, each in a process of its own.
        router: Which of them gets a request.
        max_moves: How often in a row, without a new token, a request continues on another engine,
            or on a restarted one, after the end of its engine's process.
    """

    num_replicas: int = 1
    router: RouterName = RouterName.PREDICTED
    max_moves: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= _MAX_REPLICAS:
            raise ConfigError(
                f"--data-parallel-size is {self.num_replicas}, it must be from 1 to {_MAX_REPLICAS}"
            )
        if self.max_moves < 0:
            raise ConfigError(f"--max-moves is {self.max_moves}, it must be at least 0")


class EngineConfig(msgspec.Struct, frozen=True):
    """All sections; the command line and `LLM(...)` fill them in.

    Attributes:
        streams: None never pauses a request for a slow reader.
        max_model_len: Longest sequence in tokens; None uses the model's limit, or less if the KV
            cache is smaller.
        allow_long_context: Allow `max_model_len` above the model's limit: positions are scaled.
        seed: Makes the seeds of requests without one reproducible; None uses random seeds.
        memory_bytes: Limit of the engine's memory in bytes; None uses the machine's free memory.
        enforce_eager: Run the model op by op instead of replaying captured steps; same bits.
        lora: None if requests have no adapters.
        recording: None records nothing.
    """

    load: LoadConfig = msgspec.field(default_factory=LoadConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = msgspec.field(default_factory=SpeculationConfig)
    inputs: InputConfig = msgspec.field(default_factory=InputConfig)
    streams: StreamConfig | None = msgspec.field(default_factory=StreamConfig)
    max_model_len: int | None = None
    allow_long_context: bool = False
    seed: int | None = None
    memory_bytes: int | None = None
    enforce_eager: bool = False
    lora: LoRAConfig | None = None
    recording: RecordingConfig | None = None

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len is {self.max_model_len}, it must be at least 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"--seed is {self.seed}, it must be from -2^63 to 2^64 - 1")

    def of_replica(self, num_replicas: int, num_cores: int, free_bytes: int) -> EngineConfig:
        """The configuration of each of several engines on a machine with so many cores and so much
        free memory: what is left to the machine is divided by their number.

        Raises:
            ConfigError: Something is for one engine only.
        """
        if num_replicas == 1:
            return self
        if self.recording is not None:
            raise ConfigError("--record is for one engine; use --data-parallel-size 1")
        num_threads = self.load.num_threads or max(1, num_cores // num_replicas)
        return replace(
            self,
            load=replace(self.load, num_threads=num_threads),
            memory_bytes=(self.memory_bytes or free_bytes) // num_replicas,
        )
