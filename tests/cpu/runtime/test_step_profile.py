"""Profiles of steps, from Chrome traces as torch.profiler writes them."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quickstep.bench.step_profile import read_trace
from quickstep.errors import EngineError


def event(cat, name, ts, dur, tid=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 0}


# two steps on a GPU: the first launches by itself, the second is a graph
GPU = [
    event("cpu_op", "aten::mm", 0, 50),
    event("cuda_runtime", "cudaLaunchKernel", 5, 4),
    event("cuda_runtime", "cudaLaunchKernel", 12, 6),
    event("cuda_runtime", "cudaStreamSynchronize", 20, 100),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 10, tid=7),
    event("kernel", "linear", 110, 40, tid=7),
    event("kernel", "attention", 140, 30, tid=8),  # overlaps the product
    event("cuda_runtime", "cudaGraphLaunch", 160, 10),
    event("kernel", "linear", 190, 60, tid=7),
    {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 500},
]


def test_kernels_gaps_and_launches_of_a_gpu():
    found = read_trace(GPU)
    assert [(kernel.name, kernel.num_runs, kernel.total_us) for kernel in found.kernels] == [
        ("linear", 2, 100.0),
        ("attention", 1, 30.0),
        ("Memcpy HtoD (Pinned -> Device)", 1, 10.0),
    ]
    assert (found.span_us, found.busy_us, found.gaps_us) == (150.0, 130.0, (20.0,))
    assert (found.num_launches, found.launch_us) == (3, 20.0)
    figures = found.figures(2)
    assert figures["idle_us_per_step"] == 10.0
    assert figures["launches_per_step"] == 1.5
    assert figures["busy_share"] == pytest.approx(130 / 150)


def test_on_a_cpu_the_ops_of_torch_count_once():
    events = [
        event("cpu_op", "aten::linear", 0, 30),
        event("cpu_op", "aten::mm", 5, 20),
        event("cpu_op", "aten::mm", 5, 20, tid=2),
        event("user_annotation", "step", 0, 100),
    ]
    found = read_trace(events)
    assert {kernel.name: kernel.total_us for kernel in found.kernels} == {
        "aten::linear": 30.0,
        "aten::mm": 20.0,
    }


def test_a_trace_of_torch_is_read(tmp_path):
    import json

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    found = read_trace(json.loads(file.read_text())["traceEvents"])
    assert "aten::matmul" in {kernel.name for kernel in found.kernels}


def test_an_empty_trace_is_an_error():
    with pytest.raises(EngineError, match="neither"):
        read_trace([])
