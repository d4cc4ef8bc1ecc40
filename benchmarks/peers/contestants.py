"""Engines at precisions, and the command line that each gets for a workload.

Every engine gets the settings that its documentation recommends for the workload at hand, sized to
it: what an owner of that engine would choose. They are all in this file, and every report lists the
command lines that ran, so whoever disagrees with one changes it here.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.client import Api
from benchmarks.peers.environments import Environment, vllm_preloads
from benchmarks.peers.workloads import WorkloadSize

__all__ = [
    "PRECISIONS",
    "VARIED",
    "Contestant",
    "Launch",
    "group_of",
    "launch_of",
    "process_environment",
    "select",
]

_FRONTS = Path(__file__).parent / "fronts"
_SOURCE = Path(__file__).parents[2] / "src"

# What each engine offers, in the order of the tables.
PRECISIONS = {
    "quickstep": ("bf16", "int8", "int4"),
    "vllm": ("bf16", "int8"),
    "openvino": ("bf16", "int8", "int4"),
    "llama_cpp": ("bf16", "f16", "int8", "int4"),
    "transformers": ("bf16",),
    "quickstep_front": ("bf16", "int8", "int4"),
}

# The setting of each engine that readers are most likely to want otherwise; `--vary` makes
# contestants of several values.
VARIED = {
    "llama_cpp": "slots",
    "openvino": "precision hint",
    "vllm": "batched tokens",
    "transformers": "batch",
}

# The longest sequence that engines with a paged KV cache are configured for; llama.cpp reserves its
# context, so it gets what the workload needs.
_MAX_MODEL_LEN = 4096
# Streams that llama.cpp decodes at once where a workload has more.
_SLOTS = {"w2": 16, "w3": 4, "w4": 8}
_LLAMA_CONTEXT_STEP = 256
_CACHE_GIB = {"footprint": 1, "proof": 1}


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine at a precision; `variant` is the value of its `VARIED` setting, None for ours."""

    engine: str
    precision: str
    model: Path
    environment: Environment
    threads: int
    variant: str | None = None

    @property
    def name(self) -> str:
        """As tables show it."""
        more = "" if self.variant is None else f" ({VARIED[self.engine]} {self.variant})"
        return f"{self.engine} {self.precision}{more}"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started, up to its address, and how to speak to it."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    api: Api

    def described(self, cache: Path) -> str:
        """The command line as a reader would type it."""
        words = [f"{name}={value}" for name, value in self.environment if value]
        text = " ".join([*words, shlex.join(self.command)])
        short_names = {cache: "CACHE", _FRONTS: "fronts", Path(sys.prefix): ".venv", _SOURCE: "src"}
        for path, short in short_names.items():
            text = text.replace(str(path), short)
        return text


def select(
    engines: Sequence[str], precisions: Sequence[str], varied: Mapping[str, Sequence[str]]
) -> list[tuple[str, str, str | None]]:
    """Engine, precision and variant of every contestant that was chosen."""
    return [
        (engine, precision, variant)
        for engine in engines
        for precision in PRECISIONS[engine]
        if precision in precisions
        for variant in varied.get(engine) or (None,)
    ]


def group_of(precision: str) -> str:
    """Contestants of one group are measured in turns; two groups would not fit in 24 GB."""
    return "16 bits" if precision in ("bf16", "f16") else "8 and 4 bits"


def launch_of(contestant: Contestant, workload: str, size: WorkloadSize) -> Launch:
    """The best documented settings of an engine for a workload."""
    makers = {
        "quickstep": _quickstep,
        "vllm": _vllm,
        "openvino": _openvino,
        "llama_cpp": _llama_cpp,
        "transformers": _transformers,
        "quickstep_front": _quickstep_front,
    }
    command, environment = makers[contestant.engine](contestant, workload, size)
    # several engines read this one next to their own setting
    environment = {"OMP_NUM_THREADS": str(contestant.threads), **environment}
    api = Api.LLAMA_CPP if contestant.engine == "llama_cpp" else Api.OPENAI
    return Launch(tuple(command), tuple(environment.items()), api)


_Started = tuple[list[str], dict[str, str]]


