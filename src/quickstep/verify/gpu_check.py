"""`quickstep doctor --gpu-check`: whether Triton's kernels are right on a GPU.

Random models of a few formats, small ones with the head size of large ones. Each is checked for

    agreement   its logits are near those of the PyTorch reference for the same weights
    bits        requests have the same bits alone, op by op, and in batches, as CUDA graphs
                (`verify.checker`)

Kernels of other head sizes and formats are those of the same source. The time is mostly Triton's
compiler's. Called by `cli.doctor`; `ops.gpu_checks` stores the result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import msgspec
import torch

from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.interface import Model
from quickstep.model.spec import parse_spec
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import to_torch
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.eager import EagerSteps
from quickstep.types import Admission, Phase, SamplingParams, StepRow
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions

_LOGGER = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1024
# Relative to the norm of the reference's logits; a wrong kernel is off by far more, the rounding of
# activations to bf16 by about a hundredth.
_MOST_DIFFERENCE = 0.05
_NUM_REQUESTS = 32  # of a format


class CheckedFormat(msgspec.Struct, frozen=True):
    """A model to check: its name, config, `--quantization`, and `--kv-cache-dtype`."""

    name: str
    config: dict[str, object]
    quantization: str | None = None
    kv_dtype: str = "auto"
    dtype: str = "bfloat16"


class PartResult(msgspec.Struct, frozen=True):
    """What was checked, what came out, and whether it is right."""

    name: str
    detail: str
    has_passed: bool


_LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": _MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
}
_MIXTURE = {
    **_LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}

FORMATS = (
    CheckedFormat("bfloat16", _LLAMA),
    CheckedFormat("int8, int8 KV", _LLAMA, "int8", "int8"),
    CheckedFormat("int4", _LLAMA, "int4"),
    CheckedFormat("fp8, fp8 KV", _LLAMA, "fp8", "fp8"),
    CheckedFormat("mixture of experts", _MIXTURE),
)


def check_kernels(
    ops: OpTable,
    device: torch.device,
    formats: Sequence[CheckedFormat] = FORMATS,
    num_requests: int = _NUM_REQUESTS,
) -> Iterator[PartResult]:
    """Check an op table, part by part; an exception is a failure of its part."""
    for checked in formats:
        spec = parse_spec(checked.config)
        dtype = getattr(torch, checked.dtype)
        values = RandomValues(dtype, device, 1, checked.quantization)
        for name, check in (("agreement", _agreement), ("bits", _bits)):
            try:
                part = check(ops, spec, values, checked, num_requests)
            except Exception as error:  # a kernel that does not compile, or that the GPU refuses
                _LOGGER.exception("the check of %s stopped", checked.name)
                part = PartResult("", f"{type(error).__name__}: {error}", False)
            yield msgspec.structs.replace(part, name=f"{checked.name}: {name}")


def _agreement(
    ops: OpTable, spec: ModelSpec, values: RandomValues, checked: CheckedFormat, _: int
) -> PartResult:
    reference = _logits(random_model(spec, reference_ops(), values, _MAX_MODEL_LEN), checked)
    found = _logits(random_model(spec, ops, values, _MAX_MODEL_LEN), checked)
    difference = float((found - reference).norm() / reference.norm())
    detail = f"logits differ by {difference:.1e} of their norm"
    return PartResult("", detail, difference <= _MOST_DIFFERENCE)


def _logits(model: Decoder, checked: CheckedFormat) -> torch.Tensor:
    """Of a prompt with chunks, next to a short one, and of a decode step after them; in fp64."""
    length = min(300, model.max_model_len // 2)
    prompt = tuple([(7 * index + 3) % model.vocab_size for index in range(length)])
    num_blocks = -(-(length + 1) // _BLOCK_SIZE)
    kv_layout = model.kv_layout.stored_as(checked.kv_dtype)
    kv = allocate_kv(kv_layout, num_blocks + 1, _BLOCK_SIZE, model.device)
    steps = EagerSteps(model, kv, _BLOCK_SIZE)
    slots = []
    for index, block_ids in enumerate((range(num_blocks), (num_blocks,))):
        admission = Admission(index, f"r#{index}", prompt, length, SamplingParams(), 0)
        slots.append(Slot(admission, model.vocab_size))
        slots[-1].append_blocks(tuple(block_ids))

    def row(slot: int, start: int, token_ids: tuple[int, ...]) -> StepRow:
        return StepRow(slot, start, len(token_ids), token_ids, (), Phase.PREFILL, True, 0)

    half = length // 2
    found = []
    for rows in (
        [row(0, 0, prompt[:half]), row(1, 0, prompt[:5])],
        [row(0, half, prompt[half:])],
        [row(0, length, (5,)), row(1, 5, (9,))],
    ):
        steps.prepare(rows, [slots[row.slot] for row in rows])
        _, logits = steps.run([(index, 0) for index in range(len(rows))], every_token=False)
        found.append(to_torch(logits).double().clone())
    return torch.cat(found)


def _bits(
    ops: OpTable,
    spec: ModelSpec,
    values: RandomValues,
    checked: CheckedFormat,
    num_requests: int,
) -> PartResult:
    def load(_: int) -> Model:
        return random_model(spec, ops, values, _MAX_MODEL_LEN)

    adapters = 0 if values.quantization else 2
    options = VerifyOptions(
        num_requests, threads=(1,), kv_dtype=checked.kv_dtype, num_adapters=adapters
    )
    report = verify(load, options)
    detail = f"{report.mismatches} of {report.comparisons} sequences in batches differ"
    if report.first_mismatch is not None:
        one = report.first_mismatch
        detail += f", first in {one.scenario!r} at token {one.position}"
    return PartResult("", detail, report.mismatches == 0)
