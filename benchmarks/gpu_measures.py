"""`python -m benchmarks.gpu_measures WHAT`: what `benchmarks.gpu` measures that no command does.

    attention    paged attention, next to torch's on contiguous keys and values
    exactness    the batch-invariant products of a layer, next to torch's (cuBLAS)
    served       requests at the same time: tokens/s, first token, gaps, part of the roofline
    generate     the same requests through `generate` of transformers
    cold-start   a process from its start to its first token; torch's import and CUDA apart

Each prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.attention.bias import causal_lower_right

from quickstep.bench.lengths import RequestLengths
from quickstep.bench.limits import DEFAULT_PROBE_BYTES, open_limits
from quickstep.bench.measured_engine import (
    MeasuredEngine,
    RequestTimes,
    open_shape,
    random_prompt,
    run_request,
)
from quickstep.bench.serve import percentile
from quickstep.bench.shapes import SHAPES
from quickstep.bench.work import decode_kv_bytes, prefill_flops
from quickstep.config import (
    EngineConfig,
    LoadConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.model.checkpoint.tensor_schema import layer_tensors, outer_tensors
from quickstep.model.sizing import kv_head_bytes
from quickstep.model.spec import parse_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout, RowLengths

if TYPE_CHECKING:
    from quickstep.model.decoder_spec import ModelSpec

# query heads, KV heads, head size, context, query rows of the one sequence
_ATTENTION = {
    "cuda": ((32, 8, 128, 8192, 1), (32, 8, 128, 8192, 512)),
    "cpu": ((4, 2, 32, 128, 1), (4, 2, 32, 128, 16)),
}
_TOKENS = {"cuda": (1, 8, 64, 2048), "cpu": (1, 8)}
# requests, prompt and output length
_SERVED = {"cuda": (64, 512, 128), "cpu": (4, 32, 8)}
_WARM_UPS = 2

Figures = dict[str, object]


def main() -> int:
    """Measure one thing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_measures")
    parser.add_argument("what", choices=sorted(_MEASURES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    args = parser.parse_args()
    print(json.dumps(_MEASURES[args.what](args.device, args.kernels, args.shape)))
    return 0


def _attention(device: str, kernels: str, _: str) -> list[Figures]:
    ops = resolve_ops(torch.device(device), kernels)
    found: list[Figures] = []
    for sizes in _ATTENTION[device]:
        heads, kv_heads, size, context, num_rows = sizes
        ours_s, theirs_s = _alternating_s(device, *_attention_calls(ops, device, *sizes))
        case = f"{num_rows} rows, context {context}, {heads}/{kv_heads} heads of {size}"
        found.append({"case": case, "ours_us": 1e6 * ours_s, "torch_us": 1e6 * theirs_s})
    return found


def _attention_calls(
    ops: OpTable, device: str, heads: int, kv_heads: int, size: int, context: int, num_rows: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Ours and torch's, on the same values."""
    make = torch.Generator(device).manual_seed(0)

    def random_values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=device).to(torch.bfloat16)

    q = random_values(num_rows, heads, size)
    keys, values = (random_values(context // 16, 16, kv_heads, size) for _ in range(2))
    first = context - num_rows
    layout = PagedLayout(
        positions=torch.arange(first, context, device=device),
        slot_mapping=torch.arange(first, context, device=device),
        row_offsets=(0, num_rows),
        context_lens=(context,),
        block_tables=torch.arange(context // 16, dtype=torch.int32, device=device)[None],
        block_size=16,
        # on the device before the measurement, as in a step
        lengths=RowLengths(torch.tensor([0, num_rows], dtype=torch.int32, device=device)),
    )
    params = AttentionParams(size**-0.5)
    k, v = (
        one.view(context, kv_heads, size).transpose(0, 1)[None].contiguous()
        for one in (keys, values)
    )
    # as this, and not as booleans, torch's FlashAttention accepts it
    mask = None if num_rows == 1 else causal_lower_right(num_rows, context)

    def paged() -> object:
        return ops.paged_attention(q, keys, values, layout, params, None)

    def contiguous() -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
        )

    return paged, contiguous


def _exactness(device: str, kernels: str, shape: str) -> list[Figures]:
    """A layer's four products and the output projection, for several numbers of tokens."""
    ops, spec = resolve_ops(torch.device(device), kernels), parse_spec(SHAPES[shape])
    make = torch.Generator(device).manual_seed(0)
    found: list[Figures] = []
    matrices = [
        torch.randn(n, c, generator=make, device=device).to(torch.bfloat16)
        for n, c in _layer_sizes(spec)
    ]
    packed = [ops.pack_linear(matrix, None) for matrix in matrices]
    for num_tokens in _TOKENS[device]:
        inputs = [
            torch.randn(num_tokens, one.shape[1], generator=make, device=device).to(torch.bfloat16)
            for one in matrices
        ]

        def ours(inputs: Sequence[torch.Tensor] = inputs) -> object:
            return [ops.linear(x, weight) for x, weight in zip(inputs, packed, strict=True)]

        def theirs(inputs: Sequence[torch.Tensor] = inputs) -> object:
            return [x @ matrix.T for x, matrix in zip(inputs, matrices, strict=True)]

        ours_s, theirs_s = _alternating_s(device, ours, theirs)
        case = f"products of a layer, {num_tokens} tokens"
        found.append({"case": case, "ours_us": 1e6 * ours_s, "torch_us": 1e6 * theirs_s})
    return found


def _layer_sizes(spec: ModelSpec) -> list[tuple[int, int]]:
    queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    hidden, width = spec.hidden_size, spec.intermediate_size
    return [(queries + 2 * keys, hidden), (hidden, queries), (2 * width, hidden), (hidden, width)]


def _alternating_s(device: str, *calls: Callable[[], object]) -> list[float]:
    """Median seconds of each call, taking turns; on a GPU those of its kernels, in a CUDA graph."""
    if device == "cuda":
        calls = tuple(_recorded(call) for call in calls)
    times: list[list[float]] = [[] for _ in calls]
    for round_number in range(23):
        for call, spent in zip(calls, times, strict=True):
            seconds = _kernels_s(call) if device == "cuda" else _call_s(call)
            if round_number >= 3:
                spent.append(seconds)
    return [statistics.median(spent) for spent in times]


def _recorded(call: Callable[[], object]) -> Callable[[], object]:
    """Runs what the call launches, without its Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _kernels_s(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _call_s(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _served(device: str, kernels: str, shape: str) -> Figures:
    num_requests, num_inputs, num_outputs = _SERVED[device]
    config = EngineConfig(
        load=LoadConfig("demo", device=device, kernels=kernels),
        scheduler=SchedulerConfig(max_num_seqs=num_requests),
        speculation=SpeculationConfig(proposers=()),
        max_model_len=num_inputs + num_outputs,
        seed=0,
    )
    measured = open_shape(config, shape, SHAPES[shape], 0)
    limits = open_limits(
        measured.model.device,
        measured.product_dtype,
        measured.num_threads,
        None,
        DEFAULT_PROBE_BYTES,
        time.perf_counter,
    )
    bandwidth, peak = limits.read_bytes_per_s(), limits.flops_per_s()
    del limits
    times = asyncio.run(
        _all_at_once(measured, RequestLengths(num_inputs, num_outputs), num_requests)
    )
    seconds = max(one.arrivals[-1].at_s for one in times) - min(one.submitted_s for one in times)
    head_bytes = kv_head_bytes(measured.spec.head_size, measured.dtype.itemsize, "auto")
    context = num_inputs + num_outputs // 2
    step_bytes = measured.weight_bytes_read(num_requests) + decode_kv_bytes(
        measured.spec, head_bytes, context, num_requests
    )
    prefill_s = num_requests * prefill_flops(measured.spec, num_inputs) / peak
    roofline_s = prefill_s + num_outputs * step_bytes / bandwidth
    first_ms = [1e3 * one.time_to_first_token_s for one in times]
    gaps_ms = [1e3 * gap for one in times for gap in _gaps_s(one)]
    return {
        "case": f"{num_requests} requests of {num_inputs}/{num_outputs}",
        "tokens_per_s": num_requests * num_outputs / seconds,
        "ttft_p50_ms": percentile(first_ms, 0.5),
        "ttft_p99_ms": percentile(first_ms, 0.99),
        "itl_p50_ms": percentile(gaps_ms, 0.5),
        "itl_p99_ms": percentile(gaps_ms, 0.99),
        "roofline_share": roofline_s / seconds,
    }


def _generate(device: str, _: str, shape: str) -> Figures:
    from transformers import AutoConfig, AutoModelForCausalLM

    num_requests, num_inputs, num_outputs = _SERVED[device]
    sizes = dict(SHAPES[shape])
    model_type = str(sizes.pop("architectures")[0]).removesuffix("ForCausalLM").lower()  # type: ignore[index]
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(model_type, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        prompts = torch.randint(0, config.vocab_size, (num_requests, num_inputs))
    seconds = []
    for _ in range(_WARM_UPS):
        started_s = time.perf_counter()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=num_outputs,
            max_new_tokens=num_outputs,
            pad_token_id=0,
        )
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return {
        "case": f"{num_requests} requests of {num_inputs}/{num_outputs}, one batch",
        "tokens_per_s": num_requests * num_outputs / min(seconds),
    }


async def _all_at_once(
    measured: MeasuredEngine, lengths: RequestLengths, num_requests: int
) -> list[RequestTimes]:
    """The last of a few rounds: the first ones compile kernels and record steps."""
    rng = random.Random(0)
    await measured.engine.start()
    try:
        for _ in range(_WARM_UPS + 1):
            prompts = [
                random_prompt(rng, measured.model.vocab_size, lengths.num_inputs)
                for _ in range(num_requests)
            ]
            times = await asyncio.gather(
                *(run_request(measured, prompt, lengths.num_outputs) for prompt in prompts)
            )
        return list(times)
    finally:
        await measured.engine.stop()


def _gaps_s(times: RequestTimes) -> Iterator[float]:
    for before, after in pairwise(times.arrivals):
        yield (after.at_s - before.at_s) / after.num_tokens


# Printed by the started process, one name and number a line; `started` is of the same clock.
_FIRST_TOKEN = """
import sys, time
started, path, device, kernels = float(sys.argv[1]), *sys.argv[2:]
before = time.time()
import torch
imported = time.time()
if device == "cuda":
    torch.zeros(1, device=device)
began = time.time()
from quickstep import LLM, SamplingParams
with LLM(path, device=device, kernels=kernels, max_model_len=512) as llm:
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=1, temperature=0.0))
    print("total_s", time.time() - started)
print("import_torch_s", imported - before)
print("cuda_s", began - imported)
"""


def _cold_start(device: str, kernels: str, shape: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        _write_random_checkpoint(Path(folder), shape)
        args = [str(time.time()), folder, device, kernels]
        ran = subprocess.run(
            [sys.executable, "-c", _FIRST_TOKEN, *args], capture_output=True, text=True
        )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    pairs = [line.split() for line in ran.stdout.splitlines()]
    figures = {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}
    return {"case": f"{shape}, random weights in a checkpoint", **figures}


def _write_random_checkpoint(folder: Path, shape: str) -> None:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = dict(SHAPES[shape])
    spec = parse_spec(config)
    sizes = dict(outer_tensors(spec, "model.", "lm_head.weight"))
    for index in range(spec.num_layers):
        sizes |= layer_tensors(spec, "model.", index)
    generator = torch.Generator().manual_seed(0)
    block = (torch.randn(1 << 20, generator=generator) * 0.02).to(torch.bfloat16)
    weights = {
        name: block.repeat(-(-torch.Size(size).numel() // block.numel()))[
            : torch.Size(size).numel()
        ].reshape(size)
        for name, size in sizes.items()
    }
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


_MEASURES: dict[str, Callable[[str, str, str], object]] = {
    "attention": _attention,
    "exactness": _exactness,
    "served": _served,
    "generate": _generate,
    "cold-start": _cold_start,
}


if __name__ == "__main__":
    sys.exit(main())
