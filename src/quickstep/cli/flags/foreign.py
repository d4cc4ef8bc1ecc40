"""Flags of vLLM, llama.cpp and SGLang that this engine does not have, and what to do instead.

`Parser` reads the table for flags that a command does not know. A value that asks for what holds
here anyway is accepted; any other flag of the table is refused with its sentence. The reference
page of flags and the table in README are written from it (`tools/write_flags_reference.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

VLLM, LLAMA_CPP, SGLANG = "vLLM", "llama.cpp", "SGLang"
_VLLM, _LLAMA, _SGLANG, _BOTH = (VLLM,), (LLAMA_CPP,), (SGLANG,), (VLLM, SGLANG)
_NUMBER = re.compile(r"-?\d+(\.\d*)?")
_REQUESTS = "requests set it, and the checkpoint's generation_config.json the defaults"
_TEXT_ONLY = "models are text only"
_ONE_DEVICE = (
    "--tensor-parallel-size divides a model, on CPUs --pipeline-parallel-size, too; for a model on "
    "each GPU, start a server for each, with --device cuda:N"
)
_FORMATS = "formats are recognized; --quantization quantizes while loading"
_POSITIONS = "--max-model-len and --allow-long-context scale the positions"


class ForeignFlag(msgspec.Struct, frozen=True):
    """One flag of other engines, with all of its spellings.

    Attributes:
        names: Spellings; the first is the usual one. Flags with one answer share a row.
        engines: Whose flag it is.
        ours: The flag to give instead; `{value}` is the given value. "" for none.
        why: What to do, or to know, in half a sentence.
        otherwise: The same for a command without the flag `ours`.
        takes: The placeholder of its value; "" without one, in brackets if it may be left out.
        accepted: Values that ask for what holds here anyway; "" is the flag without a value.
        becomes: Values that are accepted as arguments of ours.
        topic: What README's table calls it; "" if it is not in there.
    """

    names: tuple[str, ...]
    engines: tuple[str, ...]
    ours: str = ""
    why: str = ""
    otherwise: str = ""
    takes: str = ""
    accepted: tuple[str, ...] = ()
    becomes: Mapping[str, tuple[str, ...]] = {}
    topic: str = ""

    def replacement(self, value: str | None) -> tuple[str, ...] | None:
        """The arguments of ours for a value, none if it holds anyway; None if it is refused."""
        key = "" if value is None else value.lower()
        return () if key in self.accepted else self.becomes.get(key)

    def has_value(self, following: str | None) -> bool:
        """Whether the argument that follows is the flag's value."""
        if following is None or not self.takes:
            return False
        if self.takes.startswith("["):
            return following in self.takes.strip("[]").split("|")
        return not following.startswith("-") or _NUMBER.fullmatch(following) is not None

    def refusal(self, name: str, value: str | None, known: Collection[str]) -> str:
        """The sentence for a command that has the flags `known`."""
        given = name if value is None else f"{name} {value}"
        return f"{given} is a flag of {' or '.join(self.engines)}; {self._answer(value, known)}"

    def _answer(self, value: str | None, known: Collection[str]) -> str:
        flag = self.ours.partition(" ")[0]
        if flag in known:
            ours = self.ours.replace("{value}", value or self.takes.strip("[]") or "N")
            return f"give {ours}: {self.why}" if self.why else f"give {ours}"
        return self.otherwise or self.why or f"`quickstep serve` has {flag}"


def foreign_flag(name: str, flags: Sequence[ForeignFlag]) -> ForeignFlag | None:
    """The row of a flag. As in vLLM, `_` in a long name is `-`."""
    usual = name.replace("_", "-")
    return next((flag for flag in flags if usual in flag.names or name in flag.names), None)


def _row(
    names: str,
    engines: tuple[str, ...],
    ours: str = "",
    why: str = "",
    *,
    otherwise: str = "",
    takes: str = "",
    accepted: str | None = None,
    becomes: Mapping[str, tuple[str, ...]] = {},
    topic: str = "",
) -> ForeignFlag:
    """Names and accepted values are separated by spaces; `accepted=""` is the flag alone."""
    values = () if accepted is None else tuple(accepted.split(" "))
    return ForeignFlag(
        tuple(names.split()), engines, ours, why, otherwise, takes, values, becomes, topic
    )


