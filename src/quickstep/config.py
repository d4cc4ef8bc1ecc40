"""Configuration of the engine: small frozen sections, each field documented with its unit.

Each part of the engine receives only its own section. `EngineConfig` groups them for the command
line and `LLM(...)`. What an operator can set is declared at its field (`quickstep.option`); flags
and the arguments of `LLM` are derived from it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.option import AT_LEAST_1, POSITIVE, AllowedRange, Kind, Option, check_bounds

# by the names of flags, some of which are vLLM's
DTYPES = MappingProxyType(
    {
        "auto": "auto",
        "bfloat16": "bfloat16",
        "float16": "float16",
        "half": "float16",
        "float32": "float32",
        "float": "float32",
    }
)
KERNELS = ("auto", "reference", "native", "triton")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "int4", "fp8")
MAX_SPECULATIVE_TOKENS = 16
MAX_WAITING_OF_SERVER = 16_384  # sequences, unless `--max-waiting` is given
QUANTIZATIONS = ("int8", "int8-g32", "int4", "int4-g64", "int4-g128", "fp8")
# How long an engine's process may make no progress while requests wait.
STALL_S = 30.0

_T = TypeVar("_T")
_MAX_LORAS = 64  # in compute memory
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
    """What proposes draft tokens: `auto` is `suffix`, `mtp` where the model's own checkpoint has a
    prediction layer (on a CPU), and for each draft model what its checkpoint holds: `draft`,
    `medusa`, `eagle` or `eagle3`.
    """

    OFF = "off"
    AUTO = "auto"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT = "draft"
    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"


class SpeculativeSampling(enum.Enum):
    """When a draft is accepted: `exact` if it is the token that is sampled without drafts,
    `rejection` with the probability that it has (the standard; tokens then depend on the drafts).
    """

    EXACT = "exact"
    REJECTION = "rejection"


class CacheConfig(msgspec.Struct, frozen=True):
    """The paged KV cache."""

    block_size: Annotated[int, Option("tokens per KV block", Kind.COUNT, metavar="TOKENS")] = 16
    num_blocks: Annotated[
        int | None,
        Option(
            "number of KV blocks",
            Kind.COUNT,
            default_text="as many as fit in memory",
            bounds=AT_LEAST_1,
            other_arguments=("num_gpu_blocks_override",),
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        Option(
            "memory for the KV cache, such as 500M or 2GiB",
            Kind.BYTES,
            "--kv-cache-memory-bytes",
            default_text="the free memory",
        ),
    ] = None
    kv_dtype: Annotated[
        str,
        Option(
            "dtype of keys and values; int8 has a scale per token and head, int4 one and a minimum "
            "for each 32 elements, on CPUs only, fp8 (e4m3) none; auto is the dtype of the "
            "weights",
            flag="--kv-cache-dtype",
            choices=KV_DTYPES,
        ),
    ] = "auto"
    prefix_caching: Annotated[
        bool,
        Option(
            "keep full blocks of finished sequences for later prompts",
            flag="--enable-prefix-caching",
            default_text="on",
        ),
    ] = True
    kv_cache_dir: Annotated[
        str | None,
        Option(
            "directory in which KV blocks of prompts are stored, so that later prompts with the "
            "same prefix are answered sooner, also after a restart; only where reading is "
            "predicted to be faster than computing, and the output is the same",
            metavar="DIR",
            default_text="none",
        ),
    ] = None
    kv_cache_disk_bytes: Annotated[
        int | None,
        Option(
            "most bytes in --kv-cache-dir for each model, such as 20G; what was used least "
            "recently is removed",
            Kind.BYTES,
            default_text="10G",
            bounds=AT_LEAST_1,
        ),
    ] = None
    slot_save_path: Annotated[
        str | None,
        Option(
            "directory of the files that POST /slots/{id_slot}?action=save writes and "
            "action=restore reads: KV of a conversation, which its next turn continues",
            metavar="DIR",
            default_text="none",
        ),
    ] = None
    state_slots: Annotated[
        int | None,
        Option(
            "states of sequences in memory, of models with layers that keep one (linear attention, "
            "convolutions): one of each running sequence, the others for prefixes",
            Kind.COUNT,
            default_text="two for each sequence of a batch, as far as they fit",
            bounds=AllowedRange(least=2),
        ),
    ] = None
    state_interval: Annotated[
        int,
        Option(
            "tokens of a prompt between states that are kept for other prompts with the same "
            "prefix, of models with layers that keep a state",
            Kind.TOKENS,
            bounds=AT_LEAST_1,
        ),
    ] = 512

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size is {self.block_size}, it must be a power of two")
        if self.kv_dtype not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise ConfigError(f"--kv-cache-dtype is {self.kv_dtype!r}, it must be one of {known}")
        if self.kv_cache_disk_bytes is not None and self.kv_cache_dir is None:
            raise ConfigError("--kv-cache-disk-bytes needs --kv-cache-dir")
        if self.kv_cache_dir is not None and not self.prefix_caching:
            raise ConfigError(
                "--kv-cache-dir stores what the prefix cache has: leave "
                "--no-enable-prefix-caching out"
            )
        if self.slot_save_path is not None and not self.prefix_caching:
            raise ConfigError(
                "--slot-save-path stores what the prefix cache has: leave "
                "--no-enable-prefix-caching out"
            )
        check_bounds(self)


class KVTierConfig(msgspec.Struct, frozen=True):
    """A place outside of the block pool that keeps KV blocks (`core.resources.kv_tiers`).

    Attributes:
        block_bytes: Of a block in all layers.
        max_bytes: Of all that is kept.
        span_blocks: Most blocks that are kept together.
        may_save: False if another process writes there: nothing is added or removed.
        latency_s: What a restore takes in addition to reading its bytes.
    """

    block_bytes: int
    max_bytes: int
    span_blocks: int = 64
    may_save: bool = True
    latency_s: float = 2e-3


class SchedulerConfig(msgspec.Struct, frozen=True):
    """The size of a step, and how steps overlap.

    Attributes:
        max_model_len: Longest sequence in tokens, prompt and output; `EngineConfig.max_model_len`
            resolved for the model and the memory.
        max_waiting: Where `add` rejects a request; None for no limit.
        pipeline_depth: None: 2 where decode steps are CUDA graphs, else 1.
        policy: `core.policies` describes each.
        inter_token_target_s: `mixed` allows twice the time of the decode rows, if that is longer.
        num_speculative_tokens: Most drafts of a row; 0 turns speculation off. The engine takes it
            from its `SpeculationConfig`.
        num_stages: Of the pipeline that computes a step; a sequence gets no row while its last
            token is being computed, and each step has a part of those that decode. The engine takes
            it from its `LoadConfig`.
        transfers_kv: KV blocks come from and go to other engines, or files of slots
            (`core.resources.kv_transfers`).
        max_loras: LoRA adapters in compute memory (`core.resources.adapter_residency`); None if
            adapters are no resource: every adapter is always there. The engine takes it from its
            `LoRAConfig`.
        lora_bytes: What they take together; None for no limit.
        kv_tier: What keeps evicted KV blocks; None for nothing. The engine takes it from its
            `CacheConfig`.
        num_state_slots: Of sequences' states, in a model whose layers keep one; 0 in others. The
            engine takes it from its memory plan.
        state_interval: Tokens of a prompt between states that are saved on the way. The engine
            takes it from its `CacheConfig`.
        complete_prompts: A prompt is computed in one step, as an encoder needs it; a step has to
            have the tokens for the longest one.
    """

    max_num_seqs: Annotated[
        int, Option("largest number of sequences in a batch", Kind.COUNT, bounds=AT_LEAST_1)
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Option(
            "largest number of tokens in a step, prefill and decode",
            Kind.TOKENS,
            bounds=AT_LEAST_1,
        ),
    ] = 2048
    max_model_len: int = 4096
    max_waiting: Annotated[
        int | None,
        Option(
            "largest number of waiting sequences, beyond which the server responds 429; a request "
            "has n sequences",
            Kind.COUNT,
            default_text=f"{MAX_WAITING_OF_SERVER} for serve, otherwise no limit",
        ),
    ] = None
    pipeline_depth: Annotated[
        int | None,
        Option(
            "steps in flight; 2 plans the next while one runs",
            Kind.COUNT,
            default_text="2 with CUDA graphs, else 1",
            bounds=AT_LEAST_1,
        ),
    ] = None
    policy: Annotated[
        PolicyName,
        Option(
            "who is served first, and how a step is split between prefill and decode "
            "(default: {default}); docs/guide/scheduling.md describes each",
            flag="--scheduling-policy",
            argument="policy",
        ),
    ] = PolicyName.MIXED
    inter_token_target_s: Annotated[
        float,
        Option(
            "step time that the policy `mixed` limits prefill to", Kind.SECONDS, bounds=POSITIVE
        ),
    ] = 0.2
    priority_aging_s: Annotated[
        float,
        Option(
            "waiting time that raises a request by one level of priority",
            Kind.SECONDS,
            bounds=AllowedRange(above=0, is_finite=True),
        ),
    ] = 10.0
    batch_timeout_s: Annotated[
        float,
        Option(
            "how long the policies dynamic and length-grouped wait for a full batch",
            Kind.SECONDS,
            bounds=AllowedRange(least=0, is_finite=True),
        ),
    ] = 0.1
    num_speculative_tokens: int = 0
    num_stages: int = 1
    transfers_kv: bool = False
    use_kv_cache: Annotated[
        bool,
        Option(
            "compute all tokens again for each new one, to see what the KV cache saves; prefixes "
            "are not cached either, and the output is the same",
            flag="--no-kv-cache",
            turns_off=True,
            argument="use_kv_cache",
        ),
    ] = True
    max_loras: int | None = None
    lora_bytes: int | None = None
    kv_tier: KVTierConfig | None = None
    num_state_slots: int = 0
    state_interval: int = 512
    complete_prompts: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_model_len < 1:
            raise ConfigError(f"--max-model-len is {self.max_model_len}, it must be at least 1")
        if not self.use_kv_cache and self.num_in_flight > 1:
            raise ConfigError("--no-kv-cache needs --pipeline-depth 1: a step needs all tokens")

    @property
    def num_in_flight(self) -> int:
        """Most steps in flight: at least one for each stage of a pipeline."""
        return max(self.pipeline_depth or 1, self.num_stages)


_METHODS_WITH_MODEL = (
    SpeculationMethod.DRAFT,
    SpeculationMethod.MEDUSA,
    SpeculationMethod.EAGLE,
    SpeculationMethod.EAGLE3,
)


# How vLLM names `mtp` by families: `qwen3_next_mtp`, `deepseek_mtp`, ...
_OWN_LAYER = "_mtp"


class ProposerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What proposes draft tokens; the names of the fields are vLLM's.

    Attributes:
        method: What it is.
        model: With `draft`, a smaller checkpoint with the same tokenizer; with `medusa`, that of
            the heads; with `eagle` and `eagle3`, that of the layer; with `auto`, any of them.
        revision: Hub revision of `model`; None for the default branch.
        quantization: One of QUANTIZATIONS for a draft model; None keeps its dtype.
    """

    method: Annotated[
        SpeculationMethod,
        Option(
            "what proposes draft tokens, which the model checks several at a time: earlier "
            "occurrences of the last tokens in the prompt and outputs (suffix, ngram), a smaller "
            "model (draft), heads of the model (medusa), a layer that reads its hidden states "
            "(eagle, eagle3), the prediction layer of its own checkpoint (mtp), or nothing (off); "
            "the output is the same",
            flag="--speculative-method",
            default_text="{value}: suffix, what each --speculative-model is, and on a CPU mtp",
        ),
    ] = SpeculationMethod.AUTO
    model: Annotated[
        str | None,
        Option(
            "a smaller checkpoint with the same tokenizer, or one of Medusa heads or an EAGLE "
            "layer: a directory or a hub id; repeat it for several of different methods, of which "
            "each sequence has the drafts that are predicted to gain most",
            flag="--speculative-model",
            metavar="MODEL",
            repeats="append",
        ),
    ] = None
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
        num_speculative_tokens: How many a row gets is decided step by step (`core.drafts.control`).
        prompt_lookup_min: With `ngram`, the shortest match in tokens.
        prompt_lookup_max: With `ngram`, the longest match that is looked for, in tokens.
        suffix_decoding_max_tree_depth: With `suffix`, the longest match that is looked for.
        suffix_decoding_max_spec_factor: With `suffix`, the most drafts per token of the match.
        suffix_decoding_min_token_prob: With `suffix`, the least estimated probability of a draft.
        suffix_decoding_max_cached_tokens: With `suffix`, tokens of recent outputs that are kept to
            find matches in, over all tenants; 0 searches a sequence's own text only.
    """

    proposers: tuple[ProposerConfig, ...] = (ProposerConfig(),)
    num_speculative_tokens: Annotated[
        int,
        Option("most draft tokens of a sequence in a step; it gets as many as pay", Kind.COUNT),
    ] = 8
    sampling: Annotated[
        SpeculativeSampling,
        Option(
            "accept a draft if it is the token that is sampled without drafts (exact), or with "
            "the probability that it has (rejection: the output is as probable, but depends on "
            "the drafts and so on other requests, also with a seed; for comparison)",
            flag="--speculative-sampling",
        ),
    ] = SpeculativeSampling.EXACT
    tree_width: Annotated[
        int,
        Option(
            "most draft tokens of Medusa heads, an EAGLE layer or a prediction layer that follow "
            "the same token, in a tree; 1 for a chain",
            Kind.COUNT,
            "--speculative-tree-width",
        ),
    ] = 4
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
            if str(of_one.get("method")).endswith(_OWN_LAYER):
                of_one["method"] = SpeculationMethod.MTP.value
            proposer = _converted(of_one, ProposerConfig, where)
            if proposer.model is not None or proposer not in proposers:
                proposers.append(proposer)
            for name in one.keys() - of_one.keys():
                if shared.setdefault(name, one[name]) != one[name]:
                    raise ConfigError(
                        f"{source}: {name} is {shared[name]!r} and {one[name]!r}, but it holds for "
                        "all proposers; give one value"
                    )
        is_on = [proposer for proposer in proposers if proposer.method is not SpeculationMethod.OFF]
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
        model: A directory, a `.gguf` file, a hub id (with `:Q4_K_M` for a GGUF file), `smollm2` or
            `demo`.
        kernels: `auto` is resolved in `ops.resolve`.
        offline: The environment variable HF_HUB_OFFLINE works too.
        pin_threads: The calling thread is not pinned.
    """

    model: str = "demo"
    revision: Annotated[str | None, Option("hub revision", default_text="the default branch")] = (
        None
    )
    dtype: Annotated[
        str,
        Option(
            "dtype of weights and activations; auto uses the checkpoint's",
            choices=tuple(DTYPES),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Option(
            "quantize the weights while loading, and compute in integers, or in e4m3 for fp8",
            choices=QUANTIZATIONS,
            default_text="do not",
        ),
    ] = None
    device: Annotated[
        str,
        Option("auto, cpu, cuda, or cuda:N; auto is a GPU if there is one", metavar="DEVICE"),
    ] = "auto"
    kernels: Annotated[
        str,
        Option(
            "PyTorch's ops (reference), those compiled for CPUs (native), or Triton's; auto is "
            "native on a CPU and reference on a GPU",
            choices=KERNELS,
        ),
    ] = "auto"
    offline: Annotated[bool, Option("never use the network")] = False
    num_threads: Annotated[
        int | None,
        Option(
            "CPU threads",
            Kind.COUNT,
            "--threads",
            default_text="one per core that the process may use",
            bounds=AllowedRange(1, 1024),
            argument="num_threads",
        ),
    ] = None
    pin_threads: Annotated[
        bool,
        Option(
            "pin each kernel thread to its own CPU, one per physical core first; only for "
            "machines that run nothing else"
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        Option(
            "processes that compute every step together, each with a part of the weights and of "
            "--threads, or with a GPU of its own from --device on; same bits",
            Kind.COUNT,
            aliases=("-tp", "--tp-size", "--tp"),
            bounds=AllowedRange(1, 64),
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option(
            "processes that each have some of the layers, and compute different steps at the same "
            "time, each with a part of --threads; same bits",
            Kind.COUNT,
            aliases=("-pp", "--pp-size", "--pp"),
            bounds=AllowedRange(1, 64),
        ),
    ] = 1

    packed_cache_bytes: Annotated[
        int,
        Option(
            "most bytes of packed weights in the cache directory, from where a later start of the "
            "same model on a CPU maps them, such as 20G; what was used least recently is removed; "
            "0 keeps none",
            Kind.BYTES,
            bounds=AllowedRange(0),
        ),
    ] = 16 << 30

    @property
    def num_ranks(self) -> int:
        """Processes that have parts of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        check_bounds(self)
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
        max_cpu_loras: So many more than `max_loras` stay in host memory after an eviction. None for
            `max_loras`.
        directory: An adapter is opened when a request first names it.
    """

    modules: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "adapters of PEFT to load at the start, also as JSON like vLLM's: "
            """'{"name": "NAME", "path": "DIR"}'; a request selects one by `model: NAME`""",
            flag="--lora-modules",
            metavar="NAME=DIR",
            argument=None,
        ),
    ] = ()
    max_loras: Annotated[
        int,
        Option(
            "most adapters in compute memory at the same time; others are loaded when a request "
            "names them",
            Kind.COUNT,
            default_text="{value}, or --max-cpu-loras if that is less",
            bounds=AT_LEAST_1,
        ),
    ] = _MAX_LORAS
    max_lora_rank: Annotated[
        int,
        Option("largest rank of an adapter", Kind.COUNT, metavar="RANK", bounds=AT_LEAST_1),
    ] = 256
    max_cpu_loras: Annotated[
        int | None,
        Option(
            "most adapters in memory at the same time, those in compute memory included",
            Kind.COUNT,
            default_text="--max-loras",
        ),
    ] = None
    directory: Annotated[
        str | None,
        Option(
            "each of its folders is an adapter, which is loaded when a request first names it",
            flag="--lora-dir",
            metavar="DIR",
        ),
    ] = None
    pinned: Annotated[
        tuple[str, ...],
        Option(
            "adapters that stay in compute memory once they are there",
            flag="--lora-pin",
            metavar="NAME",
        ),
    ] = ()
    memory_bytes: Annotated[
        int | None,
        Option(
            "what adapters may take in compute memory together",
            Kind.BYTES,
            "--lora-memory-bytes",
            default_text="the --max-loras largest of those that are known at the start",
            bounds=AT_LEAST_1,
        ),
    ] = None
    allowed_dirs: Annotated[
        tuple[str, ...],
        Option(
            "where POST /v1/load_lora_adapter may load from, besides --lora-dir",
            flag="--lora-allowed-dirs",
            metavar="DIR",
            argument=None,
        ),
    ] = ()
    dtype: Annotated[
        str,
        Option(
            "how adapters are held: auto is the model's dtype; int8 takes half of the memory and "
            "reads, and rounds the weights",
            flag="--lora-dtype",
            choices=("auto", "int8"),
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "int8"):
            raise ConfigError(f"--lora-dtype is {self.dtype!r}, it must be auto or int8")
        check_bounds(self)
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
        schema_bytes: In UTF-8, also of all choices together.
        regex_bytes: In UTF-8.
        chat_template: The text of a chat template in place of the checkpoint's.
    """

    schema_bytes: Annotated[
        int,
        Option(
            "size of a JSON schema or a grammar",
            Kind.BYTES,
            "--max-schema-bytes",
            metavar="N",
            bounds=POSITIVE,
            argument=None,
        ),
    ] = 2 * 1024 * 1024
    schema_depth: Annotated[
        int,
        Option(
            "nesting depth of a JSON schema",
            Kind.COUNT,
            "--max-schema-depth",
            bounds=POSITIVE,
            argument=None,
        ),
    ] = 32
    regex_bytes: Annotated[
        int,
        Option(
            "size of a regular expression",
            Kind.BYTES,
            "--max-regex-bytes",
            metavar="N",
            bounds=POSITIVE,
            argument=None,
        ),
    ] = 2 * 1024
    grammar_s: Annotated[
        float,
        Option(
            "CPU time to compile a grammar, in seconds",
            Kind.SECONDS,
            "--grammar-timeout-s",
            metavar="N",
            bounds=POSITIVE,
            argument=None,
        ),
    ] = 2.0
    template_s: Annotated[
        float,
        Option(
            "CPU time to render a chat template, in seconds",
            Kind.SECONDS,
            "--template-timeout-s",
            metavar="N",
            bounds=POSITIVE,
            argument=None,
        ),
    ] = 1.0
    chat_template: Annotated[
        str | None,
        Option(
            "a chat template in place of the model's: a file, or the template itself",
            aliases=("--chat-template-file",),
            metavar="FILE",
        ),
    ] = None
    content_format: Annotated[
        ContentFormat,
        Option(
            "what the chat template reads of a message's content: text (string) or a list of "
            "parts (openai); auto finds out for each role",
            flag="--chat-template-content-format",
        ),
    ] = ContentFormat.AUTO

    def __post_init__(self) -> None:
        check_bounds(self)


_UNREAD = (
    "that a client may leave unread; its request is paused at the limit until half of it is read"
)


class StreamConfig(msgspec.Struct, frozen=True):
    """Limits of unread output in a request's stream; beyond either, the request is paused.

    It continues when the reader has reduced both to half of the limit.

    Attributes:
        max_unread_deltas: Deltas of all its sequences together.
        max_unread_bytes: Their approximate size: text, tokens, logprobs.
    """

    max_unread_deltas: Annotated[
        int,
        Option(f"chunks of output {_UNREAD}", Kind.COUNT, bounds=AT_LEAST_1, argument=None),
    ] = 256
    max_unread_bytes: Annotated[
        int,
        Option(f"bytes of output {_UNREAD}", Kind.BYTES, bounds=AT_LEAST_1, argument=None),
    ] = 1024 * 1024

    def __post_init__(self) -> None:
        check_bounds(self)


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


class BackendName(enum.Enum):
    """What runs the engines of `--data-parallel-size`."""

    MP = "mp"
    RAY = "ray"


class ReplicaConfig(msgspec.Struct, frozen=True):
    """The engines that serve one model."""

    num_replicas: Annotated[
        int,
        Option(
            "engines that serve the model, each in a process of its own with its part of the "
            "cores and of the memory",
            Kind.INTEGER,
            "--data-parallel-size",
            aliases=("-dp", "--dp-size", "--dp"),
            bounds=AllowedRange(1, 64),
            argument=None,
        ),
    ] = 1
    router: Annotated[
        RouterName,
        Option(
            "which engine gets a request: the one that is predicted to answer first, in turn, the "
            "one with the fewest requests, or the one that had the longest part of the prompt",
            argument=None,
        ),
    ] = RouterName.PREDICTED
    max_moves: Annotated[
        int,
        Option(
            "how often in a row, without a new token, a request continues on another engine when "
            "its engine's process has ended",
            Kind.INTEGER,
            bounds=AllowedRange(least=0),
            argument=None,
        ),
    ] = 3
    max_deaths: Annotated[
        int,
        Option(
            "how many engine processes may end while they compute a request, in a row without a "
            "new token, before it is ended because it may be the cause; of several such requests "
            "each is tried once more, without the others",
            Kind.INTEGER,
            flag="--max-engine-deaths",
            bounds=AllowedRange(least=1),
            argument=None,
        ),
    ] = 2
    record_routing: Annotated[
        Path | None,
        Option(
            "write which engine got each request, and what was known of the engines, to a file "
            "that `quickstep replay` repeats; no text and no token",
            Kind.PATH,
            default_text="none",
            argument=None,
        ),
    ] = None

    num_prefill: Annotated[
        int,
        Option(
            "engines that compute the prompts of requests which --decode engines then continue, "
            "where that is predicted to be better; they have their KV from there",
            Kind.INTEGER,
            "--prefill",
            bounds=AllowedRange(0, 64),
            argument=None,
        ),
    ] = 0
    num_decode: Annotated[
        int,
        Option(
            "engines that continue requests after their first token, and serve complete ones",
            Kind.INTEGER,
            "--decode",
            bounds=AllowedRange(0, 64),
            argument=None,
        ),
    ] = 0
    backend: Annotated[
        BackendName,
        Option(
            "where the engines run: in processes of this machine (mp), or on the nodes of a Ray "
            "cluster, each with --threads CPUs and, on a GPU, with one per rank (ray)",
            flag="--data-parallel-backend",
            aliases=("-dpb",),
            argument=None,
        ),
    ] = BackendName.MP
    ray_address: Annotated[
        str,
        Option(
            "the Ray cluster of --data-parallel-backend ray, of which this machine is a node; auto "
            "is the one that runs here",
            metavar="HOST:PORT",
            argument=None,
        ),
    ] = "auto"

    @property
    def num_engines(self) -> int:
        """All of them; those that compute prompts are the first `num_prefill`."""
        return self.num_prefill + self.num_decode or self.num_replicas

    def __post_init__(self) -> None:
        check_bounds(self)
        if bool(self.num_prefill) != bool(self.num_decode):
            raise ConfigError("--prefill and --decode need each other: name both numbers")
        if self.num_prefill and self.num_replicas > 1:
            raise ConfigError(
                "--prefill and --decode are the engines: leave --data-parallel-size out"
            )
        if self.backend is not BackendName.RAY:
            if self.ray_address != "auto":
                raise ConfigError("--ray-address needs --data-parallel-backend ray")
        elif self.num_prefill:
            raise ConfigError(
                "--prefill and --decode are engines of this machine: leave "
                "--data-parallel-backend ray out"
            )


class LinkConfig(msgspec.Struct, frozen=True):
    """Connections between servers and engines on other hosts.

    Attributes:
        engines: Of a server: the addresses of its engines, separated by commas; None has engines of
            its own.
        listen: Of an engine: where servers connect.
        token_file: What both know; None for the environment variable.
        reuse_port: Of a server: others may listen on its port.
    """

    engines: Annotated[
        str | None,
        Option(
            "addresses of engines that listen (`quickstep engine`), on which this server runs "
            "MODEL; it then loads no weights itself",
            metavar="HOST:PORT,HOST:PORT",
            argument=None,
        ),
    ] = None
    listen: Annotated[
        str,
        Option(
            "address on which servers connect; port 0 chooses a free one",
            metavar="HOST:PORT",
            argument=None,
        ),
    ] = "127.0.0.1:8100"
    token_file: Annotated[
        Path | None,
        Option(
            "file with the token that servers and engines have in common, which only its user may "
            "read",
            Kind.PATH,
            "--engine-token-file",
            default_text="the environment variable QUICKSTEP_ENGINE_TOKEN",
            argument=None,
        ),
    ] = None
    reuse_port: Annotated[
        bool,
        Option(
            "share --port with other servers of the same --engines: the kernel gives each "
            "connection to one of them; stored responses, files and rate limits are each server's",
            argument=None,
        ),
    ] = False


class EngineConfig(msgspec.Struct, frozen=True):
    """All sections; the command line and `LLM(...)` fill them in.

    Attributes:
        streams: None never pauses a request for a slow reader.
        lora: None if requests have no adapters.
        recording: None records nothing.
    """

    load: LoadConfig = msgspec.field(default_factory=LoadConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    speculation: Annotated[
        SpeculationConfig,
        Option(
            "these as a JSON object, with the settings of each method, or a list of objects for "
            "several proposers; docs/guide/speculation.md lists them",
            Kind.JSON,
            "--speculative-config",
        ),
    ] = msgspec.field(default_factory=SpeculationConfig)
    inputs: InputConfig = msgspec.field(default_factory=InputConfig)
    streams: StreamConfig | None = msgspec.field(default_factory=StreamConfig)
    max_model_len: Annotated[
        int | None,
        Option(
            "longest sequence, prompt and output together, such as 8192 or 8k",
            Kind.TOKENS,
            default_text="the model's limit, or less if the KV cache is smaller",
            bounds=AT_LEAST_1,
        ),
    ] = None
    allow_long_context: Annotated[
        bool,
        Option(
            "allow --max-model-len above the model's limit: positions are scaled (YaRN), which "
            "may reduce quality"
        ),
    ] = False
    seed: Annotated[
        int | None,
        Option(
            "makes the seeds of requests without one reproducible",
            Kind.INTEGER,
            default_text="random",
        ),
    ] = None
    memory_bytes: Annotated[
        int | None,
        Option(
            "limit of the engine's memory, weights included",
            Kind.BYTES,
            default_text="the free memory",
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        Option("run the model op by op instead of replaying captured steps; same bits, slower"),
    ] = False
    lora: LoRAConfig | None = None
    recording: RecordingConfig | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
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
