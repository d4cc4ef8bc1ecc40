"""An engine on native kernels never imports torch, and answers to the bit as it does with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_outputs import FORMATS, answers
from gguf import GGMLQuantizationType as Kind
from gguf_models import KINDS, MIXTURES, write_model
from golden_cases import Case
from msgspec.structs import replace
from published_formats import EXACT, ROUNDED_AGAIN
from quantized_checkpoint import write_quantized
from tiny_checkpoint import VOCAB, write_tokenizer

from quickstep import LLM, SamplingParams
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.loader import load_model, reason_for_torch
from quickstep.model.spec import read_spec
from quickstep.ops.native.backend import load_native
from quickstep.ops.native.recorder import NativeRecorder, NotCapturable
from quickstep.ops.tensors import (
    BFLOAT16,
    CPU,
    FLOAT16,
    FLOAT32,
    DType,
    HostTensor,
    rounded,
    to_numpy,
    to_torch,
    torch_dtype,
)
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.steps.captured import CapturedSteps
from quickstep.runtime.steps.eager import with_torch_kv, with_torch_tensors
from quickstep.runtime.steps.opening import open_steps

_SCRIPT = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refusing())
import json
from engine_outputs import FORMATS, answers

print(json.dumps([answers(*one) for one in FORMATS]))
"""

# ordinary, ties both ways, the largest, infinities, subnormal, not a number
_VALUES = [1.0, -3.1415927, 1.00390625, 1.01171875, 65504.0, 3.4e38, -np.inf, 1e-40, np.nan, 0.0]


def test_an_engine_that_cannot_import_torch_answers_to_the_bit_as_one_that_runs_on_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1] / "support",
        env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for form, got in zip(FORMATS, found, strict=True):
        assert got == answers(*form, enforce_eager=True), form