_MODEL = (
    _row("-m", _LLAMA, "--model {value}", takes="FILE"),
    _row("--model-path", _SGLANG, "--model {value}", takes="MODEL"),
    _row(
        "--hf-repo -hf -hfr",
        _LLAMA,
        "--model {value}",
        "tags of GGUF files are read as there",
        takes="REPO",
    ),
    _row(
        "--model-url -mu --hf-file -hff --docker-repo -dr",
        _LLAMA,
        why="download the file, and give its path as MODEL",
        takes="NAME",
    ),
    _row(
        "--hf-token -hft", (*_LLAMA, *_VLLM), why="set HF_TOKEN in the environment", takes="TOKEN"
    ),
    _row(
        "--tokenizer --tokenizer-path", _BOTH, why="the checkpoint's tokenizer is used", takes="M"
    ),
    _row(
        "--tokenizer-mode",
        _BOTH,
        why="the checkpoint's tokenizer.json is used",
        takes="MODE",
        accepted="auto hf fast",
    ),
    _row(
        "--skip-tokenizer-init",
        _BOTH,
        why="prompts may be token ids, and return_token_ids is a request's field",
    ),
    _row("--tokenizer-revision --code-revision", _VLLM, "--revision {value}", takes="REVISION"),
    _row("--download-dir", _BOTH, why="HF_HOME is the folder of downloaded models", takes="DIR"),
    _row(
        "--load-format",
        _BOTH,
        why=_FORMATS,
        takes="FORMAT",
        accepted="auto safetensors gguf",
    ),
    _row("--config-format", _VLLM, why=_FORMATS, takes="FORMAT", accepted="auto hf"),
    _row(
        "--model-impl",
        _BOTH,
        why="native kernels run what they can, and transformers the rest",
        takes="NAME",
        accepted="auto",
    ),
    _row(
        "--runner --task --convert",
        _VLLM,
        why="a model generates and embeds, at /v1/embeddings",
        takes="NAME",
        accepted="auto generate none embed",
    ),
    _row(
        "--is-embedding --embedding --embeddings",
        (*_LLAMA, *_SGLANG),
        why="drop it; /v1/embeddings is always there",
    ),
    _row(
        "--trust-remote-code",
        _BOTH,
        why="code in a checkpoint is never run; drop it, and an architecture that needs it is "
        "refused by name",
    ),
    _row(
        "--hf-overrides --hf-config-path --json-model-override-args --override-kv",
        (*_BOTH, *_LLAMA),
        why="edit config.json in a copy of the checkpoint",
        takes="VALUE",
    ),
    _row(
        "--model-loader-extra-config --ignore-patterns --max-parallel-loading-workers",
        _VLLM,
        why="drop it; weights are read in one pass",
        takes="VALUE",
    ),
    _row("--check-tensors", _LLAMA, why="drop it; sizes and types are always checked"),
    _row("--generation-config", _VLLM, why=_REQUESTS, takes="PATH", accepted="auto"),
    _row("--override-generation-config", _VLLM, why=_REQUESTS, takes="JSON"),
    _row("--alias -a", _LLAMA, "--served-model-name {value}", takes="NAME", topic="model's name"),
)

