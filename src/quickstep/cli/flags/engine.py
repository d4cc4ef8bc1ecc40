"""The flags of an engine, shared by the commands that open one. Names are vLLM's."""

from __future__ import annotations

import argparse
from typing import Any

from quickstep.cli.flags.foreign import FOREIGN_FLAGS
from quickstep.cli.flags.parsing import (
    Parser,
    bytes_size,
    json_objects,
    positive_int,
    token_count,
)
from quickstep.config import (
    KERNELS,
    KV_DTYPES,
    QUANTIZATIONS,
    CacheConfig,
    ContentFormat,
    EngineConfig,
    LoadConfig,
    PolicyName,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
    SpeculativeSampling,
)
from quickstep.errors import ConfigError

_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}


def add_model(
    parser: argparse.ArgumentParser,
    what: str = "a directory, a .gguf file, a Hugging Face id, or demo (default)",
    default: str | None = LoadConfig().model,
) -> None:
    """Add `MODEL` and `--model` to any command that has a model; as in vLLM, either names it.

    `what` describes it. Without a `default` one of both is required.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", help=what)
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL")
    parser.set_defaults(default_model=default)


def model_of(args: argparse.Namespace) -> str:
    """The model of `MODEL` or `--model`. Raises ConfigError for two different names, or none."""
    if args.model and args.model_flag and args.model != args.model_flag:
        raise ConfigError(f"MODEL is {args.model} and --model is {args.model_flag}; give one")
    model: str | None = args.model or args.model_flag or args.default_model
    if model is None:
        raise ConfigError(f"no model is named; see {args.parser.prog} --help")
    return model


def add_engine_flags(parser: Parser) -> None:
    """Add the flags of `EngineConfig` except the model's name, which differs between commands.

    The command then answers the flags of other engines too.
    """
    parser.foreign_flags = FOREIGN_FLAGS
    _add_load_flags(parser.add_argument_group("model"))
    _add_cache_flags(parser.add_argument_group("KV cache"))
    _add_scheduler_flags(parser.add_argument_group("scheduler"))
    _add_speculation_flags(parser.add_argument_group("speculative decoding"))


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    defaults = LoadConfig()
    group.add_argument("--revision", help="hub revision (default: the default branch)")
    group.add_argument(
        "--dtype",
        choices=list(_DTYPES),
        default=defaults.dtype,
        help="dtype of weights and activations; auto uses the checkpoint's (default: %(default)s)",
    )
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantize the weights while loading, and compute in integers, or in e4m3 for fp8 "
        "(default: do not)",
    )
    group.add_argument(
        "--device",
        metavar="DEVICE",
        default=defaults.device,
        help="auto, cpu, cuda, or cuda:N; auto is a GPU if there is one (default: %(default)s)",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default=defaults.kernels,
        help="PyTorch's ops (reference), those compiled for CPUs (native), or Triton's; auto is "
        "native on a CPU and reference on a GPU (default: %(default)s)",
    )
    group.add_argument("--offline", action="store_true", help="never use the network")
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="run the model op by op instead of replaying captured steps; same bits, slower",
    )
    group.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="CPU threads (default: one per core that the process may use)",
    )
    group.add_argument(
        "--pin-threads",
        action="store_true",
        help="pin each kernel thread to its own CPU, one per physical core first; only for "
        "machines that run nothing else",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        "--tp-size",
        "--tp",
        type=positive_int,
        default=defaults.tensor_parallel_size,
        metavar="N",
        help="processes that compute every step together, each with a part of the weights and of "
        "--threads; same bits (default: %(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        type=token_count,
        metavar="TOKENS",
        help="longest sequence, prompt and output together, such as 8192 or 8k (default: the "
        "model's limit, or less if the KV cache is smaller)",
    )
    group.add_argument(
        "--allow-long-context",
        action="store_true",
        help="allow --max-model-len above the model's limit: positions are scaled (YaRN), which "
        "may reduce quality",
    )


def _add_cache_flags(group: argparse._ArgumentGroup) -> None:
    defaults = CacheConfig()
    group.add_argument(
        "--block-size",
        type=positive_int,
        default=defaults.block_size,
        metavar="TOKENS",
        help="tokens per KV block (default: %(default)s)",
    )
    group.add_argument(
        "--num-blocks",
        type=positive_int,
        metavar="N",
        help="number of KV blocks (default: as many as fit in memory)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=bytes_size,
        metavar="SIZE",
        help="memory for the KV cache, such as 500M or 2GiB (default: the free memory)",
    )
    group.add_argument(
        "--memory-bytes",
        type=bytes_size,
        metavar="SIZE",
        help="limit of the engine's memory, weights included (default: the free memory)",
    )
    add_kv_cache_dtype(group)
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=defaults.prefix_caching,
        help="keep full blocks of finished sequences for later prompts (default: on)",
    )


def add_kv_cache_dtype(group: argparse._ActionsContainer) -> None:
    """Add `--kv-cache-dtype`."""
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_DTYPES,
        default=CacheConfig().kv_dtype,
        help="dtype of keys and values; int8 has a scale per token and head, fp8 (e4m3) none; auto "
        "is the dtype of the weights (default: %(default)s)",
    )


def _add_scheduler_flags(group: argparse._ArgumentGroup) -> None:
    defaults = SchedulerConfig()
    group.add_argument(
        "--max-num-seqs",
        type=positive_int,
        default=defaults.max_num_seqs,
        metavar="N",
        help="largest number of sequences in a batch (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=token_count,
        default=defaults.max_num_batched_tokens,
        metavar="TOKENS",
        help="largest number of tokens in a step, prefill and decode (default: %(default)s)",
    )
    group.add_argument(
        "--max-waiting",
        type=positive_int,
        metavar="N",
        help="largest number of waiting sequences, beyond which the server responds 429; a request "
        "has n sequences (default: 16384 for serve, otherwise no limit)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=[policy.value for policy in PolicyName],
        default=defaults.policy.value,
        help="who is served first, and how a step is split between prefill and decode "
        "(default: %(default)s); docs/guide/scheduling.md describes each",
    )
    group.add_argument(
        "--batch-timeout-s",
        type=float,
        default=defaults.batch_timeout_s,
        metavar="SECONDS",
        help="how long the policies dynamic and length-grouped wait for a full batch (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--no-kv-cache",
        action="store_true",
        help="compute all tokens again for each new one, to see what the KV cache saves; prefixes "
        "are not cached either, and the output is the same",
    )
    group.add_argument(
        "--pipeline-depth",
        type=positive_int,
        default=defaults.pipeline_depth,
        metavar="N",
        help="steps in flight; 2 plans the next while one runs (default: 2 with CUDA graphs, "
        "else 1)",
    )
    group.add_argument(
        "--inter-token-target-s",
        type=float,
        default=defaults.inter_token_target_s,
        metavar="SECONDS",
        help="step time that the policy `mixed` limits prefill to (default: %(default)s)",
    )
    group.add_argument(
        "--priority-aging-s",
        type=float,
        default=defaults.priority_aging_s,
        metavar="SECONDS",
        help="waiting time that raises a request by one level of priority (default: %(default)s)",
    )


def _add_speculation_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of speculative decoding; the names are vLLM's."""
    defaults = SpeculationConfig()
    group.add_argument(
        "--speculative-method",
        choices=[method.value for method in SpeculationMethod],
        help="what proposes draft tokens, which the model checks several at a time: earlier "
        "occurrences of the last tokens in the prompt and outputs (suffix, ngram), a smaller model "
        "(draft), heads of the model (medusa), a layer that reads its hidden states (eagle, "
        "eagle3), or nothing (off); the output is the same (default: "
        f"{SpeculationMethod.AUTO.value}: suffix, and what each --speculative-model is)",
    )
    group.add_argument(
        "--speculative-model",
        action="append",
        metavar="MODEL",
        help="a smaller checkpoint with the same tokenizer, or one of Medusa heads or an EAGLE "
        "layer: a directory or a hub id; repeat it for several of different methods, of which "
        "each sequence has the drafts that are predicted to gain most",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=positive_int,
        metavar="N",
        help="most draft tokens of a sequence in a step; it gets as many as pay (default: "
        f"{defaults.num_speculative_tokens})",
    )
    group.add_argument(
        "--speculative-tree-width",
        type=positive_int,
        metavar="N",
        help="most draft tokens of Medusa heads or an EAGLE layer that follow the same token, in a "
        f"tree; 1 for a chain (default: {defaults.tree_width})",
    )
    group.add_argument(
        "--speculative-sampling",
        choices=[one.value for one in SpeculativeSampling],
        help="accept a draft if it is the token that is sampled without drafts (exact), or with "
        "the probability that it has (rejection: the output is as probable, but depends on the "
        "drafts and so on other requests, also with a seed; for comparison) (default: "
        f"{defaults.sampling.value})",
    )
    group.add_argument(
        "--speculative-config",
        type=json_objects,
        metavar="JSON",
        help="these as a JSON object, with the settings of each method, or a list of objects for "
        "several proposers; docs/guide/speculation.md lists them",
    )