@pytest.mark.parametrize("source", [FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("target", [FLOAT32, BFLOAT16, FLOAT16])
def test_floating_point_is_converted_as_torch_does(source: DType, target: DType) -> None:
    values = torch.tensor(_VALUES).to(torch_dtype(source))
    host = as_host(values, source)
    assert torch.equal(bits(to_torch(host)), bits(values))
    got, expected = to_torch(host.to(target)), values.to(torch_dtype(target))
    is_number = ~expected.isnan()
    assert got.dtype == expected.dtype and torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(bits(got[is_number]), bits(expected[is_number]))
    for value in (0.1, 33.941125, 1e-3):
        assert rounded(value, target) == rounded(value, torch_dtype(target))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def test_slices_and_shapes_of_a_host_tensor_are_views() -> None:
    whole = HostTensor.empty((4, 6), FLOAT32)
    whole.numpy()[:] = np.arange(24).reshape(4, 6)
    row = whole[1:3]
    assert (row.shape, row.stride(0), row.data_ptr()) == ((2, 6), 6, whole.data_ptr() + 24)
    columns = whole[:, 2:4]
    assert not columns.is_contiguous() and columns.contiguous().is_contiguous()
    assert whole.view(2, 12).shape == (2, 12) and whole.data_ptr() % 64 == 0
    to_torch(whole)[0, 0] = 7.0
    assert whole.numpy()[0, 0] == 7.0


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_logits_of_host_tensors_are_host_tensors_with_the_bits_of_torch(dtype: DType) -> None:
    ops = load_native(2)
    assert ops is not None
    generator = torch.Generator().manual_seed(5)
    kind = torch_dtype(dtype)
    weight, bias, hidden = (
        torch.randn(shape, generator=generator).to(kind) for shape in ((96, 64), (96,), (3, 64))
    )
    assert ops.pack_linear(weight, bias).bias is None  # the packed weight has a copy of it
    expected = ops.logits(hidden, ops.pack_linear(weight, bias), 1.5, 30.0, None)
    on_host = [as_host(x, dtype) for x in (weight, bias, hidden)]
    got = ops.logits(on_host[2], ops.pack_linear(on_host[0], on_host[1]), 1.5, 30.0, None)
    assert isinstance(got, HostTensor) and got.dtype == FLOAT32
    assert np.array_equal(got.numpy(), to_numpy(expected))


def as_host(x: torch.Tensor, dtype: DType) -> HostTensor:
    stored = x.view(torch.int16) if dtype == BFLOAT16 else x
    return HostTensor(stored.numpy().view(dtype.storage), dtype)


def test_slots_and_block_tables_cannot_be_read_while_a_step_is_recorded() -> None:
    ops = load_native(1)
    assert ops is not None
    recorder = NativeRecorder(16)
    table = recorder.table(ops)
    weight = HostTensor.empty((8, 4), FLOAT32)
    rows = table.embedding(recorder.layout.positions, weight, FLOAT32)
    for unread in (recorder.layout.slot_mapping, recorder.layout.block_tables):
        with pytest.raises(NotCapturable):
            table.embedding(unread, weight, FLOAT32)
        with pytest.raises(NotCapturable):
            table.rms_norm(rows, unread, 1e-6, 0.0)
        with pytest.raises(NotCapturable):
            _ = rows[unread]


def test_a_model_in_host_tensors_can_be_run_op_by_op_on_the_same_memory() -> None:
    load = LoadConfig(model="demo", device="cpu")
    checkpoint, ops = find_checkpoint(load), load_native(2)
    assert ops is not None
    spec = read_spec(checkpoint.path)
    assert not reason_for_torch(ops, load)
    model = load_model(checkpoint, spec, ops, load, on_host=True)
    kv = allocate_kv(model.kv_layout, 4, 16, model.device)
    assert model.device == CPU and isinstance(kv.keys[0], HostTensor)
    assert isinstance(open_steps(model, kv, 16, enforce_eager=False), CapturedSteps)
    seen = with_torch_tensors(model)
    assert isinstance(seen.weights.final_norm, torch.Tensor)
    assert seen.weights.final_norm.data_ptr() == model.weights.final_norm.data_ptr()
    assert with_torch_kv(kv).keys[0].data_ptr() == kv.keys[0].data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_are_converted_as_torch_converts_them(dtype: str, quantization: str | None) -> None:
    load = LoadConfig(model="demo", device="cpu", dtype=dtype, quantization=quantization)
    checkpoint, ops = find_checkpoint(load), load_native(1)
    assert ops is not None
    spec = read_spec(checkpoint.path)
    assert not reason_for_torch(ops, load)
    found = load_model(checkpoint, spec, ops, load, on_host=True)
    by_torch = load_model(checkpoint, spec, replace(ops, load_linear=None), load)
    x = torch.eye(spec.hidden_size, dtype=getattr(torch, dtype))
    for layer, expected in zip(found.weights.layers, by_torch.weights.layers, strict=True):
        same = ops.linear(x, layer.mixer.qkv), ops.linear(x, expected.mixer.qkv)
        assert torch.equal(*same)


def run_without_torch(*command: str) -> subprocess.CompletedProcess[str]:
    """`quickstep COMMAND` where torch is not installed."""
    script = "import sys; sys.modules['torch'] = None; from quickstep.cli.main import main; "
    return subprocess.run(
        [sys.executable, "-c", f"{script} sys.exit(main(sys.argv[1:]))", *command],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_mixture_of_experts_runs_where_torch_is_not_installed(
    quantization: str | None, tmp_path: Path
) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": VOCAB}
    Case("mixture", "Mixtral", sizes | {"eos_token_id": 256}).save(tmp_path)
    write_tokenizer(tmp_path)
    options = ["--model", str(tmp_path), "--temperature", "0.5", "--seed", "3"]
    options += ["--max-tokens", "9"]
    if quantization is not None:
        options += ["--quantization", quantization]
    done = run_without_torch("generate", "some text", *options)
    assert done.returncode == 0, done.stderr
    llm = LLM(str(tmp_path), quantization=quantization, enforce_eager=True, device="cpu")
    try:
        sampling = SamplingParams(temperature=0.5, seed=3, max_tokens=9)
        (output,) = llm.generate(["some text"], sampling, use_tqdm=False)
    finally:
        llm.close()
    assert output.outputs[0].text and output.outputs[0].text in done.stdout


_LOADING_SCRIPT = """
import sys

sys.modules["torch"] = None
import json
from quickstep import LLM, SamplingParams

found = []
for path in json.loads(sys.argv[1]):
    with LLM(path, device="cpu", num_threads=1) as llm:
        sampling = SamplingParams(temperature=0.5, seed=3, max_tokens=9)
        found.append(llm.generate(["some text"], sampling, use_tqdm=False)[0].outputs[0].token_ids)
print(json.dumps([list(ids) for ids in found]))
"""


def test_files_of_every_format_run_where_torch_is_not_installed(tmp_path: Path) -> None:
    cases = ("awq-g32", "gptq4-g32", "gptq8-g64", "packed4-asymmetric", "w8a8", "naive4-g16")
    cases += ("float8-channel", "fp8-block", "bnb-int8", "gptq-act-order", "nf4-nested")
    cases += ("modelopt-nvfp4", "packed-nvfp4")
    paths = [tmp_path / case for case in cases]
    for path, case in zip(paths, cases, strict=True):
        write_quantized(path, *(EXACT | ROUNDED_AGAIN)[case])
        write_tokenizer(path)
    done = subprocess.run(
        [sys.executable, "-c", _LOADING_SCRIPT, json.dumps([str(path) for path in paths])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for path, got in zip(paths, json.loads(done.stdout.splitlines()[-1]), strict=True):
        with LLM(str(path), device="cpu", enforce_eager=True) as llm:
            sampling = SamplingParams(temperature=0.5, seed=3, max_tokens=9)
            (output,) = llm.generate(["some text"], sampling, use_tqdm=False)
        assert got == list(output.outputs[0].token_ids), path.name


# files mix types by tensor: these are those of Q4_K_M, and of smaller files
_SMALLER = {
    **{"q_proj": Kind.IQ4_XS, "k_proj": Kind.IQ4_NL, "v_proj": Kind.Q8_0, "o_proj": Kind.Q3_K},
    **{"gate_proj": Kind.Q2_K, "up_proj": Kind.Q3_K, "down_proj": Kind.TQ2_0},
    **{"embed_tokens": Kind.Q5_0, "lm_head": Kind.F16},
}


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        ("llama", KINDS),
        ("llama", _SMALLER),
        ("qwen2", KINDS),
        *(("llama", kinds) for kinds in MIXTURES.values()),
    ],
)
def test_a_gguf_file_runs_where_torch_is_not_installed(
    architecture: str, kinds: dict[str, Kind], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    families = {"qwen2": {"architectures": ["Qwen2ForCausalLM"]}}
    write_model(path, architecture, kinds, **families.get(architecture, {}))
    options = ["--model", str(path), "--temperature", "0.5", "--seed", "3", "--max-tokens", "9"]
    done = run_without_torch("generate", "some text", *options)
    assert done.returncode == 0, done.stderr
    llm = LLM(str(path), enforce_eager=True, device="cpu")
    try:
        sampling = SamplingParams(temperature=0.5, seed=3, max_tokens=9)
        (output,) = llm.generate(["some text"], sampling, use_tqdm=False)
    finally:
        llm.close()
    assert output.outputs[0].text and output.outputs[0].text in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("demo",),
        ("generate", "x", "--dtype", "float32"),
        ("doctor", "--no-bandwidth"),
        ("verify", "--requests", "2"),
    ],
)
def test_commands_run_where_torch_is_not_installed(command: tuple[str, ...]) -> None:
    done = run_without_torch(*command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (("generate", "x", "--enforce-eager"), "--enforce-eager"),
        (("generate", "x", "--device", "cuda"), "--device cuda"),
        (("bench", "step"), "quickstep bench step"),
    ],
)
def test_what_needs_torch_is_named_in_one_sentence(command: tuple[str, ...], what: str) -> None:
    done = run_without_torch(*command)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert what in done.stderr and "pip install '.[torch]'" in done.stderr