def _quickstep(one: Contestant, workload: str, size: WorkloadSize) -> _Started:
    """Its defaults."""
    command = [sys.executable, "-m", "quickstep", "serve", str(one.model), "--dtype", "bfloat16"]
    command += ["--threads", str(one.threads), "--max-model-len", str(_MAX_MODEL_LEN)]
    command += ["--served-model-name", "model"]
    if one.precision != "bf16":
        command += ["--quantization", one.precision]
    return command, {"PYTHONPATH": str(_SOURCE)}


def _quickstep_front(one: Contestant, workload: str, size: WorkloadSize) -> _Started:
    """The same engine behind the front that serves OpenVINO and transformers."""
    command = [sys.executable, str(_FRONTS / "quickstep_front.py"), "--model", str(one.model)]
    command += ["--threads", str(one.threads), "--max-model-len", str(_MAX_MODEL_LEN)]
    if one.precision != "bf16":
        command += ["--quantization", one.precision]
    return command, {"PYTHONPATH": str(_SOURCE)}


def _vllm(one: Contestant, workload: str, size: WorkloadSize) -> _Started:
    """Its page on CPUs: threads bound, tcmalloc and Intel's OpenMP preloaded."""
    command = [str(one.environment.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(one.model), "--served-model-name", "model", "--dtype", "bfloat16"]
    command += ["--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", "64"]
    command += ["--max-num-batched-tokens", one.variant or "2048"]
    command += ["--enable-prefix-caching"]
    command += ["--disable-uvicorn-access-log"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB.get(workload, 2)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{one.threads - 1}",
        "LD_PRELOAD": ":".join(vllm_preloads(one.environment)),
        "DO_NOT_TRACK": "1",
    }
    return command, environment


def _openvino(one: Contestant, workload: str, size: WorkloadSize) -> _Started:
    """Continuous batching with 2,048 tokens a step for its default of 256, the latency hint, and
    the precision that it takes by itself on this CPU (bf16 where there are instructions for it).
    """
    scheduler = {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "cache_size": _CACHE_GIB.get(workload, 2),
        "dynamic_split_fuse": True,
        "enable_prefix_caching": True,
    }
    properties = {"PERFORMANCE_HINT": "LATENCY"}
    if one.variant is not None:
        properties["INFERENCE_PRECISION_HINT"] = one.variant
    command = [str(one.environment.python), str(_FRONTS / "openvino_front.py")]
    command += ["--model", str(one.model), "--threads", str(one.threads)]
    command += ["--scheduler", json.dumps(scheduler), "--properties", json.dumps(properties)]
    return command, {}


def _llama_cpp(one: Contestant, workload: str, size: WorkloadSize) -> _Started:
    """Slots and context sized to the workload: it reserves both, and writes them at its start.

    A single stream gets one slot of 4,096 tokens. The cache of past prompts in host memory is off,
    since no prompt returns; a cold start skips the warm-up run and the fit to a GPU's memory, and
    does not map the file of weights that are packed anew, which would be resident twice.
    """
    slots = int(one.variant or 0) or min(_SLOTS.get(workload, 1), size.num_streams)
    length = -(-size.max_len // _LLAMA_CONTEXT_STEP) * _LLAMA_CONTEXT_STEP
    context = _MAX_MODEL_LEN if slots == 1 else slots * length
    command = [str(one.environment.llama_server), "-m", str(one.model), "--no-webui"]
    command += ["-t", str(one.threads), "-tb", str(one.threads), "-fa", "on", "-cb"]
    command += ["-np", str(slots), "-c", str(context), "-cram", "0", "-fit", "off"]
    if workload == "footprint":
        command += ["--no-warmup"]
        if one.precision != "bf16":
            command += ["--load-mode", "none"]
    return command, {}


def _transformers(one: Contestant, workload: str, size: WorkloadSize) -> _Started:
    """Static batches of 16, its attention through PyTorch."""
    command = [str(one.environment.python), str(_FRONTS / "transformers_front.py")]
    command += ["--model", str(one.model), "--threads", str(one.threads)]
    command += ["--batch", one.variant or "16"]
    return command, {}


def process_environment(launch: Launch) -> dict[str, str]:
    """For a server's processes: this one's without its Python path, and the launch's."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    return {**found, **dict(launch.environment)}