_CONTEXT_AND_BATCH = (
    _row(
        "--ctx-size -c", _LLAMA, "--max-model-len {value}", takes="N", accepted="0", topic="context"
    ),
    _row("--context-length", _SGLANG, "--max-model-len {value}", takes="N", topic="context"),
    _row(
        "--rope-scaling --rope-theta --rope-scale --rope-freq-base --rope-freq-scale "
        "--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
        (*_VLLM, *_LLAMA),
        why=_POSITIONS,
        takes="VALUE",
    ),
    _row(
        "--parallel -np",
        _LLAMA,
        "--max-num-seqs {value}",
        takes="N",
        accepted="-1",
        topic="sequences in a batch",
    ),
    _row(
        "--max-running-requests",
        _SGLANG,
        "--max-num-seqs {value}",
        takes="N",
        topic="sequences in a batch",
    ),
    _row(
        "--batch-size -b --ubatch-size -ub",
        _LLAMA,
        "--max-num-batched-tokens {value}",
        takes="N",
        topic="tokens in a step",
    ),
    _row(
        "--chunked-prefill-size --max-prefill-tokens",
        _SGLANG,
        "--max-num-batched-tokens {value}",
        takes="N",
        topic="tokens in a step",
    ),
    _row("--enable-chunked-prefill --enable-mixed-chunk", _BOTH, accepted=""),
    _row(
        "--no-enable-chunked-prefill",
        _VLLM,
        "--max-num-batched-tokens N",
        "prompts are computed in chunks of so many tokens",
    ),
    _row("--cont-batching -cb", _LLAMA, accepted=""),
    _row(
        "--no-cont-batching -nocb",
        _LLAMA,
        "--scheduling-policy static",
        "a new batch then begins when the last one has ended",
    ),
    _row(
        "--schedule-policy",
        _SGLANG,
        "--scheduling-policy NAME",
        "--help lists the names",
        takes="NAME",
    ),
    _row(
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
        "--schedule-conservativeness --scheduler-delay-factor --scheduler-cls",
        _BOTH,
        "--scheduling-policy NAME",
        "a policy decides this; docs/guide/scheduling.md describes each",
        takes="VALUE",
        accepted="0 0.0",
    ),
    _row("--async-scheduling", _VLLM, "--pipeline-depth 2", "with CUDA graphs it is the default"),
    _row(
        "--no-async-scheduling --disable-overlap-schedule",
        _BOTH,
        "--pipeline-depth 1",
        "without CUDA graphs it is the default",
    ),
    _row(
        "--num-scheduler-steps",
        _VLLM,
        why="the host's work is small, so each step is planned",
        takes="N",
        accepted="1",
    ),
    _row("--stream-interval", _BOTH, why="each step's tokens are sent", takes="N", accepted="1"),
    _row(
        "--preemption-mode",
        _VLLM,
        why="preempted sequences are computed again",
        takes="MODE",
        accepted="recompute",
    ),
    _row("--context-shift", _LLAMA, why="an answer ends at --max-model-len"),
    _row("--no-context-shift", _LLAMA, accepted=""),
    _row("--keep", _LLAMA, why="no token of a prompt is dropped", takes="N", accepted="-1 0"),
)

_MEMORY = (
    _row(
        "--gpu-memory-utilization",
        _VLLM,
        "--memory-bytes SIZE",
        "without it the free memory is used",
        takes="FRACTION",
        topic="memory",
    ),
    _row(
        "--mem-fraction-static",
        _SGLANG,
        "--memory-bytes SIZE",
        "without it the free memory is used",
        takes="FRACTION",
        topic="memory",
    ),
    _row(
        "--fit-target -fitt --fit-ctx -fitc",
        _LLAMA,
        "--memory-bytes SIZE",
        takes="SIZES",
        topic="memory",
    ),
    _row(
        "--fit -fit",
        _LLAMA,
        "--memory-bytes SIZE",
        "the context becomes what fits",
        takes="[on|off]",
        accepted="on",
    ),
    _row("--num-gpu-blocks-override", _VLLM, "--num-blocks {value}", takes="N"),
    _row("--max-total-tokens", _SGLANG, "--num-blocks N", "of --block-size tokens", takes="N"),
    _row("--page-size", _SGLANG, "--block-size {value}", takes="N"),
    _row(
        "--swap-space --cpu-offload-gb --kv-offloading-size",
        _BOTH,
        why="weights and KV cache are in one memory; --kv-cache-dir stores evicted KV blocks",
        takes="GIB",
        accepted="0 0.0",
    ),
    _row(
        "--kv-offloading-backend --kv-transfer-config --kv-events-config",
        _VLLM,
        why="--kv-cache-dir stores KV blocks, --prefill and --decode transfer them",
        takes="VALUE",
    ),
    _row(
        "--cache-type-k -ctk --cache-type-v -ctv",
        _LLAMA,
        "--kv-cache-dtype int8",
        "keys and values have one dtype, that of the weights without the flag",
        takes="TYPE",
        topic="KV cache",
    ),
    _row(
        "--calculate-kv-scales --kv-sharing-fast-prefill",
        _VLLM,
        why="--kv-cache-dtype int8 and int4 have scales per token and head, fp8 none",
    ),
    _row("--disable-sliding-window", _VLLM, why="windows are the model's own"),
    _row("--swa-full", _LLAMA, why="drop it; prefixes are cached with windows too"),
    _row(
        "--kv-unified -kvu --no-kv-unified -no-kvu --disable-hybrid-kv-cache-manager "
        "--use-v2-block-manager --cache-idle-slots",
        (*_LLAMA, *_VLLM),
        accepted="",
    ),
    _row("--cache-prompt", _LLAMA, accepted=""),
    _row("--no-cache-prompt", _LLAMA, "--no-enable-prefix-caching", topic="no prefix cache"),
    _row("--disable-radix-cache", _SGLANG, "--no-enable-prefix-caching", topic="no prefix cache"),
    _row(
        "--cache-reuse",
        _LLAMA,
        why="only equal prefixes are shared, so the output stays the same",
        takes="N",
        accepted="0",
    ),
    _row("--cache-ram -cram", _LLAMA, "--kv-cache-memory-bytes SIZE", takes="MIB"),
    _row("--defrag-thold -dt", _LLAMA, why="blocks need no defragmentation", takes="N"),
    _row(
        "--prefix-caching-hash-algo",
        _VLLM,
        why="blocks have BLAKE2b keys, which collide as rarely as SHA-256; drop it",
        takes="NAME",
        accepted="sha256 sha256_cbor",
    ),
    _row(
        "--mlock --no-mmap --mmap --direct-io -dio --no-direct-io -ndio --load-mode -lm",
        _LLAMA,
        why="weights are copied into packed memory while they are read; drop it",
        takes="[auto|none|mmap|mlock|mmap+mlock|dio]",
    ),
    _row("--repack", _LLAMA, accepted=""),
    _row("--no-repack -nr", _LLAMA, "--kernels reference", "native kernels need packed weights"),
)

