"""gpt-oss as it was released, in MXFP4; models with sinks are exact, and need no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_twins import write_twin
from golden_cases import CASES, VOCAB, Case
from golden_harness import NUM_NEW, PROMPT_LENS, assert_same_as_transformers, load, random_prompts
from msgspec.structs import replace
from mxfp4_checkpoint import GPT_OSS, edit_config, mxfp4_config, save_mxfp4
from naive_ops import NAIVE_OPS
from paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quickstep.cli.main import main
from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.assembly import load_weights
from quickstep.engine.memory_plan import expected_plan
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.safetensors_files import open_tensor_file
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_weights import MoEWeights
from quickstep.model.formats.fused_experts import FusedExperts
from quickstep.model.formats.fused_experts_source import FusedExpertsSource
from quickstep.model.interface import Model
from quickstep.model.loader import load_model, quantized_weight_bytes, reason_for_torch
from quickstep.model.quantization import MatrixFormat
from quickstep.model.sizing import weight_bytes
from quickstep.model.spec import read_spec
from quickstep.ops.native.backend import load_native
from quickstep.ops.reference import reference_ops
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.weights import LinearWeight
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions

CPU = torch.device("cpu")
GRANITE = next(case for case in CASES if case.name == "granite-swa")


def edit_tensors(path: Path, **values: Tensor) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | values, file, metadata={"format": "pt"})


def weights_of(path: Path, *, natively: bool = True) -> int | None:
    """Bytes that the plan has for the weights of a checkpoint, in bfloat16."""
    return quantized_weight_bytes(path, read_spec(path), None, 2, natively=natively)


def matrices_of(model: Model) -> list[LinearWeight]:
    """Those of all experts."""
    assert isinstance(model, Decoder)
    found = []
    for layer in model.weights.layers:
        assert isinstance(layer.mlp, MoEWeights)
        found += [*layer.mlp.experts.gate_up, *layer.mlp.experts.down_proj]
    return found


def logits(model: Model) -> Tensor:
    driver = PagedDriver(model)
    return driver.step([(driver.open(random_prompts((40,), VOCAB)[0]), 40)])[0]


def test_an_mxfp4_checkpoint_equals_what_transformers_unpacks(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path)
    model = load(tmp_path, dtype="float32", ops=reference_ops())
    assert_same_as_transformers(model, reference, random_prompts(PROMPT_LENS, VOCAB))
    assert any("MXFP4" in note for note in read_spec(tmp_path).notes)
    assert load(tmp_path).kv_layout.dtype is torch.bfloat16


def test_every_code_and_scale_of_mxfp4_has_the_value_that_transformers_gives_it(
    tmp_path: Path,
) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    ops = load_native(1)
    assert ops is not None and ops.load_linear is not None
    for scale in (0, 1, 100, 127, 130, 250):
        scales = torch.full((1, 1, 16), scale, dtype=torch.uint8)
        expected = convert_moe_packed_tensors(blocks, scales)[0].t()
        save_file({"l.e.down_blocks": blocks, "l.e.down_scales": scales}, tmp_path / "f")
        files = open_tensor_file(tmp_path / "f")
        reader = TensorReader(files, torch.bfloat16, CPU, files.num_bytes, None)
        source = FusedExpertsSource(reader, FusedExperts("e", "gate_up", 1, True))
        names = ("l.e.0.down.weight",)
        assert torch.equal(source.linear(names), expected)
        for floating in (False, True):
            stored = source.stored(names, floating=floating)
            assert stored is not None and stored.is_quantized is not floating
            loaded = ops.load_linear(stored, None)
            found = ops.embedding(torch.tensor([0]), loaded, torch.bfloat16)
            assert torch.equal(found, expected)


def test_experts_in_4_bits_have_the_values_that_transformers_unpacks(tmp_path: Path) -> None:
    reference, ops = save_mxfp4(tmp_path), load_native(1)
    assert ops is not None
    loaded = iter(matrices_of(load(tmp_path, ops=ops)))
    for layer in reference.model.layers:
        gate_ups = layer.mlp.experts.gate_up_proj.transpose(1, 2)
        downs = layer.mlp.experts.down_proj.transpose(1, 2)
        gates_first = torch.cat((gate_ups[:, 0::2], gate_ups[:, 1::2]), 1)
        for expected in (*gates_first, *downs):
            weight = next(loaded)
            rows = torch.arange(weight.num_outputs)
            assert torch.equal(ops.embedding(rows, weight, torch.float32), expected.detach())
            biases = 4 * weight.num_outputs
            assert weight.nbytes == expected.numel() * 18 // 32 + biases  # scales in float16
    assert next(loaded, None) is None


def test_mxfp4_is_planned_as_it_is_held(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    spec = read_spec(tmp_path)
    in_16_bits, held = weight_bytes(spec, 2), weights_of(tmp_path)
    assert held is not None and held < in_16_bits
    num_experts, (hidden, width) = 3 * 5, (64, 96)
    assert (spec.hidden_size, spec.moe and spec.moe.intermediate_size) == (hidden, width)
    of_expert = MatrixFormat(6, 32, wide_scales=True, has_levels=True)
    planned = of_expert.num_bytes((2 * width, hidden)) + of_expert.num_bytes((hidden, width))
    assert in_16_bits - held == num_experts * (2 * 3 * width * hidden - planned)
    assert weights_of(tmp_path, natively=False) is None  # torch's ops have the model's dtype
    for quantization in ("int4", "fp8"):
        assert quantized_weight_bytes(tmp_path, spec, quantization, 2, natively=True) is None
    matrices = matrices_of(load(tmp_path, ops=load_native(1)))
    biases = num_experts * 4 * (2 * width + hidden)
    taken = sum(matrix.nbytes for matrix in matrices)
    assert 0.9 * num_experts * planned < taken <= num_experts * planned + biases


def test_the_engines_plan_of_mxfp4_is_that_of_its_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_mxfp4(tmp_path)
    options = LoadConfig(str(tmp_path), device="cpu", dtype="bfloat16")
    config = EngineConfig(options, CacheConfig(num_blocks=32), memory_bytes=1 << 30)
    held = load_weights(config, None).plan
    assert expected_plan(config) == held
    weights = {row.label: row.num_bytes for row in held.rows}["weights"]
    assert weights == weights_of(tmp_path)
    plan_json = ["plan", str(tmp_path), "--input", "20", "--output", "20", "--json"]
    main([*plan_json, "--hardware", "xeon-8480"])
    rows = json.loads(capsys.readouterr().out)["memory"]
    assert weights in [row["num_bytes"] for row in rows if row["label"] == "weights"]


def test_mxfp4_answers_as_the_same_weights_in_gguf(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path / "packed")
    reference.save_pretrained(tmp_path / "unpacked")
    section = {
        ".expert_feed_forward_length": 96,
        ".rope.scaling.type": "yarn",
        ".rope.scaling.factor": 4.0,
        ".rope.scaling.original_context_length": 64,
    }
    kinds = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), Kind.MXFP4)
    twin = tmp_path / "twin.gguf"
    write_twin(tmp_path / "unpacked", twin, "gpt-oss", section, paired=False, kinds=kinds)
    prompts, ops = random_prompts(PROMPT_LENS, VOCAB), load_native(1)
    rows = []
    for path in (tmp_path / "packed", twin):
        model = load(path, dtype="bfloat16", ops=ops)
        rows.append(PagedDriver(model).generate(prompts, NUM_NEW, chunk=6))
    for packed, of_twin in zip(*rows, strict=True):
        assert packed.token_ids == of_twin.token_ids
        assert torch.equal(torch.cat(packed.logits), torch.cat(of_twin.logits))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_out_of_mxfp4_are_rounded_as_unpacked_ones_are(
    quantization: str, tmp_path: Path
) -> None:
    reference = save_mxfp4(tmp_path / "packed")
    reference.bfloat16().save_pretrained(tmp_path / "unpacked")
    found = []
    for path in (tmp_path / "packed", tmp_path / "unpacked"):
        options = LoadConfig(model=str(path), quantization=quantization)
        checkpoint, spec = Checkpoint(path, "golden"), read_spec(path)
        found.append(logits(load_model(checkpoint, spec, resolve_ops(CPU), options)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], logits(load(tmp_path / "packed")))


REFUSED = [
    ({"quantization_config": mxfp4_config(swizzled=True)}, "'swizzled'"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "by awq; of GptOssForCausalLM"),
    ({"swiglu_limit": 5.0}, "'swiglu_limit' to 5.0; supported is 7.0"),
    ({"swiglu_alpha": 0.0}, "'swiglu_alpha' to 0.0; supported is 1.702"),
    ({"experts_per_token": 4}, "'num_experts_per_tok' to 2 and 'experts_per_token' to 4"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_gpt_oss_is_not_known_to_be_is_refused_by_name(
    values: dict[str, object], message: str, tmp_path: Path
) -> None:
    GPT_OSS.save(tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_mxfp4_of_other_architectures_is_refused(tmp_path: Path) -> None:
    CASES[0].save(tmp_path)
    edit_config(tmp_path, quantization_config=mxfp4_config())
    with pytest.raises(ConfigError, match=r"by mxfp4, which is not supported.*mxfp4 for gpt-oss"):
        load(tmp_path)


def test_mxfp4_in_another_layout_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(tmp_path / "model.safetensors")[name]
    edit_tensors(tmp_path, **{name: scales.float()})
    with pytest.raises(ConfigError, match=r"down_proj_scales' holds F32, MXFP4"):
        load(tmp_path)
    edit_tensors(tmp_path, **{name: torch.full_like(scales, 255)})
    with pytest.raises(ConfigError, match="down_proj_scales' holds a scale of 255"):
        load(tmp_path)
    edit_tensors(tmp_path, **{name: scales.transpose(1, 2).contiguous()})
    with pytest.raises(ConfigError, match="down_proj_scales' has shape"):
        load(tmp_path)


def test_unpacked_experts_beside_a_config_with_mxfp4_are_refused(tmp_path: Path) -> None:
    GPT_OSS.save(tmp_path)
    edit_config(tmp_path, quantization_config=mxfp4_config())
    with pytest.raises(ConfigError, match=r"gate_up_proj_blocks', \.\.\.\) are missing"):
        load(tmp_path)


@pytest.mark.parametrize("case", [GPT_OSS, GRANITE], ids=lambda case: case.name)
def test_leaving_sinks_out_shows(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    model = load(tmp_path, ops=NAIVE_OPS)
    assert isinstance(model, Decoder)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, sinks=None)) for layer in model.weights.layers
    )
    without = model.with_tensors(replace(model.weights, layers=layers), model.ropes)
    assert (logits(without) - logits(model)).abs().max() > 5e-4


@pytest.mark.parametrize("form", ["whole", "mxfp4", "granite-swa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_finds_the_same_bits_in_any_batch(form: str, dtype: str, tmp_path: Path) -> None:
    if form == "mxfp4":
        save_mxfp4(tmp_path)
    else:
        (GPT_OSS if form == "whole" else GRANITE).save(tmp_path)

    def on(threads: int) -> Model:
        ops = load_native(threads)
        assert ops is not None
        return load(tmp_path, dtype=dtype, ops=ops)

    report = verify(on, VerifyOptions(num_requests=16, seed=2, threads=(1, 2)))
    assert report.first_mismatch is None and report.mismatches == 0
    assert report.comparisons > 32


def test_the_command_verifies_gpt_oss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    small = dataclasses.replace(GPT_OSS, values=GPT_OSS.values | {"vocab_size": len(alphabet)})
    save_mxfp4(tmp_path, small)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ["--requests", "30", "--seed", "2", "--threads", "1,2", "--json"]
    assert main(["verify", str(tmp_path), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mismatches"] == 0
    assert report["comparisons"] > 60


def test_mxfp4_and_fused_experts_need_no_torch(tmp_path: Path) -> None:
    for save in (save_mxfp4, Case.save):
        path = tmp_path / save.__name__
        save(path, GPT_OSS) if save is save_mxfp4 else save(GPT_OSS, path)
        options = LoadConfig(model=str(path), dtype="bfloat16")
        spec, ops = read_spec(path), load_native(1)
        assert ops is not None and not reason_for_torch(ops, options)
        checkpoint = Checkpoint(path, "golden")
        model = load_model(checkpoint, spec, ops, options, on_host=True)
        by_torch = load_model(checkpoint, spec, replace(ops, load_linear=None), options)
        for one, other in zip(matrices_of(model), matrices_of(by_torch), strict=True):
            x = torch.randn(2, one.num_inputs).to(torch.bfloat16)
            if save is save_mxfp4:  # one in quantized values, of which torch makes the same weights
                rows = torch.arange(one.num_outputs)
                weights = [ops.embedding(rows, weight, torch.bfloat16) for weight in (one, other)]
                assert torch.equal(*weights)
            else:
                assert torch.equal(ops.linear(x, one), ops.linear(x, other))


def test_a_model_with_sinks_needs_no_torch(tmp_path: Path) -> None:
    GRANITE.save(tmp_path)
    options, spec, ops = LoadConfig(model=str(tmp_path)), read_spec(tmp_path), load_native(1)
    assert ops is not None and not reason_for_torch(ops, options)
    model = load_model(Checkpoint(tmp_path, "golden"), spec, ops, options, on_host=True)
    assert isinstance(model, Decoder)
    expected = load(tmp_path, ops=ops)
    assert isinstance(expected, Decoder)
    for layer, of_torch in zip(model.weights.layers, expected.weights.layers, strict=True):
        assert layer.mixer.sinks is not None and of_torch.mixer.sinks is not None
        assert layer.mixer.sinks.numpy().tolist() == of_torch.mixer.sinks.tolist()
