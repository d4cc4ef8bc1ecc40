"""Quantized checkpoints: every matrix comes out as the format's formula says, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import format_writers as writers
import pytest
import torch
from published_formats import (
    AUTO_ROUND,
    AWQ,
    EXACT,
    FP8,
    GPTQ,
    ROUNDED_AGAIN,
    compressed,
)
from quantized_checkpoint import opened, write_quantized
from safetensors.torch import load_file, save_file
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.weights import open_weights
from quickstep.model.spec import read_spec
from quickstep.ops.weights import QuantizedWeight


def matrices(path: Path, meant: dict[str, Tensor]) -> list[tuple[Tensor, QuantizedWeight]]:
    """Each linear matrix as it is meant, and as it is read; queries, keys and values stacked."""
    source = opened(path)[1]
    found = []
    for layer in range(2):
        start = f"model.layers.{layer}"
        for parts in (("q", "k", "v"), ("o",)):
            names = tuple(f"{start}.self_attn.{part}_proj.weight" for part in parts)
            found.append((torch.cat([meant[name] for name in names]), source.linear(names)))
        name = f"{start}.mlp.down_proj.weight"
        found.append((meant[name], source.linear((name,))))
    for _, weight in found:
        assert isinstance(weight, QuantizedWeight)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("case", EXACT)
def test_weights_are_those_of_the_formula(case: str, tmp_path: Path) -> None:
    quantization, writer = EXACT[case]
    meant = write_quantized(tmp_path, quantization, writer)
    for expected, found in matrices(tmp_path, meant):
        torch.testing.assert_close(found.dequantized(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["modelopt-nvfp4", "packed-nvfp4"])
def test_nvfp4_keeps_the_bits_of_its_values_in_6_bits(case: str, tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, *EXACT[case])
    for expected, found in matrices(tmp_path, meant):
        assert (found.bits, found.group_size) == (6, 16)
        assert torch.equal(found.dequantized(), expected)


@pytest.mark.parametrize("case", ROUNDED_AGAIN)
def test_what_even_groups_cannot_hold_is_rounded_to_eight_bits(case: str, tmp_path: Path) -> None:
    quantization, writer = ROUNDED_AGAIN[case]
    meant = write_quantized(tmp_path, quantization, writer)
    for expected, found in matrices(tmp_path, meant):
        assert found.bits == 8
        error = (found.dequantized() - expected).view(*found.scales.shape, found.group_size)
        if quantization["quant_method"] == "bitsandbytes":
            assert bool((error.abs() <= 0.5001 * found.scales.unsqueeze(-1)).all())
        assert float(error.square().mean() / expected.square().mean()) < 0.005**2


@pytest.mark.parametrize("case", EXACT | ROUNDED_AGAIN)
def test_a_matrix_is_held_in_the_form_that_sizing_counts(case: str, tmp_path: Path) -> None:
    quantization, writer = (EXACT | ROUNDED_AGAIN)[case]
    write_quantized(tmp_path, quantization, writer)
    weights, source = opened(tmp_path)
    assert weights.storage is not None
    for name, shape in weights.shapes.items():
        if weights.storage.parts(name, shape) is None:
            continue
        form, found = weights.storage.form(name, shape), source.linear((name,))
        assert isinstance(found, QuantizedWeight)
        group = form.group_size or shape[1]
        assert (found.bits, found.group_size) == (form.bits, group)
        assert (found.zeros is not None) == form.has_zeros


@pytest.mark.parametrize("case", EXACT | ROUNDED_AGAIN)
def test_matrices_that_are_rounded_again_are_reported(case: str, tmp_path: Path) -> None:
    quantization, writer = (EXACT | ROUNDED_AGAIN)[case]
    write_quantized(tmp_path, quantization, writer)
    rounded = opened(tmp_path)[0].rounded_again()
    assert len(rounded) == (2 * 7 if case in ROUNDED_AGAIN else 0)


def test_every_tensor_of_the_files_is_accounted_for(tmp_path: Path) -> None:
    for case, (quantization, writer) in EXACT.items():
        path = tmp_path / case
        write_quantized(path, quantization, writer)
        weights = open_weights(path, read_spec(path))
        stored = set(weights.stored)
        left = {name for name in weights.files.tensors if name not in stored}
        fixed = {name for name in left if name.endswith(("_scale", "input_zero_point"))}
        assert all(name.endswith(".bias") for name in left - fixed)
        assert set(weights.unused()) == fixed, "a log line names them"


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_weights(path, read_spec(path)).check()
    return str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        (FP8 | {"activation_scheme": "other"}, "activation_scheme 'other'"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "two positive integers"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, "an unnamed method"),
        (AWQ | {"bits": 3}, "AWQ of 3 bits"),
        (AWQ | {"version": "gemv"}, "'gemv'"),
        (AWQ | {"group_size": 8}, "groups of 8"),
        (AWQ | {"group_size": 32, "modules_to_not_convert": ["o_proj"]}, "'o_proj'"),
        (GPTQ | {"bits": 2}, "GPTQ of 2 bits"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        (GPTQ | {"bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"bits": 4, "dynamic": {".*down.*": {"group_size": 64}}}, "dynamic"),
        (AUTO_ROUND | {"packing_format": "auto_round:marlin"}, "'auto_round:marlin'"),
        (
            AUTO_ROUND
            | {"packing_format": "auto_round:auto_gptq"}
            | {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}}},
            "extra_config",
        ),
        (compressed("float-quantized", 8, "channel"), "float-quantized"),
        (compressed("marlin-24", 4, "group", 32), "marlin-24"),
        (compressed("pack-quantized", 3, "group", 32), "3 bits"),
        (compressed("pack-quantized", 4, "block"), "'block'"),
        (compressed("int-quantized", 8, "channel") | {"transform_config": {"a": 1}}, "rotated"),
        (
            compressed("int-quantized", 8, "channel") | {"sparsity_config": {"format": "24"}},
            "sparse",
        ),
        (
            compressed(
                "int-quantized",
                8,
                "tensor",
                input_activations={"num_bits": 4, "type": "int", "dynamic": True},
            ),
            "input_activations of int4",
        ),
    ],
)
def test_an_unknown_variant_is_refused_by_name(
    quantization: dict[str, object], named: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, quantization, writers.awq(32))
    assert named in refused(tmp_path)


def test_modules_are_matched_by_name_and_expression_before_class(tmp_path: Path) -> None:
    config = compressed("pack-quantized", 4, "group", 32)
    groups = dict(config["config_groups"])  # type: ignore[call-overload]
    narrow = dict(groups["group_0"]["weights"]) | {"group_size": 16}
    groups["group_1"] = {"targets": ["re:.*down_proj"], "weights": narrow}
    config |= {"config_groups": groups, "ignore": ["re:.*embed.*", "lm_head"]}

    def write(outputs: int, inputs: int, generator: torch.Generator) -> writers.Written:
        group = 16 if inputs == 192 else 32
        return writers.packed_integers(4, group)(outputs, inputs, generator)

    meant = write_quantized(tmp_path, config, write)
    sizes = set()
    for expected, found in matrices(tmp_path, meant):
        sizes.add(found.group_size)
        torch.testing.assert_close(found.dequantized(), expected, rtol=1e-6, atol=1e-7)
    assert sizes == {16, 32}


def test_a_bias_that_is_not_zero_is_refused_where_the_architecture_has_none(
    tmp_path: Path,
) -> None:
    def write(outputs: int, inputs: int, generator: torch.Generator) -> writers.Written:
        written = writers.gptq(4, 32, with_bias=True)(outputs, inputs, generator)
        written.tensors[".bias"][0] = 1.0
        return written

    write_quantized(tmp_path, GPTQ | {"bits": 4, "group_size": 32}, write)
    assert "bias" in refused(tmp_path)


def test_zero_points_that_no_label_explains_are_refused(tmp_path: Path) -> None:
    quantization = GPTQ | {"bits": 4, "group_size": 32, "sym": True}
    write_quantized(tmp_path, quantization, writers.gptq(4, 32))
    source = opened(tmp_path)[1]
    with pytest.raises(ConfigError, match="symmetric"):
        source.linear(("model.layers.0.mlp.down_proj.weight",))


@pytest.mark.parametrize("case", EXACT | ROUNDED_AGAIN)
def test_a_part_that_is_lost_is_refused(case: str, tmp_path: Path) -> None:
    """Or the part says nothing: groups that are in order, zero points that are the middle."""
    quantization, writer = (EXACT | ROUNDED_AGAIN)[case]
    write_quantized(tmp_path, quantization, writer)
    file, module = tmp_path / "a.safetensors", "model.layers.0.mlp.down_proj"
    whole = load_file(file)
    expected = opened(tmp_path)[1].linear((f"{module}.weight",)).dequantized()
    for lost in [name for name in whole if name.startswith(f"{module}.")]:
        save_file({name: x for name, x in whole.items() if name != lost}, file)
        try:
            found = opened(tmp_path)[1].linear((f"{module}.weight",))
        except ConfigError as error:
            assert module in str(error)
        else:
            assert torch.equal(found.dequantized(), expected), lost


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    def write(outputs: int, inputs: int, generator: torch.Generator) -> writers.Written:
        written = writers.awq(32)(outputs, inputs, generator)
        del written.tensors[".scales"]
        return written

    write_quantized(tmp_path, AWQ | {"group_size": 32}, write)
    assert ".scales" in refused(tmp_path)


@pytest.mark.parametrize(
    ("case", "part", "value", "named"),
    [
        ("gptq-act-order", ".g_idx", -1, "names group -1, they are 0 to"),
        ("gptq-act-order", ".g_idx", 2**30, f"names group {2**30}, they are 0 to"),
        ("packed4-act-order", ".weight_g_idx", -7, "names group -7, they are 0 to"),
        ("packed-nvfp4", ".weight_global_scale", 0.0, "weight_global_scale is 0"),
        ("nf4-nested", ".weight.quant_state.bitsandbytes__nf4", 0x20, "hold a JSON object"),
    ],
)
def test_a_small_tensor_with_a_wrong_value_is_refused_by_name(
    case: str, part: str, value: float, named: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, *(EXACT | ROUNDED_AGAIN)[case])
    file = tmp_path / "a.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.down_proj"
    tensors[name + part][0] = value
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=named) as caught:
        opened(tmp_path)[1].stored((f"{name}.weight",))
    assert name + part in str(caught.value)


@pytest.mark.parametrize("changes", [{"nested_blocksize": 0}, {"blocksize": -64}, {"blocksize": 0}])
def test_blocks_of_bitsandbytes_without_a_size_are_refused_by_name(
    changes: dict[str, int], tmp_path: Path
) -> None:
    write_quantized(tmp_path, *ROUNDED_AGAIN["nf4-nested"])
    file = tmp_path / "a.safetensors"
    name = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    tensors = load_file(file)
    state = json.loads(bytes(tensors[name].tolist())) | changes
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=f"{name} sets '{next(iter(changes))}'"):
        opened(tmp_path)


def test_modelopts_own_file_says_how_weights_are_stored(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, {}, writers.nvfp4)
    (tmp_path / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", '
        '"kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}}'
    )
    extra = {f"model.layers.0.self_attn.{part}_proj.{part}_scale": 0.5 for part in "kv"}
    file = tmp_path / "a.safetensors"
    save_file(load_file(file) | {name: torch.tensor(x) for name, x in extra.items()}, file)
    for expected, found in matrices(tmp_path, meant):
        torch.testing.assert_close(found.dequantized(), expected, rtol=1e-6, atol=0)
    unused = opened(tmp_path)[0].unused()
    assert extra.keys() <= set(unused) and len(unused) == 2 * 7 + 2


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [("NVFP4_AWQ", "'?NVFP4_AWQ"), ("W4A8_AWQ", "W4A8_AWQ"), ("", "no name")],
)
def test_another_algorithm_of_modelopt_is_refused(
    algorithm: str, named: str, tmp_path: Path
) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm}
    write_quantized(tmp_path, quantization, writers.nvfp4)
    with pytest.raises(ConfigError, match=named):
        opened(tmp_path)


def test_a_scale_of_nvfp4_that_is_no_number_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, *EXACT["modelopt-nvfp4"])
    file = tmp_path / "a.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.weight_scale"][3, 2] = float("nan")
    save_file(tensors, file)
    with pytest.raises(
        ConfigError, match=r"down_proj\.weight_scale' holds a scale that is not a num"
    ):
        opened(tmp_path)[1].stored((f"{name}.weight",))