_DEVICES = (
    _row("-t", _LLAMA, "--threads {value}", takes="N", topic="threads"),
    _row(
        "--threads-batch -tb",
        _LLAMA,
        "--threads {value}",
        "prompts and output have the same threads",
        takes="N",
    ),
    _row(
        "--cpu-mask -C --cpu-range -Cr --cpu-strict --cpu-mask-batch -Cb --cpu-range-batch -Crb "
        "--numa",
        _LLAMA,
        "--pin-threads",
        "choose the CPUs with taskset or numactl",
        takes="VALUE",
    ),
    _row("--prio --poll --prio-batch --poll-batch", _LLAMA, why="start it with nice", takes="N"),
    _row(
        "--threads-http",
        _LLAMA,
        why="one event loop serves all connections",
        takes="N",
        accepted="-1",
    ),
    _row(
        "--n-gpu-layers --gpu-layers -ngl",
        _LLAMA,
        "--device NAME",
        "cpu or cuda:N; all layers are on one device",
        takes="N",
        accepted="auto all -1 99 999",
        becomes={"0": ("--device", "cpu")},
        topic="device",
    ),
    _row("-dev", _LLAMA, "--device cuda:N", takes="DEVICES"),
    _row("--base-gpu-id", _SGLANG, "--device cuda:{value}", takes="N"),
    _row("--main-gpu -mg", _LLAMA, "--device cuda:{value}", takes="N"),
    _row(
        "--split-mode -sm",
        _LLAMA,
        why=_ONE_DEVICE,
        takes="MODE",
        accepted="none",
    ),
    _row("--tensor-split -ts --rpc", _LLAMA, why=_ONE_DEVICE, takes="VALUE"),
    _row(
        "--override-tensor -ot --cpu-moe -cmoe --n-cpu-moe -ncmoe",
        _LLAMA,
        why="all weights are on one device",
        takes="[N]",
    ),
    _row(
        "--no-kv-offload -nkvo --op-offload --no-op-offload --no-host",
        _LLAMA,
        why="the KV cache is where the weights are",
    ),
    _row(
        "--ep-size "
        "--prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp --nnodes "
        "--api-server-count -asc --data-parallel-size-local",
        _BOTH,
        why=_ONE_DEVICE,
        takes="N",
        accepted="1",
    ),
    _row(
        "--enable-expert-parallel -ep --enable-eplb --enable-dp-attention --headless "
        "--data-parallel-hybrid-lb --data-parallel-external-lb",
        _BOTH,
        why=_ONE_DEVICE,
    ),
    _row(
        "--node-rank --master-addr --master-port --data-parallel-rank --data-parallel-address "
        "--data-parallel-rpc-port --dist-init-addr",
        _BOTH,
        why=_ONE_DEVICE,
        takes="VALUE",
        accepted="0",
    ),
    _row(
        "--distributed-executor-backend --worker-cls --worker-extension-cls",
        _VLLM,
        why="one process computes",
        takes="NAME",
        accepted="uni mp auto",
    ),
    _row(
        "--disable-custom-all-reduce --disable-cascade-attn --ray-workers-use-nsight",
        _BOTH,
        accepted="",
    ),
    _row(
        "--flash-attn -fa",
        _LLAMA,
        why="attention never holds a matrix of scores; drop it",
        takes="[on|off|auto|0|1]",
        accepted=" on auto 1",
    ),
    _row(
        "--attention-backend --sampling-backend --prefill-attention-backend "
        "--decode-attention-backend --moe-backend --mm-attention-backend",
        _BOTH,
        "--kernels NAME",
        "reference, native or triton",
        takes="NAME",
        accepted="auto",
    ),
    _row(
        "--disable-cuda-graph --no-cuda-graph",
        _SGLANG,
        "--enforce-eager",
        topic="no CUDA graphs",
    ),
    _row(
        "--compilation-config -cc -O -O0 -O1 -O2 -O3 --optimization-level --cuda-graph-sizes "
        "--max-seq-len-to-capture --cuda-graph-max-bs --cuda-graph-bs --max-cudagraph-capture-size "
        "--cudagraph-capture-sizes",
        _BOTH,
        "--enforce-eager",
        "or drop it; steps are captured, and nothing is compiled",
        takes="VALUE",
    ),
    _row("--enable-torch-compile", _SGLANG, why="nothing is compiled; drop it"),
    _row("--warmup", _LLAMA, accepted=""),
    _row(
        "--no-warmup --skip-server-warmup",
        (*_LLAMA, *_SGLANG),
        why="drop it; the first steps run before the server listens",
    ),
    _row("--list-devices", _LLAMA, why="`quickstep doctor` lists what the machine has"),
    _row("--enable-sleep-mode", _VLLM, why="end the server to free its memory"),
)

