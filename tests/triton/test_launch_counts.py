"""Launches of a recorded step, counted without a GPU: of kernels, and of torch's ops.

In a graph, each costs more than a microsecond. Lower a ceiling when a launch is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from quickstep.model.checkpoint.random_weights import RandomTensors, RandomValues, random_model
from quickstep.model.spec import parse_spec
from quickstep.ops.table import OpTable
from quickstep.ops.triton import routing
from quickstep.ops.triton.backend import load_triton
from quickstep.runtime.cache.kv_cache import allocate_kv
from tools import compile_kernels

GPU = compile_kernels.GPU
CONFIGS = {case.name: case.config for case in compile_kernels.cases() if not case.quantization}

# Launches of a layer, and of the rest of the forward pass with its logits.
CEILINGS = {
    ("llama", 8, False): (9, 7),
    ("llama", 8, True): (18, 11),
    ("mixtral", 1, False): (12, 7),
    ("mixtral", 64, False): (12, 7),
    ("mixtral", 300, False): (13, 7),  # more tokens than one program routes: a plan of its own
    ("mixtral", 8, True): (23, 11),
    ("gpt-oss", 8, False): (12, 7),
    ("gpt-oss", 8, True): (18, 11),  # its experts have no adapters
}


WITHOUT_LAUNCH = ("device", "empty", "empty_like", "empty_strided", "new_empty")


class TorchLaunches(TorchDispatchMode):
    """Counts the ops that run something on a GPU."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in WITHOUT_LAUNCH:
            self._found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_gpu(found: Counter[str]) -> Iterator[None]:
    """Tensors without memory on a GPU that is not there; kernels are counted, and do not run."""
    kind: Any = type(routing._plan_kernel)

    def count(self: Any, *_: Any, **__: Any) -> None:
        found[self.fn.__name__] += 1

    with (
        mock.patch.object(kind, "run", count),
        mock.patch.object(FakeTensor, "data_ptr", lambda _: 0),
        mock.patch.object(RandomTensors, "_fill_", lambda *_: None),  # needs a GPU's generator
        mock.patch.object(torch.cuda, "get_device_name", lambda _: "H100"),
        mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)),
        mock.patch.object(
            torch.cuda,
            "get_device_properties",
            lambda _: SimpleNamespace(multi_processor_count=132),
        ),
        compile_kernels._AsOps(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.inference_mode(),
    ):
        yield


def launches(ops: OpTable, family: str, num_layers: int, num_rows: int, lora: bool) -> Counter[str]:
    """By kernel and op, of one recorded decode step."""
    config = {**(CONFIGS.get(family) or compile_kernels._LLAMA), "num_hidden_layers": num_layers}
    if "layer_types" in config:
        kinds: Any = config["layer_types"]
        config["layer_types"] = kinds * (num_layers // len(kinds))
    spec = parse_spec(config)
    found: Counter[str] = Counter()
    with fake_gpu(found):
        model = random_model(spec, ops, RandomValues(torch.bfloat16, GPU, 0, None), 4096, None)
        kv = allocate_kv(model.kv_layout, 64, 16, GPU)
        mapping = None
        if lora:
            assert ops.adapter_table is not None
            adapter = compile_kernels._adapter(spec, ops, torch.bfloat16)
            places = torch.zeros(num_rows, dtype=torch.int64, device=GPU)
            mapping = ops.adapter_table([adapter], 3).mapping(places)
        batch = compile_kernels._recorded(num_rows, num_rows, mapping)
        found.clear()
        with TorchLaunches(found):
            model.logits(model.forward(batch, kv), mapping)
    return found


@pytest.fixture(scope="module")
def gpu_ops() -> OpTable:
    table = load_triton(GPU)
    assert table is not None
    return table


@pytest.mark.parametrize(("family", "num_rows", "lora"), CEILINGS)
def test_a_recorded_step_has_few_launches(
    gpu_ops: OpTable, family: str, num_rows: int, lora: bool
) -> None:
    two, four = (launches(gpu_ops, family, layers, num_rows, lora) for layers in (2, 4))
    of_two_layers = four - two
    rest = two - of_two_layers
    of_layer, of_rest = CEILINGS[family, num_rows, lora]
    assert of_two_layers.total() <= 2 * of_layer, of_two_layers
    assert rest.total() <= of_rest, rest