def _speculation(args: argparse.Namespace) -> SpeculationConfig:
    given = {} if args.speculative_config is None else args.speculative_config
    objects = [dict(one) for one in given] if isinstance(given, list) else [dict(given)]
    for name, value in (
        ("method", args.speculative_method),
        ("model", args.speculative_model),
        ("num_speculative_tokens", args.num_speculative_tokens),
        ("tree_width", args.speculative_tree_width),
        ("sampling", args.speculative_sampling),
    ):
        if value is None:
            continue
        if any(name in one for one in objects):
            raise ConfigError(f"{name} is given twice: in --speculative-config and by its flag")
        if name in ("method", "model") and isinstance(given, list):
            raise ConfigError(
                f"--speculative-config is a list of proposers; give --speculative-{name} as the "
                f"{name} of one of them"
            )
        values = value if name == "model" else [value]
        objects = [{**one, name: each} for each in values for one in objects]
    fields = objects if isinstance(given, list) or len(objects) > 1 else objects[0]
    return SpeculationConfig.of_fields(fields, "--speculative-config")


def engine_config(args: argparse.Namespace, model: str, seed: int | None = None) -> EngineConfig:
    """The flags as configuration. Raises ConfigError."""
    return EngineConfig(
        load=LoadConfig(
            model=model,
            revision=args.revision,
            dtype=_DTYPES[args.dtype],
            device=args.device,
            kernels=args.kernels,
            offline=args.offline,
            num_threads=args.threads,
            pin_threads=args.pin_threads,
            quantization=args.quantization,
            tensor_parallel_size=args.tensor_parallel_size,
        ),
        cache=CacheConfig(
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            kv_cache_bytes=args.kv_cache_memory_bytes,
            prefix_caching=args.enable_prefix_caching,
            kv_dtype=args.kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_waiting=args.max_waiting,
            pipeline_depth=args.pipeline_depth,
            policy=PolicyName(args.scheduling_policy),
            inter_token_target_s=args.inter_token_target_s,
            priority_aging_s=args.priority_aging_s,
            batch_timeout_s=args.batch_timeout_s,
            use_kv_cache=not args.no_kv_cache,
        ),
        speculation=_speculation(args),
        max_model_len=args.max_model_len,
        allow_long_context=args.allow_long_context,
        seed=seed,
        memory_bytes=args.memory_bytes,
        enforce_eager=args.enforce_eager,
    )


def add_format_flags(group: argparse._ActionsContainer) -> None:
    """Add `--tool-call-parser` and `--reasoning-parser`; the names are vLLM's."""
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of tool calls: hermes, llama3_json, pythonic, mistral, deepseek_v3, granite, "
        "harmony, or none (default: detected in the chat template)",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of reasoning: think, mistral, harmony, or none (default: detected in the chat "
        "template)",
    )


def add_template_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of chat templates; the names are vLLM's, and llama.cpp's second one."""
    group.add_argument(
        "--chat-template",
        "--chat-template-file",
        metavar="FILE",
        help="a chat template in place of the model's: a file, or the template itself",
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=[known.value for known in ContentFormat],
        default=ContentFormat.AUTO.value,
        help="what the chat template reads of a message's content: text (string) or a list of "
        "parts (openai); auto finds out for each role (default: %(default)s)",
    )


def template_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of chat templates as fields of `InputConfig`. Raises ConfigError."""
    fields: dict[str, Any] = {"content_format": ContentFormat(args.chat_template_content_format)}
    if args.chat_template is not None:
        from quickstep.text.chat_template import read_template

        fields["chat_template"] = read_template(args.chat_template)
    return fields