_DRAFTS_AND_ADAPTERS = (
    _row(
        "--model-draft -md --spec-draft-model",
        _LLAMA,
        "--speculative-model {value}",
        takes="FILE",
        topic="draft model",
    ),
    _row(
        "--speculative-draft-model-path",
        _SGLANG,
        "--speculative-model {value}",
        takes="MODEL",
        topic="draft model",
    ),
    _row(
        "--speculative-algorithm --spec-type --spec-method",
        (*_SGLANG, *_LLAMA, *_VLLM),
        "--speculative-method NAME",
        "suffix, ngram, draft, medusa, eagle, eagle3, mtp or off",
        takes="NAME",
    ),
    _row("--spec-model", _VLLM, "--speculative-model {value}", takes="MODEL"),
    _row("--spec-tokens", _VLLM, "--num-speculative-tokens {value}", takes="N"),
    _row(
        "--draft-max --draft --draft-n --spec-draft-n-max",
        _LLAMA,
        "--num-speculative-tokens {value}",
        takes="N",
        topic="draft tokens",
    ),
    _row(
        "--speculative-num-draft-tokens --speculative-num-steps",
        _SGLANG,
        "--num-speculative-tokens {value}",
        takes="N",
        topic="draft tokens",
    ),
    _row("--speculative-eagle-topk", _SGLANG, "--speculative-tree-width {value}", takes="N"),
    _row(
        "--draft-min --draft-n-min --draft-p-min --spec-draft-n-min --spec-draft-p-min",
        _LLAMA,
        "--num-speculative-tokens N",
        "a sequence gets as many drafts as pay, by measured step times",
        takes="VALUE",
    ),
    _row(
        "--ctx-size-draft -cd --gpu-layers-draft --n-gpu-layers-draft -ngld --device-draft -devd "
        "--cache-type-k-draft -ctkd --cache-type-v-draft -ctvd --threads-draft -td "
        "--threads-batch-draft -tbd --speculative-draft-tensor-parallel-size",
        (*_LLAMA, *_VLLM),
        why="a draft model is next to its model, with the same settings",
        takes="VALUE",
    ),
    _row(
        "--ngram-prompt-lookup-max --ngram-prompt-lookup-min --lookup-cache-static -lcs "
        "--lookup-cache-dynamic -lcd",
        (*_VLLM, *_LLAMA),
        "--speculative-method ngram",
        "--speculative-config has its settings",
        takes="VALUE",
    ),
    _row(
        "--lora --lora-scaled",
        _LLAMA,
        "--lora-modules NAME=DIR",
        "a directory of PEFT, and each request selects one; /lora-adapters sets scales",
        takes="FILE",
        topic="adapters",
    ),
    _row("--lora-paths", _SGLANG, "--lora-modules NAME=DIR", takes="NAME=DIR", topic="adapters"),
    _row("--lora-init-without-apply", _LLAMA, accepted=""),
    _row("--max-loras-per-batch", _SGLANG, "--max-loras {value}", takes="N"),
    _row(
        "--enable-lora-bias --fully-sharded-loras --lora-extra-vocab-size --default-mm-loras "
        "--long-lora-scaling-factors --lora-target-modules --lora-backend",
        _BOTH,
        why="adapters have what their adapter_config.json says",
        takes="[VALUE]",
    ),
    _row(
        "--control-vector --control-vector-scaled --control-vector-layer-range",
        _LLAMA,
        why="there are no control vectors; --lora-modules has adapters",
        takes="FILE",
    ),
)

