"""Compiles Triton's kernels for a GPU with the arguments that steps of the engine give them.

    python tools/compile_kernels.py [--jobs N] [--only TEXT] [--json]

Needs no GPU: steps run on tensors without memory (torch's `FakeTensorMode`) that say they are on
one, and each launch is compiled only, for an H100 where there is no other. So it finds what the
interpreter accepts and the compiler does not, kernels that need more shared memory than the GPU
has, and registers that spill. A step that reads a tensor on the host, which no CUDA graph can
repeat, fails as well. With a GPU, what is compiled stays in Triton's cache for the first steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
import triton
from msgspec.structs import replace
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from quickstep.bench.shapes import SHAPES
from quickstep.model import quantize
from quickstep.model.adapters.lora_modules import lora_modules
from quickstep.model.checkpoint.random_weights import RandomTensors, RandomValues, random_model
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.interface import EmittingTokens, ForwardBatch
from quickstep.model.spec import parse_spec
from quickstep.ops.table import LoRAAdapter, LoRAMapping, LoRAPart, OpTable, PagedLayout, RowLengths
from quickstep.ops.triton.backend import load_triton
from quickstep.ops.triton.sampling.records import NUM_FIELDS, Edits, SamplingRecords
from quickstep.ops.triton.sampling.row_keys import row_keys_
from quickstep.ops.triton.sampling.sample import sample
from quickstep.ops.triton.sampling.token_scores import token_scores
from quickstep.runtime.cache.kv_cache import allocate_kv

GPU = torch.device("cuda", 0)
_H100 = GPUTarget("cuda", 90, 32)
_SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
_BLOCK_SIZE, _MAX_MODEL_LEN = 16, 4096
_PROMPT_TOKENS = 2048

_LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,  # the last one has no long prefill: only tokens that emit are computed
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
# Families whose steps have what that of Llama lacks.
_FAMILIES: Mapping[str, dict[str, object]] = {
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
    },
}


class Compiled(msgspec.Struct, frozen=True):
    """One variant of a kernel.

    Attributes:
        arguments: What it was compiled for.
        shared_bytes: Shared memory of a program.
        spilled_bytes: Registers of a thread that are in memory, with what else is on its stack.
        fp64_instructions: Its instructions in fp64, each once.
        matrix_instructions: Those of matrix units, each once.
    """

    kernel: str
    arguments: str
    num_warps: int
    shared_bytes: int
    num_registers: int
    spilled_bytes: int
    fp64_instructions: tuple[str, ...]
    matrix_instructions: tuple[str, ...]


class Case(msgspec.Struct, frozen=True):
    """Steps of a model, or sampling where there is none."""

    name: str
    config: Mapping[str, object] | None = None
    quantization: str | None = None
    kv_dtype: str = "auto"
    dtype: str = "bfloat16"


def cases() -> Iterator[Case]:
    """Everything that is compiled: the longest first, so that processes end together."""
    for name, values in _FAMILIES.items():
        yield Case(name, _LLAMA | values)
    for name in ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-0.5b"):
        config = {**SHAPES[name], "num_hidden_layers": 2}
        yield Case(name, config)
        if name == "llama-3.1-8b":
            for quantization in ("fp8", "int8", "int4"):
                yield Case(f"{name} {quantization}", config, quantization)
    for quantization in ("fp8", "int8", "int4"):
        yield Case(f"mixtral {quantization}", _LLAMA | _FAMILIES["mixtral"], quantization)
    for kv_dtype in ("int8", "fp8"):
        yield Case(f"llama, {kv_dtype} KV", _LLAMA, kv_dtype=kv_dtype)
    yield Case("llama, fp32", _LLAMA, dtype="float32")
    yield Case("sampling")


class _AsOps(TorchFunctionMode):
    """Methods that a torch without CUDA refuses before they become ops."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.Tensor.__getitem__:
            return _indexed(*args)
        if func is torch.Tensor.__setitem__:
            tensor, index, value = args
            if isinstance(index, torch.Tensor):
                return tensor.index_put_((index,), value)
            return torch.ops.aten.copy_(_indexed(tensor, index), torch.as_tensor(value))
        if func is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not(*args)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        if func is torch.Tensor.contiguous and not args[0].is_contiguous():
            return torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _indexed(tensor: torch.Tensor, index: object) -> torch.Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
        place = next(place for place, one in enumerate(parts) if one is Ellipsis)
        num_missing = tensor.dim() - sum(part is not None for part in parts) + 1
        parts[place : place + 1] = [slice(None)] * num_missing
    aten = torch.ops.aten
    indices: list[torch.Tensor | None] = []
    for one in parts:
        dim = len(indices)
        if one is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(one, slice):
            tensor = aten.slice(tensor, dim, one.start, one.stop, one.step or 1)
        elif isinstance(one, int):
            tensor = aten.select(tensor, dim, one)
            continue
        indices.append(torch.as_tensor(one) if isinstance(one, torch.Tensor | list) else None)
    return aten.index(tensor, indices) if any(one is not None for one in indices) else tensor


