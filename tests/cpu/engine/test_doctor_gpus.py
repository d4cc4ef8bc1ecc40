"""What `quickstep doctor` says of GPUs, without one."""

from types import SimpleNamespace

import pytest
import torch

from quickstep.cli import doctor
from quickstep.engine import memory_plan
from quickstep.ops.tensors import Device


@pytest.fixture
def two_gpus(monkeypatch):
    found = SimpleNamespace(name="Some GPU", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 << 30, 80 << 30))


@pytest.mark.usefixtures("two_gpus")
def test_every_gpu_has_its_name_memory_and_capability(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    facts = doctor.collect_facts(with_bandwidth=False)["gpu"]
    assert facts["present"]
    assert facts["nccl"] is False
    for name in ("cuda:0", "cuda:1"):
        assert facts[name] == "Some GPU"
        assert facts[f"{name}_total_bytes"] == 80 << 30
        assert facts[f"{name}_free_bytes"] == 70 << 30
        assert facts[f"{name}_capability"] == "9.0"


@pytest.mark.usefixtures("two_gpus")
def test_the_speed_of_a_gpu_is_measured_on_it(monkeypatch):
    from contextlib import nullcontext

    from quickstep.bench import limits

    measured = []

    def open_limits(device, *_):
        measured.append(device)
        return SimpleNamespace(read_bytes_per_s=lambda: 3e12, flops_per_s=lambda: 7e14)

    monkeypatch.setattr(limits, "open_limits", open_limits)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    facts = doctor._gpu_facts(with_speed=True)
    assert measured == [Device("cuda", 0), Device("cuda", 1)]
    assert facts["cuda:1_copy_bytes_per_s"] == 3e12
    assert facts["cuda:1_bfloat16_flops_per_s"] == 7e14


def test_memory_that_torch_keeps_of_an_engine_that_is_gone_is_free(monkeypatch):
    kept = [30 << 30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((70 << 30) - kept[0], 80 << 30))
    assert memory_plan._free_bytes(Device("cuda", 0)) == 70 << 30