_REQUEST_DEFAULTS = (
    _row("--temp", _LLAMA, "--temperature {value}", otherwise=_REQUESTS, takes="N"),
    _row(
        "--temperature --top-k --top-p --min-p --presence-penalty --frequency-penalty "
        "--xtc-probability --xtc-threshold --dry-multiplier --dry-base --dry-allowed-length "
        "--typical-p --ignore-eos",
        _LLAMA,
        why=_REQUESTS,
        takes="[N]",
    ),
    _row(
        "--repeat-penalty", _LLAMA, "--repetition-penalty {value}", otherwise=_REQUESTS, takes="N"
    ),
    _row("--typical", _LLAMA, "--typical-p {value}", otherwise=_REQUESTS, takes="N"),
    _row("--dry-penalty-last-n", _LLAMA, "--dry-range {value}", otherwise=_REQUESTS, takes="N"),
    _row(
        "--dry-sequence-breaker",
        _LLAMA,
        "--dry-sequence-breakers {value}",
        otherwise=_REQUESTS,
        takes="S",
    ),
    _row(
        "--repeat-last-n --mirostat --mirostat-lr --mirostat-ent --dynatemp-range --dynatemp-exp "
        "--adaptive-target --adaptive-decay --samplers --sampler-seq --sampling-seq --top-nsigma "
        "--top-n-sigma",
        _LLAMA,
        why="docs/guide/sampling.md lists the samplers, which run in a fixed order",
        takes="VALUE",
    ),
    _row(
        "--logit-bias -l --grammar --grammar-file --json-schema -j --json-schema-file -jf",
        _LLAMA,
        why="requests have the fields logit_bias, grammar and json_schema",
        takes="VALUE",
    ),
    _row(
        "--predict --n-predict -n",
        _LLAMA,
        "--max-tokens {value}",
        otherwise="requests have the field max_tokens",
        takes="N",
        accepted="-1",
    ),
    _row("-s", _LLAMA, "--seed {value}", takes="N", accepted="-1"),
    _row("--random-seed", _SGLANG, "--seed {value}", takes="N"),
    _row(
        "--prompt -p --file -f",
        _LLAMA,
        why="`quickstep generate PROMPT` completes a text, and - reads it from stdin",
        takes="TEXT",
    ),
    _row(
        "--system-prompt -sys",
        _LLAMA,
        "--system {value}",
        otherwise="requests have system messages",
        takes="TEXT",
    ),
    _row(
        "--conversation -cnv --interactive --interactive-first",
        _LLAMA,
        why="`quickstep chat` is a conversation",
    ),
    _row(
        "--reverse-prompt -r",
        _LLAMA,
        "--stop {value}",
        otherwise="requests have the field stop",
        takes="TEXT",
    ),
    _row(
        "--escape -e --no-escape --spm-infill --special -sp",
        _LLAMA,
        why="texts are read as they are; requests have the field skip_special_tokens",
    ),
    _row(
        "--embd-normalize",
        _LLAMA,
        why="vectors of /v1/embeddings have length 1",
        takes="N",
        accepted="2",
    ),
    _row("--pooling", _LLAMA, why="requests of embeddings have the field pooling", takes="NAME"),
    _row("--rerank --reranking", _LLAMA, why="there are no reranking models"),
)