class _Driver:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_case(case: Case) -> list[Compiled]:
    """Run the steps of a case and compile what they launch. Raises what the compiler raises."""
    found: dict[str, Compiled] = {}
    target = _H100
    if torch.cuda.is_available():
        target = driver.active.get_current_target()
    else:
        driver.set_active(_Driver(target))
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: Any, **named: Any) -> object:
        compiled = run(
            self,
            *map(_without_memory, args),
            grid=grid,
            warmup=True,
            **{name: _without_memory(value) for name, value in named.items()},
        )
        if compiled.hash not in found:
            found[compiled.hash] = _described(self, compiled, args, named)
        return compiled

    patches = [
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(FakeTensor, "data_ptr", lambda _: 0),
        mock.patch.object(RandomTensors, "_fill_", lambda *_: None),  # needs the GPU's generator
        mock.patch.object(quantize, "rounding_error", lambda *_: 0.0),  # reads it
    ]
    if not torch.cuda.is_available():
        patches.append(mock.patch.object(torch.cuda, "get_device_name", lambda _: "H100"))
        patches.append(mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)))
        properties = SimpleNamespace(multi_processor_count=132)
        patches.append(mock.patch.object(torch.cuda, "get_device_properties", lambda _: properties))
    ops = load_triton(GPU)
    assert ops is not None
    for patch in patches:
        patch.start()
    try:
        with _AsOps(), FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            if case.config is None:
                _run_sampling()
            else:
                _run_steps(case, parse_spec(case.config), ops)
    finally:
        for patch in patches:
            patch.stop()
    most = _SHARED_BYTES.get(int(target.arch), 101_376)
    for one in found.values():
        if one.shared_bytes > most:
            raise RuntimeError(f"{one.kernel} needs {one.shared_bytes} B of shared memory: {one}")
    return list(found.values())


def _without_memory(value: object) -> object:
    return MockTensor(value.dtype, list(value.shape)) if isinstance(value, torch.Tensor) else value


def _described(
    kernel: JITFunction, compiled: Any, args: tuple[object, ...], named: Mapping[str, object]
) -> Compiled:
    values = dict(zip(kernel.arg_names, args, strict=False)) | dict(named)
    texts = [f"{name}={_text(value)}" for name, value in values.items()]
    registers, stack = _registers(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    instructions = sorted(set(re.findall(r"^\s*(\w[\w.]*\.f64)\s", ptx, re.MULTILINE)))
    products = sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", ptx)))
    return Compiled(
        kernel.__name__.removeprefix("_"),
        ", ".join(texts),
        compiled.metadata.num_warps,
        compiled.metadata.shared,
        registers,
        stack,
        tuple(instructions),
        tuple(products),
    )


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of the stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        ran = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", ran.stdout + ran.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no registers: {ran.stdout}{ran.stderr}")
    return int(found[1]), int(found[2])


def _run_steps(case: Case, spec: ModelSpec, ops: OpTable) -> None:
    """A prefill and a tree of drafts op by op, and decode steps as they are recorded, also with
    adapters.
    """
    dtype = getattr(torch, case.dtype)
    values = RandomValues(dtype, GPU, 0, case.quantization)
    model = random_model(spec, ops, values, _MAX_MODEL_LEN)
    kv_layout = model.kv_layout.stored_as(case.kv_dtype)
    kv = allocate_kv(kv_layout, 64, _BLOCK_SIZE, GPU)

    def run(batch: ForwardBatch) -> None:
        model.logits(model.forward(batch, kv), None if batch.emitting else batch.lora)

    run(_prefill(_PROMPT_TOKENS))
    for num_rows, num_tokens in ((1, 1), (8, 8), (64, 64), (4, 12)):
        run(_recorded(num_rows, num_tokens, None))
    run(_tree(8))
    ops.move_kv(kv, [(1, 0)])
    adapter = _adapter(spec, ops, dtype)
    assert ops.adapter_table is not None
    table = ops.adapter_table([adapter], 3)
    for num_rows in (1, 8):
        places = torch.zeros(num_rows, dtype=torch.int64, device=GPU)
        run(_recorded(num_rows, num_rows, table.mapping(places)))


def _layout(num_rows: int, num_tokens: int, width: int) -> PagedLayout:
    numbers = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
    return PagedLayout(
        positions=numbers,
        slot_mapping=torch.zeros_like(numbers),
        row_offsets=(),
        context_lens=(),
        block_tables=torch.zeros(num_rows, width, dtype=torch.int32, device=GPU),
        block_size=_BLOCK_SIZE,
        lengths=RowLengths(torch.zeros(num_rows + 1, dtype=torch.int32, device=GPU)),
    )


def _prefill(num_tokens: int) -> ForwardBatch:
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
    width = num_tokens // _BLOCK_SIZE
    last = EmittingTokens(token_ids[:1], _layout(1, 1, width))
    # not a recorded step: a long prefill has a variant of its own
    layout = replace(
        _layout(1, num_tokens, width), row_offsets=(0, num_tokens), context_lens=(num_tokens,)
    )
    return ForwardBatch(token_ids, layout, last)


