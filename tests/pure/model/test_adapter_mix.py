"""Several adapters at their scales as one: what they compute, and their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from adapter_files import SMALL_LLAMA as SPEC
from adapter_files import write_adapter
from quickstep.engine.adapters import mix_name, mix_parts
from quickstep.errors import RequestError
from quickstep.model.adapters.checkpoint import LoRAWeights, open_adapter
from quickstep.model.adapters.mix import mixed
from quickstep.ops.tensors import BFLOAT16, FLOAT32, DType, HostTensor, as_float64


def weights(path: Path, seed: int, dtype: DType = FLOAT32, **options: object) -> LoRAWeights:
    folder = write_adapter(path / f"{seed}", SPEC, seed=seed, **options)  # type: ignore[arg-type]
    return open_adapter(folder, SPEC, 64).read(dtype)


def change(adapter: LoRAWeights, module: int, x: np.ndarray, num_outputs: int) -> np.ndarray:
    """What an adapter adds to a matrix's outputs."""
    y = np.zeros(num_outputs)
    for part in adapter.modules[module]:
        a, b = as_float64(part.a), as_float64(part.b)
        y[part.first_output : part.first_output + len(b)] += part.scale * (b @ (a @ x))
    return y


@pytest.mark.parametrize(("dtype", "tolerance"), [(FLOAT32, 1e-6), (BFLOAT16, 4e-3)])
def test_a_mix_adds_what_its_adapters_add(tmp_path: Path, dtype: DType, tolerance: float) -> None:
    first = weights(tmp_path, 0, dtype, rank=4)
    second = weights(tmp_path, 1, dtype, rank=7, targets=("q_proj", "down_proj"), lora_alpha=3)
    mix = mixed([(first, 0.5), (second, -1.7)])
    assert mix.rank == 11
    rng = np.random.default_rng(0)
    for module in range(len(mix.modules)):
        num_inputs = {part.a.shape[1] for part in mix.modules[module]} or {32}
        x = rng.normal(size=num_inputs.pop())
        expected = 0.5 * change(first, module, x, 96) - 1.7 * change(second, module, x, 96)
        got = change(mix, module, x, 96)
        assert np.abs(got - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def test_biases_are_scaled_and_added(tmp_path: Path) -> None:
    bias = HostTensor(np.ones(32, np.float32), FLOAT32)
    first, second = weights(tmp_path, 0), weights(tmp_path, 1, targets=("q_proj",))
    modules = [[replace(part, bias=bias) for part in parts] for parts in first.modules]
    first = replace(first, modules=tuple(map(tuple, modules)))
    q, *_ = mixed([(first, 0.5), (second, 3.0)]).modules[0]
    assert q.bias is not None and np.array_equal(q.bias.numpy(), np.full(32, 0.5))
    q, *_ = mixed([(first, -0.5)]).modules[0]
    assert q.bias is not None and np.array_equal(q.bias.numpy(), np.full(32, -0.5))


def test_one_adapter_at_a_scale_keeps_its_tensors(tmp_path: Path) -> None:
    adapter = weights(tmp_path, 0)
    mix = mixed([(adapter, 0.25)])
    for parts, scaled in zip(adapter.modules, mix.modules, strict=True):
        for part, other in zip(parts, scaled, strict=True):
            assert other.a is part.a and other.b is part.b and other.scale == 0.25 * part.scale


def test_the_content_id_is_that_of_adapters_and_scales(tmp_path: Path) -> None:
    first, second = weights(tmp_path, 0), weights(tmp_path, 1)
    mixes = [
        mixed(parts)
        for parts in (
            [(first, 0.5)],
            [(first, 0.25)],
            [(first, 0.5), (second, 0.5)],
            [(first, 0.5), (second, 1.0)],
        )
    ]
    assert len({one.content_id for one in (first, second, *mixes)}) == 6
    assert mixed([(first, 0.5)]).content_id == mixes[0].content_id


@pytest.mark.parametrize(
    ("scales", "name", "parts"),
    [
        ({}, "", ()),
        ({"a": 0.0}, "", ()),
        ({"a": 1.0, "b": 0}, "a", ()),
        ({"b": 1.0, "a": 0.5}, "a*0.5+b*1", (("a", 0.5), ("b", 1.0))),
        ({"a": -2.0000000001}, "a*-2", (("a", -2.0),)),
        ({"x/y": 1e-5, "b": 3}, "b*3+x/y*1e-05", (("b", 3.0), ("x/y", 1e-5))),
    ],
)
def test_names(scales: dict[str, float], name: str, parts: object) -> None:
    assert mix_name(scales) == name
    assert mix_parts(name) == parts


@pytest.mark.parametrize(
    ("scales", "part"),
    [
        ({"a": float("nan")}, "scale of the adapter 'a' is nan"),
        ({"a": float("inf")}, "must be from -100 to 100"),
        ({"a": 101.0}, "must be from -100 to 100"),
        ({"a+b": 0.5}, "has + or * in its name"),
        ({"a": 0.5, "b*2": 1.0}, "has + or * in its name"),
    ],
)
def test_what_has_no_name_is_refused(scales: dict[str, float], part: str) -> None:
    with pytest.raises(RequestError) as caught:
        mix_name(scales)
    assert part in str(caught.value)


def test_an_adapter_at_scale_one_may_have_any_name() -> None:
    assert mix_name({"a+b": 1.0}) == "a+b"


@pytest.mark.parametrize("name", ["a", "a*", "*1", "a+b", "a*x", "a*1+b", "a*1+", "+"])
def test_other_names_are_no_mix(name: str) -> None:
    assert mix_parts(name) == ()