_TEMPLATES = (
    _row("--jinja", _LLAMA, accepted="", topic="templates and tools"),
    _row("--no-jinja", _LLAMA, why="the checkpoint's Jinja template is always rendered"),
    _row(
        "--chat-template-kwargs --default-chat-template-kwargs",
        (*_LLAMA, *_VLLM),
        why="requests have the field chat_template_kwargs",
        takes="JSON",
    ),
    _row(
        "--response-role",
        _VLLM,
        why="answers are the assistant's",
        takes="ROLE",
        accepted="assistant",
    ),
    _row(
        "--enable-auto-tool-choice",
        _VLLM,
        accepted="",
        topic="templates and tools",
    ),
    _row(
        "--tool-parser-plugin --reasoning-parser-plugin",
        _VLLM,
        "--tool-call-parser NAME",
        "code of plugins is not run",
        takes="FILE",
    ),
    _row(
        "--tool-server --tools --mcp-servers-config --mcp-servers-json",
        (*_VLLM, *_LLAMA),
        why="clients run the tools that a model calls",
        takes="VALUE",
    ),
    _row("--exclude-tools-when-tool-choice-none", _VLLM, why="leave tools out of the request"),
    _row("--enable-reasoning", _VLLM, accepted=""),
    _row(
        "--reasoning-format",
        _LLAMA,
        "--reasoning-parser NAME",
        "without it the format is detected; none leaves reasoning in the content",
        takes="FORMAT",
        accepted="auto deepseek",
    ),
    _row(
        "--reasoning-budget",
        _LLAMA,
        "--thinking-budget {value}",
        otherwise="requests have the field thinking_budget",
        takes="N",
        accepted="-1",
    ),
    _row(
        "--reasoning -rea",
        _LLAMA,
        why="requests have the field chat_template_kwargs",
        takes="[on|off|auto]",
        accepted=" auto",
    ),
    _row(
        "--guided-decoding-backend --structured-outputs-config --grammar-backend",
        _BOTH,
        why="grammars are compiled by llguidance; drop it",
        takes="NAME",
        accepted="auto guidance llguidance",
    ),
    _row(
        "--logits-processors --logits-processor-pattern --enable-custom-logit-processor",
        _BOTH,
        why="code of plugins is not run; requests have logit_bias, allowed_token_ids and bad_words",
        takes="[NAME]",
    ),
    _row(
        "--logprobs-mode",
        _VLLM,
        why="logprobs are those of the model, before sampling",
        takes="MODE",
        accepted="raw_logprobs",
    ),
    _row(
        "--return-tokens-as-token-ids",
        _VLLM,
        why="requests have the field return_tokens_as_token_ids",
    ),
    _row(
        "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --media-io-kwargs "
        "--allowed-local-media-path --allowed-media-domains --mm-encoder-tp-mode --mmproj -mm "
        "--mmproj-url -mmu --media-path --image-min-tokens --image-max-tokens",
        (*_VLLM, *_LLAMA),
        why=_TEXT_ONLY,
        takes="VALUE",
    ),
    _row(
        "--no-mmproj --no-mmproj-auto --no-mmproj-offload --skip-mm-profiling "
        "--language-model-only --disable-chunked-mm-input --disable-mm-preprocessor-cache",
        (*_LLAMA, *_VLLM),
        accepted="",
    ),
    _row(
        "--enable-multimodal --interleave-mm-strings --enable-prompt-embeds --enable-mm-embeds",
        _BOTH,
        why=_TEXT_ONLY,
    ),
)

