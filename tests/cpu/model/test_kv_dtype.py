"""KV caches of other dtypes: the values of quantized heads, memory, exact engines, accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paged_driver import PagedDriver
from tokenizers import Tokenizer
from torch import Tensor

from quickstep import LLM, SamplingParams
from quickstep.config import KV_DTYPES, CacheConfig, LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.fingerprint import fingerprint_with_kv
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.decoder import Decoder
from quickstep.model.interface import KVLayout
from quickstep.model.loader import check_kv_dtype, load_model
from quickstep.model.sizing import kv_bytes_per_token
from quickstep.model.spec import read_spec
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout
from quickstep.ops.tensors import (
    BFLOAT16,
    Device,
    head_size_of,
    head_width,
    quantize_heads,
    quantize_int4,
    read_heads,
)
from quickstep.ops.tensors import CPU as DEVICE
from quickstep.runtime.cache.kv_cache import allocate_kv, kv_bytes
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions

REPOSITORY = Path(__file__).parents[3]

CPU = torch.device("cpu")
EXTREMES = [0.0, -0.0, 1e-38, -3e38, 65504.0, 1.0, -2.0, 6e-8]
LEVELS = st.sampled_from([0.0, 1e-35, 1e-29, 1e-3, 1.0, 1e4, 1e38])


def demo(
    dtype: str = "bfloat16", ops: OpTable | None = None, num_layers: int | None = None
) -> Decoder:
    """The demo model, or its first layers."""
    load = LoadConfig(model="demo", dtype=dtype)
    checkpoint = find_checkpoint(load)
    native = load_native(torch.get_num_threads())
    assert native is not None
    spec = read_spec(checkpoint.path)
    layers = spec.layers[:num_layers]
    spec = replace(spec, num_layers=len(layers), layers=layers)
    model = load_model(checkpoint, spec, ops or native, load)
    assert isinstance(model, Decoder)
    return model


@given(st.lists(st.floats(-1.0, 1.0, width=32) | st.sampled_from([1.0, -1.0]), min_size=1), LEVELS)
def test_a_stored_head_is_within_half_a_step_of_what_was_written(
    values: list[float], level: float
) -> None:
    head = torch.tensor(values) * level
    stored = quantize_heads(head)
    assert stored.dtype == torch.int8 and stored.shape == (len(values) + 4,)
    step = head.abs().max().double() / 127
    error = (read_heads(stored) - head.double()).abs().max()
    assert error <= step * 0.5001 + 1e-30


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_reads_as_nan_and_its_neighbour_as_before(bad: float) -> None:
    heads = torch.tensor([[1.0, bad, 2.0], [1.0, 0.5, -2.0]])
    read = read_heads(quantize_heads(heads))
    assert read[0].isnan().all()
    assert torch.equal(read[1], read_heads(quantize_heads(heads[1])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_kernels_write_the_bytes_of_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    native = load_native(2)
    assert native is not None
    for size in (1, 7, 16, 64, 100):
        k = torch.randn(11, 3, size, generator=generator) * 3
        k[0, 0], k[1, 1, 0] = 0.0, torch.nan
        k[2, 2] = torch.tensor(EXTREMES)[torch.arange(size) % len(EXTREMES)]
        k = k.to(dtype)
        slots = torch.randperm(16, generator=generator)[:11]
        caches = [torch.zeros(4, 4, 3, size + 4, dtype=torch.int8) for _ in range(4)]
        native.write_kv(k, k, caches[0], caches[1], slots)
        reference_ops().write_kv(k, k, caches[2], caches[3], slots)
        assert head_size_of(caches[0]) == size
        assert torch.equal(
            read_heads(caches[0]).nan_to_num(7.0), read_heads(caches[2]).nan_to_num(7.0)
        )
        assert torch.equal(caches[0], caches[1])


@given(
    st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=40).map(lambda x: x + x[::-1]),
    LEVELS,
    st.sampled_from([0.0, 3.0]),
)
def test_an_int4_element_is_within_half_a_step_of_what_was_written(
    values: list[float], level: float, offset: float
) -> None:
    head = (torch.tensor(values) + offset) * min(level, 1e37)
    stored = quantize_int4(head)
    assert head_size_of(stored[None, None, None]) == len(values)
    for group, read in zip(head.split(32), read_heads(stored).split(32), strict=True):
        low, high = group.double().aminmax()
        # scale, minimum and the result are rounded to bfloat16
        allowed = (high - low) / 15 * 0.51 + max(high.abs(), low.abs()) / 64 + 1e-28
        assert (read - group.double()).abs().max() <= allowed


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_int4_group_that_is_not_finite_reads_as_nan_and_its_neighbour_as_before(
    bad: float,
) -> None:
    head = torch.linspace(-1.0, 1.0, 64)
    expected = read_heads(quantize_int4(head))
    head[40] = bad
    read = read_heads(quantize_int4(head))
    assert read[32:].isnan().all()
    assert torch.equal(read[:32], expected[:32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", native_status().levels)
def test_native_kernels_write_and_read_the_int4_of_the_reference(
    level: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    native = load_native(2, level)
    assert native is not None
    for size in (2, 16, 50, 64, 96):
        k = torch.randn(32, 3, size, generator=generator) * 3 + 1
        k[0, 0], k[1, 1, 0] = 0.0, torch.nan
        k[2, 2] = torch.tensor(EXTREMES)[torch.arange(size) % len(EXTREMES)]
        k = k.to(dtype)
        slots = torch.randperm(32, generator=generator)
        width = head_width(size, torch.uint8)
        caches = [torch.zeros(4, 8, 3, width, dtype=torch.uint8) for _ in range(4)]
        native.write_kv(k, k, caches[0], caches[1], slots)
        reference_ops().write_kv(k, k, caches[2], caches[3], slots)
        assert all(torch.equal(cache, caches[0]) for cache in caches)
        assert head_size_of(caches[0]) == size
        # what is read has the bits of a bfloat16 cache with the same values
        plain = read_heads(caches[0]).bfloat16()
        blocks = torch.arange(4, dtype=torch.int32)[None]
        layout = PagedLayout(torch.arange(7, 32), slots[7:], (0, 25), (32,), blocks, 8)
        q = torch.randn(25, 6, size, generator=generator).to(dtype)
        for window in (None, 9):
            params = AttentionParams(size**-0.5, window)
            found, expected = (
                native.paged_attention(q, cache, cache, layout, params, None).float()
                for cache in (caches[0], plain)
            )
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_heads_of_an_odd_size_and_gpus_have_no_int4() -> None:
    with pytest.raises(ConfigError, match="this model's have 27 elements"):
        assert KVLayout.uniform(1, 1, 27, BFLOAT16).stored_as("int4").head_shapes
    with pytest.raises(ConfigError, match="has kernels for CPUs only, the device is cuda"):
        check_kv_dtype("int4", Device("cuda"))
    check_kv_dtype("int4", DEVICE)
    check_kv_dtype("int8", Device("cuda"))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_memory_is_planned_as_it_is_allocated(kv_dtype: str) -> None:
    spec = read_spec(find_checkpoint(LoadConfig(model="demo")).path)
    shape = KVLayout.uniform(spec.num_layers, spec.num_kv_heads, spec.head_size, torch.bfloat16)
    stored = shape.stored_as(kv_dtype)
    kv = allocate_kv(stored, 3, 16, CPU)
    held = sum(cache.nbytes for cache in kv.tensors)
    assert held == kv_bytes(stored, 3, 16) == 48 * kv_bytes_per_token(spec, 2, kv_dtype)


def test_the_fingerprint_tells_kv_dtypes_apart() -> None:
    model = demo()
    found = {
        name: fingerprint_with_kv(model, model.kv_layout.stored_as(name)) for name in KV_DTYPES
    }
    assert found["auto"] == found["bfloat16"] == model.fingerprint
    assert len(set(found.values())) == len(KV_DTYPES) - 1


def test_an_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'fp4'"):
        CacheConfig(kv_dtype="fp4")


@pytest.mark.parametrize(("narrow", "num_same"), [("int8", 4), ("int4", 2), ("fp8", 4)])
def test_an_engine_answers_from_a_narrow_cache(narrow: str, num_same: int) -> None:
    options = {"dtype": "float32", "num_threads": 1, "num_blocks": 40}
    prompt, sampling = "The quick brown fox", SamplingParams(temperature=0.0, max_tokens=12)
    answers = {}
    for kv_dtype in ("auto", narrow):
        with LLM("demo", kv_cache_dtype=kv_dtype, **options) as llm:
            answers[kv_dtype] = llm.generate([prompt], sampling)[0].outputs[0].token_ids
    assert len(answers[narrow]) == 12
    assert answers[narrow][:num_same] == answers["auto"][:num_same]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bfloat16", "int8"), ("float32", "int8"), ("bfloat16", "int4"), ("bfloat16", "fp8")],
)
def test_requests_have_the_same_bits_alone_and_in_any_batch(dtype: str, kv_dtype: str) -> None:
    def load(threads: int) -> Decoder:
        return demo(dtype, load_native(threads), num_layers=2)

    options = VerifyOptions(num_requests=8, threads=(1, 2), kv_dtype=kv_dtype)
    report = verify(load, options, frozenset())
    assert report.first_mismatch is None
    assert report.comparisons > 15


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return logits_of(demo("float32"), "float32")


def text() -> list[int]:
    """384 tokens of English."""
    tokenizer = Tokenizer.from_file(str(find_checkpoint(LoadConfig()).path / "tokenizer.json"))
    return tokenizer.encode((REPOSITORY / "LICENSE").read_text(encoding="utf-8")).ids[:384]


def logits_of(model: Decoder, kv_dtype: str) -> Tensor:
    token_ids = text()
    driver = PagedDriver(model, len(token_ids) // 16, 16, kv_dtype)
    return driver.step([(driver.open(token_ids), len(token_ids))])[0].double().log_softmax(-1)


def perplexity(log_probabilities: Tensor) -> float:
    following = torch.tensor(text()[1:])
    return float(log_probabilities[:-1].gather(1, following[:, None]).mean().neg().exp())


@pytest.mark.parametrize(
    ("kv_dtype", "most_kl", "least_top1"),
    [
        ("float16", 1e-5, 0.99),
        ("bfloat16", 1e-3, 0.98),
        ("int8", 5e-3, 0.95),
        ("int4", 0.1, 0.8),
        ("fp8", 2e-2, 0.9),
    ],
)
def test_the_model_stays_itself(
    exact: Tensor, kv_dtype: str, most_kl: float, least_top1: float
) -> None:
    rounded = logits_of(demo("float32"), kv_dtype)
    assert float((exact.exp() * (exact - rounded)).sum(-1).mean()) < most_kl
    assert (exact.argmax(-1) == rounded.argmax(-1)).double().mean() > least_top1
    assert perplexity(rounded) == pytest.approx(perplexity(exact), rel=0.01)