def _tree(num_drafts: int) -> ForwardBatch:
    """A sequence with drafts, each a row of the attention of its own."""
    num_tokens, width = 1 + num_drafts, _MAX_MODEL_LEN // _BLOCK_SIZE
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
    layout = _layout(num_tokens, num_tokens, width)
    assert layout.lengths is not None
    lengths = replace(
        layout.lengths,
        tail_offsets=layout.lengths.row_offsets,
        tail_slots=torch.zeros_like(token_ids),
    )
    return ForwardBatch(token_ids, replace(layout, lengths=lengths))


def _recorded(num_rows: int, num_tokens: int, lora: LoRAMapping | None) -> ForwardBatch:
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
    width = _MAX_MODEL_LEN // _BLOCK_SIZE
    return ForwardBatch(token_ids, _layout(num_rows, num_tokens, width), None, lora)


def _adapter(spec: ModelSpec, ops: OpTable, dtype: torch.dtype) -> LoRAAdapter:
    rank = 16
    found = lora_modules(spec).values()
    modules: list[list[LoRAPart]] = [[] for _ in range(1 + max(one.number for one in found))]
    for one in found:
        a = torch.empty(rank, one.num_inputs, dtype=dtype, device=GPU)
        b = torch.empty(one.num_outputs, rank, dtype=dtype, device=GPU)
        shaped = a.T.contiguous() if one.is_embedding else a
        part = LoRAPart(shaped, b, one.first_output, 0.1, one.is_embedding)
        modules[one.number].append(part)
    return ops.pack_lora(modules)


def _run_sampling() -> None:
    """Rows with everything, and rows with nothing, of one and of many logits."""
    for num_rows, vocab_size in ((1, 151_936), (64, 128_256), (8, 1000)):
        logits = torch.empty(num_rows, vocab_size, device=GPU)
        rows = torch.empty(num_rows, NUM_FIELDS, dtype=torch.int64, device=GPU)
        row_keys_(rows)
        sample(logits, SamplingRecords(rows))
        places = torch.empty(100, dtype=torch.int64, device=GPU)
        edits = Edits(places, torch.empty(100, dtype=torch.float64, device=GPU))
        every = SamplingRecords(
            rows=rows,
            num_changed=num_rows,
            num_banned=num_rows,
            num_filtered=num_rows,
            counts=torch.empty(4, vocab_size, dtype=torch.int32, device=GPU),
            masks=torch.empty(num_rows, -(-vocab_size // 64), dtype=torch.int64, device=GPU),
            ban_places=places,
            ban_lists=torch.empty(100, dtype=torch.int8, device=GPU),
            set_edits=edits,
            added_edits=(edits, edits),
        )
        token_ids = sample(logits, every)
        for num_top in (0, 5):
            token_scores(logits, token_ids, num_top)


def _outcome(case: Case) -> tuple[str, list[Compiled], str, float]:
    started_s = time.monotonic()
    try:
        found, error = compile_case(case), ""
    except Exception:
        found, error = [], traceback.format_exc()
    return case.name, found, error, time.monotonic() - started_s


def _outcomes(
    chosen: list[Case], num_jobs: int
) -> Iterator[tuple[str, list[Compiled], str, float]]:
    if num_jobs == 1:
        yield from map(_outcome, chosen)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(_outcome, case) for case in chosen]):
            yield future.result()


def main() -> int:
    """Compile all cases. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python tools/compile_kernels.py")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with this in their names")
    parser.add_argument("--json", action="store_true", help="print every variant as JSON")
    args = parser.parse_args()
    is_failed = False
    variants: dict[str, list[Compiled]] = {}
    for name, found, error, seconds in _outcomes(
        [case for case in cases() if args.only in case.name], args.jobs
    ):
        print(f"{name}: {'failed' if error else len(found)}, {seconds:.0f} s", file=sys.stderr)
        if error:
            is_failed = True
            print(error, file=sys.stderr)
        for one in found:
            variants.setdefault(one.kernel, []).append(one)
    if args.json:
        every = [one for found in variants.values() for one in found]
        print(json.dumps(msgspec.to_builtins(every)))
        return int(is_failed)
    print("| kernel | variants | registers | spilled B | shared B |\n|---|---|---|---|---|")
    for name, found in sorted(variants.items()):
        most = [
            max(read(one) for one in found)
            for read in (_num_registers, _spilled_bytes, _shared_bytes)
        ]
        print(f"| {name} | {len(found)} | {' | '.join(map(str, most))} |")
    return int(is_failed)


def _num_registers(one: Compiled) -> int:
    return one.num_registers


def _spilled_bytes(one: Compiled) -> int:
    return one.spilled_bytes


def _shared_bytes(one: Compiled) -> int:
    return one.shared_bytes


if __name__ == "__main__":
    sys.exit(main())
