"""`python -m benchmarks.gpu_measures WHAT`: engines on random weights, for `benchmarks.gpu`.

    steps           decode steps and prefills in one engine; with --profile, kernels of a step
    served          requests at the same time: tokens/s, first token, gaps, part of the roofline
    generate        the same requests through `generate` of transformers: dynamic and static cache
    generate-batch  the same through its `generate_batch`, with CUDA graphs
    exact           two layers of a model: requests alone, in a batch, and in one without graphs
    cold-start      processes from their start to their first token; torch's import and CUDA apart

Each prints a JSON object a line, as soon as it is known.
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
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch

from quickstep.bench.lengths import RequestLengths
from quickstep.bench.limits import DEFAULT_PROBE_BYTES, Limits, gpu_limits, open_limits
from quickstep.bench.measured_engine import (
    MeasuredEngine,
    RequestTimes,
    open_shape,
    random_prompt,
    run_request,
)
from quickstep.bench.serve import percentile
from quickstep.bench.shapes import SHAPES
from quickstep.bench.step import StepOptions, figures, measure_steps, sized_for_steps
from quickstep.bench.step_profile import profile_steps
from quickstep.bench.work import decode_kv_bytes, prefill_flops
from quickstep.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.model.checkpoint.tensor_schema import layer_tensors, outer_tensors
from quickstep.model.sizing import kv_head_bytes
from quickstep.model.spec import parse_spec
from quickstep.sampling_params import SamplingParams

# prompt and output length
_SERVED = {"cuda": (512, 128), "cpu": (32, 8)}
_MOST_KERNELS = 14  # of a profile
_REPEATS = 3
_COLD_STARTS = 2

# weights and KV cache whose bits are compared
_FORMATS = ((None, "auto"), ("int4", "auto"), ("fp8", "int8"))
_NUM_EXACT = 12

Row = dict[str, object]
Output = tuple[list[int], list[object]]


def main() -> int:
    """Measure one thing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_measures")
    parser.add_argument("what", choices=sorted(_MEASURES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--requests", type=int, nargs="+", default=[64], metavar="N")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512], metavar="TOKENS")
    parser.add_argument("--profile", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--trace", type=Path, help="Chrome trace of the first profile")
    args = parser.parse_args()
    _MEASURES[args.what](args)
    return 0


def _print(row: Row) -> None:
    print(json.dumps(row), flush=True)


def _limits(args: argparse.Namespace) -> Limits:
    """Before an engine opens, which captures graphs."""
    if args.device == "cuda":
        return gpu_limits(torch.device("cuda"), "auto")
    cpu, clock = torch.device("cpu"), time.perf_counter
    return open_limits(cpu, torch.bfloat16, None, None, DEFAULT_PROBE_BYTES // 8, clock)


def _steps(args: argparse.Namespace) -> None:
    limits = _limits(args)
    largest = StepOptions(
        max([*args.batches, *args.profile]), prefill=max(args.prompts), repeats=_REPEATS
    )
    load = LoadConfig(
        "demo", device=args.device, kernels=args.kernels, quantization=args.quantization
    )
    config = EngineConfig(
        load=load,
        cache=CacheConfig(kv_dtype=args.kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_seqs=largest.batch),
        speculation=SpeculationConfig(proposers=()),
        seed=0,
    )
    measured = open_shape(sized_for_steps(config, largest), args.shape, SHAPES[args.shape], 0)
    asyncio.run(_measure_steps(args, measured, limits))


async def _measure_steps(
    args: argparse.Namespace, measured: MeasuredEngine, limits: Limits
) -> None:
    await measured.engine.start()
    try:
        # a prompt next to each batch; those that are left over get a short one
        for batch, prompt in zip_longest(args.batches, args.prompts):
            options = StepOptions(batch or 1, prefill=prompt or min(args.prompts), repeats=_REPEATS)
            samples = await measure_steps(measured, limits, options)
            found = {
                name: statistics.median(values)
                for name, values in figures(measured, options, samples).items()
            }
            if batch is not None:
                _print(_decode_row(batch, found))
            if prompt is not None:
                _print(_prefill_row(prompt, found))
        for batch in args.profile:
            trace = args.trace if batch == args.profile[0] else None
            await _print_profile(measured, batch, trace)
    finally:
        await measured.engine.stop()


def _decode_row(batch: int, found: dict[str, float]) -> Row:
    return {
        "batch": batch,
        "decode_ms": found["decode_ms"],
        "tokens_per_s": found["decode_tokens_per_s"],
        "bandwidth_share": found["decode_bandwidth_share"],
        "copy_gb_per_s": found["read_gb_per_s"],
    }


def _prefill_row(prompt: int, found: dict[str, float]) -> Row:
    return {
        "prompt": prompt,
        "prefill_ms": found["prefill_ms"],
        "tokens_per_s": found["prefill_tokens_per_s"],
        "peak_share": found["prefill_peak_share"],
        "peak_tflops": found["peak_tflops"],
    }


async def _print_profile(measured: MeasuredEngine, batch: int, trace: Path | None) -> None:
    """Totals of a step, then its kernels, the longest first."""
    options = StepOptions(batch, steps=16)
    profile = await profile_steps(measured, options, trace)
    num_steps = options.num_outputs
    _print({"profile_of_batch": batch, **profile.figures(num_steps)})
    for kernel in profile.kernels[:_MOST_KERNELS]:
        _print(
            {
                "of_batch": batch,
                "kernel": kernel.name[:100],
                "runs_per_step": kernel.num_runs / num_steps,
                "us_per_step": kernel.total_us / num_steps,
                "us_per_run": kernel.total_us / kernel.num_runs,
            }
        )


def _served(args: argparse.Namespace) -> None:
    limits = _limits(args)
    num_inputs, num_outputs = _SERVED[args.device]
    config = EngineConfig(
        load=LoadConfig("demo", device=args.device, kernels=args.kernels),
        scheduler=SchedulerConfig(max_num_seqs=max(args.requests)),
        speculation=SpeculationConfig(proposers=()),
        max_model_len=num_inputs + num_outputs,
        seed=0,
    )
    measured = open_shape(config, args.shape, SHAPES[args.shape], 0)
    lengths = RequestLengths(num_inputs, num_outputs)
    asyncio.run(_serve_all(measured, lengths, args.requests, limits))


async def _serve_all(
    measured: MeasuredEngine, lengths: RequestLengths, counts: Sequence[int], limits: Limits
) -> None:
    await measured.engine.start()
    try:
        for num_requests in counts:
            rng = random.Random(num_requests)
            for _ in range(2):  # after the first round, all graphs are there
                times = await _all_at_once(measured, rng, lengths, num_requests)
                await measured.engine.wait_until_captured()
            _print(_served_row(measured, lengths, times, limits))
    finally:
        await measured.engine.stop()


async def _all_at_once(
    measured: MeasuredEngine, rng: random.Random, lengths: RequestLengths, num_requests: int
) -> list[RequestTimes]:
    prompts = [
        random_prompt(rng, measured.model.vocab_size, lengths.num_inputs)
        for _ in range(num_requests)
    ]
    return await asyncio.gather(
        *(run_request(measured, prompt, lengths.num_outputs) for prompt in prompts)
    )


def _served_row(
    measured: MeasuredEngine, lengths: RequestLengths, times: list[RequestTimes], limits: Limits
) -> Row:
    num_requests, num_inputs, num_outputs = len(times), lengths.num_inputs, lengths.num_outputs
    seconds = max(timing.arrivals[-1].at_s for timing in times) - min(
        timing.submitted_s for timing in times
    )
    head_size = measured.spec.kv_size.head_size
    head_bytes = kv_head_bytes(head_size, measured.dtype.itemsize, "auto")
    context = num_inputs + num_outputs // 2
    step_bytes = measured.weight_bytes_read(num_requests) + decode_kv_bytes(
        measured.spec, head_bytes, context, num_requests
    )
    prefill_s = num_requests * prefill_flops(measured.spec, num_inputs) / limits.flops_per_s()
    roofline_s = prefill_s + num_outputs * step_bytes / limits.read_bytes_per_s()
    first_ms = [1e3 * timing.time_to_first_token_s for timing in times]
    gaps_ms = [1e3 * gap for timing in times for gap in _gaps_s(timing)]
    return {
        "requests": num_requests,
        "lengths": f"{num_inputs}/{num_outputs}",
        "tokens_per_s": num_requests * num_outputs / seconds,
        "ttft_p50_ms": percentile(first_ms, 0.5),
        "ttft_p99_ms": percentile(first_ms, 0.99),
        "itl_p50_ms": percentile(gaps_ms, 0.5),
        "itl_p99_ms": percentile(gaps_ms, 0.99),
        "roofline_share": roofline_s / seconds,
    }


def _gaps_s(times: RequestTimes) -> Iterator[float]:
    for before, after in pairwise(times.arrivals):
        yield (after.at_s - before.at_s) / after.num_tokens


def _exact(args: argparse.Namespace) -> None:
    shape = {**SHAPES[args.shape], "num_hidden_layers": 2}
    for quantization, kv_dtype in _FORMATS:
        found: dict[str, list[Output]] = {}
        for is_eager in (False, True):
            load = LoadConfig(
                "demo", device=args.device, kernels=args.kernels, quantization=quantization
            )
            config = EngineConfig(
                load=load,
                cache=CacheConfig(kv_dtype=kv_dtype, num_blocks=2048, prefix_caching=False),
                speculation=SpeculationConfig(proposers=()),
                max_model_len=1024,
                enforce_eager=is_eager,
                seed=0,
            )
            measured = open_shape(config, args.shape, shape, 0)
            how = "without graphs" if is_eager else "in a batch"
            found |= asyncio.run(_outputs(measured, how, is_alone=not is_eager))
        expected = found.pop("alone")
        for how, outputs in found.items():
            different = [one != other for one, other in zip(outputs, expected, strict=True)]
            _print(
                {
                    "weights": quantization or "auto",
                    "kv": kv_dtype,
                    "compared": how,
                    "requests": len(expected),
                    "tokens": sum(len(output[0]) for output in expected),
                    "mismatches": sum(different),
                }
            )


async def _outputs(measured: MeasuredEngine, how: str, is_alone: bool) -> dict[str, list[Output]]:
    """Of the same requests together, and if wanted one after another."""
    rng = random.Random(0)
    requests = [
        random_prompt(rng, measured.model.vocab_size, rng.choice((3, 17, 64, 200, 513, 700)))
        for _ in range(_NUM_EXACT)
    ]
    await measured.engine.start()
    try:
        calls = [_output(measured, prompt, seed) for seed, prompt in enumerate(requests)]
        found = {how: list(await asyncio.gather(*calls))}
        if is_alone:
            found["alone"] = [
                await _output(measured, prompt, seed) for seed, prompt in enumerate(requests)
            ]
        return found
    finally:
        await measured.engine.stop()


async def _output(measured: MeasuredEngine, prompt: list[int], seed: int) -> Output:
    """Tokens, and their logprobs."""
    sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=24, logprobs=1)
    token_ids: list[int] = []
    logprobs: list[object] = []
    async with measured.engine.generate(prompt, sampling) as stream:
        async for delta in stream:
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            if delta.error:
                raise SystemExit(f"a request failed: {delta.error}")
    return token_ids, logprobs


def _transformers_model(args: argparse.Namespace) -> Any:
    """Random weights, as ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SHAPES[args.shape])
    (architecture,) = sizes.pop("architectures")  # type: ignore[misc]
    model_type = architecture.removesuffix("ForCausalLM").lower()
    torch.manual_seed(0)
    with torch.device(args.device):
        config = AutoConfig.for_model(model_type, **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _generate(args: argparse.Namespace) -> None:
    num_inputs, num_outputs = _SERVED[args.device]
    model = _transformers_model(args)
    (num_requests,) = args.requests
    prompts = torch.randint(0, model.config.vocab_size, (num_requests, num_inputs))
    prompts = prompts.to(args.device)
    for cache, num_rounds in (("dynamic", 2), ("static", 4)):  # the first ones compile
        for number in range(num_rounds):
            started_s = time.perf_counter()
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=num_outputs,
                max_new_tokens=num_outputs,
                pad_token_id=0,
                **({} if cache == "dynamic" else {"cache_implementation": "static"}),
            )
            if args.device == "cuda":
                torch.cuda.synchronize()
            _print_rate(args, f"{cache} cache", number, time.perf_counter() - started_s)


def _generate_batch(args: argparse.Namespace) -> None:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    num_inputs, num_outputs = _SERVED[args.device]
    model = _transformers_model(args)
    (num_requests,) = args.requests
    generation = GenerationConfig(
        max_new_tokens=num_outputs, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    has_graphs = args.device == "cuda"
    batching = ContinuousBatchingConfig(use_cuda_graph=has_graphs)
    for number in range(3):
        prompts = torch.randint(0, model.config.vocab_size, (num_requests, num_inputs))
        started_s = time.perf_counter()
        results = model.generate_batch(
            prompts.tolist(), generation, batching, persistent_manager=True
        )
        seconds = time.perf_counter() - started_s
        lengths = {len(result.generated_tokens) for result in results.values()}
        if len(results) != num_requests or lengths != {num_outputs}:
            raise SystemExit(f"{len(results)} outputs of {lengths} tokens")
        _print_rate(args, f"CUDA graphs: {has_graphs}", number, seconds)


def _print_rate(args: argparse.Namespace, how: str, number: int, seconds: float) -> None:
    num_requests, num_tokens = args.requests[0], _SERVED[args.device][1]
    rate = num_requests * num_tokens / seconds
    _print({"requests": num_requests, "how": how, "round": number, "tokens_per_s": rate})


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


def _cold_start(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _write_random_checkpoint(Path(folder), args.shape)
        for _ in range(_COLD_STARTS):
            values = [str(time.time()), folder, args.device, args.kernels]
            command = [sys.executable, "-c", _FIRST_TOKEN, *values]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(ran.stderr)
            pairs = [line.split() for line in ran.stdout.splitlines()]
            _print({pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2})


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


_MEASURES: dict[str, Callable[[argparse.Namespace], None]] = {
    "steps": _steps,
    "served": _served,
    "generate": _generate,
    "generate-batch": _generate_batch,
    "exact": _exact,
    "cold-start": _cold_start,
}


if __name__ == "__main__":
    sys.exit(main())
