"""First-principles step times: their limits, their parts, and published measurements."""

from __future__ import annotations

import pytest

from quickstep.cli.main import main
from quickstep.core.cost_model import StepLoad
from quickstep.model.sizing import ElementBytes
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.roofline import RooflineCostModel

TABLE = read_hardware()
BF16 = ElementBytes(2, 8)
ONE = Split()


def model(
    name: str = "llama-3.1-8b",
    hardware: str = "h100",
    split: Split = ONE,
    elements: ElementBytes = BF16,
) -> RooflineCostModel:
    return RooflineCostModel(find_model(name), elements, find_hardware(hardware, TABLE), split)


def decode(num_rows: int, context: int) -> StepLoad:
    return StepLoad(num_rows, num_rows, num_rows * context, num_rows * context)


# (hardware, published milliseconds per token at batch size 1): see hardware.yaml for the sources.
PUBLISHED = {"h100": 6.48, "a100-40": 13.3}


@pytest.mark.parametrize("hardware", list(PUBLISHED))
def test_the_fitted_fractions_give_the_measurements_that_they_were_fitted_to(hardware: str) -> None:
    predicted_ms = 1e3 * model(hardware=hardware).seconds(decode(1, 200))
    assert predicted_ms == pytest.approx(PUBLISHED[hardware], rel=0.02)


def test_decode_is_bound_by_weights_then_by_kv_and_prefill_by_compute() -> None:
    costs = model()
    assert costs.parts(decode(1, 500)).binding == "memory bandwidth (weights)"
    assert costs.parts(decode(64, 16_000)).binding == "memory bandwidth (KV)"
    assert costs.parts(StepLoad.of_span(0, 4096)).binding == "compute (matrix products)"
    assert costs.parts(StepLoad.of_span(120_000, 2048)).binding == "compute (attention)"


def test_a_batch_reads_the_weights_once() -> None:
    costs = model()
    one, many = costs.parts(decode(1, 500)), costs.parts(decode(32, 500))
    assert many.weights_read_s == one.weights_read_s
    assert many.kv_read_s == pytest.approx(32 * one.kv_read_s)
    assert many.seconds < 1.5 * one.seconds


def test_tensor_parallelism_shortens_steps_and_pipelines_do_not() -> None:
    load = decode(8, 1000)
    alone = model("llama-3-70b").seconds(load)
    tensor = model("llama-3-70b", "h100x4", Split(4)).seconds(load)
    pipeline = model("llama-3-70b", "h100x4", Split(1, 4)).seconds(load)
    assert alone / 4 < tensor < alone / 3
    assert alone < pipeline < 1.02 * alone
    assert model("llama-3-70b", "h100x4", Split(1, 1, 4)).seconds(load) == alone


def test_quantized_weights_are_read_faster() -> None:
    load = decode(1, 100)
    costs = [
        model(elements=ElementBytes(2, 8, quantization)).parts(load).weights_read_s
        for quantization in (None, "int8", "int4")
    ]
    assert costs[0] > 1.8 * costs[1] > 3.0 * costs[2]
    int8_kv = model(elements=ElementBytes(2, 8, None, "int8"))
    assert int8_kv.parts(load).kv_read_s < 0.6 * model().parts(load).kv_read_s
    int4_kv = model(elements=ElementBytes(2, 8, None, "int4"))
    assert int4_kv.parts(load).kv_read_s == pytest.approx(model().parts(load).kv_read_s * 5 / 16)


def test_int4_keys_are_planned_for_cpus_only(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("plan", "llama-3.2-1b", "--kv-cache-dtype", "int4", "--rate", "0.1", "--json")
    assert main((*flags, "--hardware", "h100")) == 2
    assert "int4 has kernels for CPUs only, NVIDIA H100" in capsys.readouterr().err
    assert main((*flags, "--hardware", "xeon-8480", "--input", "100", "--output", "10")) == 0


def test_a_mixture_reads_more_experts_with_more_tokens() -> None:
    costs = model("mixtral-8x7b")
    reads = [costs.parts(decode(rows, 10)).weights_read_s for rows in (1, 4, 64)]
    assert reads[0] < reads[1] < reads[2]
    assert reads[2] == pytest.approx(
        model("mixtral-8x7b").parts(decode(512, 10)).weights_read_s, rel=1e-3
    )
    assert reads[2] / reads[0] == pytest.approx(46.5 / 12.7, rel=0.05)


def test_rows_are_charged_what_limits_their_step() -> None:
    costs = model()
    prices = costs.unit_prices(decode(64, 16_000))
    assert prices.kv_token > 0.0 == prices.pair
    long, short = (prices.of(StepLoad.of_span(start, 1)) for start in (16_000, 160))
    assert 10 * short < long
    prompt = StepLoad.of_span(120_000, 2048)
    assert costs.unit_prices(prompt).pair > 0.0 == costs.unit_prices(prompt).kv_token
    parts = costs.parts(prompt)
    computed_s = parts.matrix_compute_s + parts.attention_compute_s
    assert costs.unit_prices(prompt).of(prompt) == pytest.approx(computed_s, rel=0.02)


def test_it_does_not_learn() -> None:
    costs = model()
    before = costs.seconds(decode(1, 100))
    costs.observe(decode(1, 100), 99.0)
    assert costs.seconds(decode(1, 100)) == before
