"""`quickstep bench accuracy`: its measures on cases whose answers are known, and its output."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

from quickstep.bench.llama_cpp_formats import rounded_q4_0, rounded_q8_0
from quickstep.bench.outliers import format_error, random_layer
from quickstep.bench.text_accuracy import HELD_OUT_MODULES, cut_windows, held_out_text
from quickstep.cli.main import main
from quickstep.errors import ConfigError
from quickstep.model.quantization import SCHEMES, MatrixFormat
from quickstep.model.quantize import QuantizingSource, rounding_error
from quickstep.ops.reference import reference_ops


def test_q8_0_keeps_integer_multiples_of_its_step() -> None:
    values = np.arange(-16, 16, dtype=np.float32)
    values[0] = 127  # the step is 1
    assert np.array_equal(rounded_q8_0(values), values)


def test_q4_0_gives_the_largest_weight_the_value_minus_eight() -> None:
    values = np.zeros((2, 32), np.float32)
    values[0, :3] = (-8, 7, 3.4)
    values[1, :3] = (8, -7, 7.6)
    rounded = rounded_q4_0(values)
    assert rounded[0, :3].tolist() == [-8, 7, 3]
    assert rounded[1, :3].tolist() == [8, -7, 8]
    assert not rounded[:, 3:].any()


def test_windows_are_evenly_spaced_and_a_short_text_is_an_error() -> None:
    assert cut_windows(range(10), 6, 2) == ((0, 1), (4, 5), (8, 9))
    with pytest.raises(ConfigError, match="the text has 10 tokens"):
        cut_windows(range(10), 12, 4)


def test_the_text_is_all_held_out_modules() -> None:
    text = held_out_text()
    assert len(text) > 10_000 * len(HELD_OUT_MODULES)
    assert "class ConfigParser(" in text


def test_groups_of_activations_keep_outlier_channels_to_themselves() -> None:
    layer, ops = random_layer(100, seed=1), reference_ops()
    errors = [
        format_error(layer, ops, torch.float32, MatrixFormat(8, size)).ordinary
        for size in (None, 128, 32)
    ]
    assert errors[0] > 2 * errors[1] > 2 * errors[2]


class OneMatrix:
    """A source of one matrix."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def tensor(self, name: str) -> torch.Tensor:
        return self.weight

    def stacked(self, names: tuple[str, ...]) -> torch.Tensor:
        return self.weight

    def linear(self, names: tuple[str, ...]) -> torch.Tensor:
        return self.weight


def quantized(weight: torch.Tensor, scheme: str) -> None:
    source = QuantizingSource(
        OneMatrix(weight), SCHEMES[scheme], frozenset(("head",)), reference_ops()
    )
    quantized = source.linear(("layer",))
    assert rounding_error(weight, quantized) >= 0


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_weights_that_round_well_give_no_warning(scheme: str) -> None:
    weight = torch.randn(80, 256, generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized(weight, scheme)


def test_weights_that_rounding_destroys_give_a_warning_that_names_them() -> None:
    # every group has one weight that leaves no quantized value for the others, which are most of
    # the norm
    weight = torch.full((80, 256), 0.45)
    weight[:, ::32] = 8.0
    weight *= torch.where(torch.arange(256) % 2 == 0, 1.0, -1.0)
    with pytest.warns(RuntimeWarning, match=r"int4 changes layer by \d+%"):
        quantized(weight, "int4")


def test_the_command_prints_text_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokens", "64", "--window", "32", "--formats", "fp32", "int8", "int4", "fp8"]
    assert main(["bench", "accuracy", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    exact, int8, int4 = (found["text"][name] for name in ("fp32", "int8", "int4"))
    assert exact["kl_mean"] == exact["perplexity_change"] == 0
    assert exact["top1_agreement"] == 1
    assert 0 < int8["kl_mean"] < int4["kl_mean"]
    assert int8["kl_mean"] < found["text"]["fp8"]["kl_mean"]
    assert found["text"]["fp32, KV int8"]["kl_mean"] < found["text"]["fp32, KV fp8"]["kl_mean"]
    assert set(found["outlier_layers"]["int8"]) == {"1", "30", "100"}
    assert "Q8_0 (llama.cpp)" in found["text"]
    assert found["text"]["fp32, KV fp16"]["kl_mean"] < found["text"]["fp32, KV int8"]["kl_mean"]
    assert found["outlier_keys"]["fp32"]["100"] < found["outlier_keys"]["fp16"]["100"] < 0.01
    assert found["outlier_keys"]["int8"]["1"] < found["outlier_keys"]["int8"]["100"]