_SERVER = (
    _row(
        "--webui --ui",
        _LLAMA,
        why="there is no page in the browser; `quickstep chat --url` is a client",
    ),
    _row("--no-webui --no-ui --disable-fastapi-docs", (*_LLAMA, *_VLLM), accepted=""),
    _row("--ssl-key-file", _LLAMA, "--ssl-keyfile {value}", takes="FILE"),
    _row("--ssl-cert-file", _LLAMA, "--ssl-certfile {value}", takes="FILE"),
    _row("--enable-ssl-refresh", _VLLM, why="SIGHUP reads certificates and keys again"),
    _row(
        "--ssl-cert-reqs",
        _VLLM,
        "--ssl-ca-certs FILE",
        "requires certificates of clients",
        takes="N",
        accepted="0",
    ),
    _row("--ssl-ciphers", _VLLM, why="Python's defaults hold", takes="NAMES"),
    _row("--cors-origins", _LLAMA, "--allowed-origins {value}", takes="ORIGINS"),
    _row("--cors-methods", _LLAMA, "--allowed-methods {value}", takes="METHODS"),
    _row("--cors-headers", _LLAMA, "--allowed-headers {value}", takes="HEADERS"),
    _row("--cors-credentials", _LLAMA, "--allow-credentials"),
    _row("--no-cors-credentials", _LLAMA, accepted=""),
    _row("--api-prefix", _LLAMA, "--root-path {value}", takes="PATH"),
    _row(
        "--middleware", _VLLM, why="code of plugins is not run; put a proxy in front", takes="NAME"
    ),
    _row("--uds", _VLLM, why="it listens on --host and --port", takes="PATH"),
    _row(
        "--path --timeout -to",
        _LLAMA,
        "--keep-alive-timeout-s SECONDS",
        "--help lists the time limits of connections",
        takes="VALUE",
    ),
    _row(
        "--sse-ping-interval", _LLAMA, "--stream-comment-s {value}", "0 for none", takes="SECONDS"
    ),
    _row("--watchdog-timeout", _SGLANG, "--stall-timeout-s {value}", takes="SECONDS"),
    _row(
        "--h11-max-incomplete-event-size --h11-max-header-count",
        _VLLM,
        "--max-header-bytes SIZE",
        takes="N",
    ),
    _row("--metrics --enable-metrics --slots", (*_LLAMA, *_SGLANG), accepted=""),
    _row(
        "--props --no-slots",
        _LLAMA,
        why="/props and /slots can be read, and need a key if the server has keys",
    ),
    _row("--file-storage-path", _SGLANG, "--files-dir {value}", takes="DIR"),
    _row(
        "--enable-prompt-tokens-details --enable-request-id-headers "
        "--enable-tokenizer-info-endpoint --disable-uvicorn-access-log "
        "--disable-frontend-multiprocessing --no-enable-log-requests --disable-log-requests "
        "--no-enable-log-outputs",
        _VLLM,
        accepted="",
    ),
    _row("--enable-cache-report", _SGLANG, accepted=""),
    _row(
        "--enable-log-requests --enable-log-outputs --log-requests",
        _BOTH,
        "--access-log",
        "--record-full also keeps prompts and outputs",
    ),
    _row("--max-log-len", _VLLM, why="texts are never in the log", takes="N"),
    _row("--uvicorn-log-level", _VLLM, "--log-level {value}", takes="LEVEL", accepted="info"),
    _row("--log-config-file", _VLLM, "--log-level LEVEL", "and --log-format", takes="FILE"),
    _row(
        "--disable-log-stats",
        _VLLM,
        "--log-level warning",
        "it leaves out the line every ten seconds",
    ),
    _row("--verbose -v --log-verbose", _LLAMA, "--log-level debug"),
    _row(
        "--verbosity -lv --log-verbosity",
        _LLAMA,
        "--log-level LEVEL",
        "debug, info, warning or error",
        takes="N",
        accepted="3",
    ),
    _row("--log-disable", _LLAMA, "--log-level error"),
    _row("--log-file", _LLAMA, why="the log is stderr; write 2> FILE", takes="FILE"),
    _row("--log-jsonl", _LLAMA, "--log-format json"),
    _row("--log-prefix --log-timestamps --no-perf", _LLAMA, accepted=""),
    _row(
        "--log-colors",
        _LLAMA,
        why="the log has no colors",
        takes="[on|off|auto]",
        accepted="off auto",
    ),
    _row("--perf --no-log-prefix --no-log-timestamps", _LLAMA, "--log-format json"),
    _row(
        "--collect-detailed-traces --show-hidden-metrics-for-version --kv-cache-metrics "
        "--enable-server-load-tracking --enable-metrics-for-all-schedulers",
        _BOTH,
        why="docs/guide/observe.md lists metrics and traces",
        takes="[VALUE]",
    ),
    _row(
        "--models-dir --models-preset --models-max --models-autoload",
        _LLAMA,
        why="a server has one model, and adapters with --lora-modules; start one per model",
        takes="[VALUE]",
    ),
    _row(
        "--fingerprint-mode --fingerprint-value",
        _VLLM,
        why="system_fingerprint names the weights and kernels",
        takes="VALUE",
    ),
    _row(
        "--slot-prompt-similarity -sps",
        _LLAMA,
        why="every block of an equal prefix is shared",
        takes="N",
    ),
    _row("--keepalive", ("Ollama",), why="the model stays loaded", takes="TIME"),
    _row("--completion-bash", _LLAMA, why="there is no completion for shells"),
)

FOREIGN_FLAGS: tuple[ForeignFlag, ...] = (
    *_MODEL,
    *_CONTEXT_AND_BATCH,
    *_MEMORY,
    *_DEVICES,
    *_DRAFTS_AND_ADAPTERS,
    *_REQUEST_DEFAULTS,
    *_TEMPLATES,
    *_SERVER,
)
