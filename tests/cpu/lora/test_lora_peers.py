"""The comparison of LoRA adapters with vLLM: how the servers are started."""

from __future__ import annotations

import pytest

from benchmarks.lora_peers import launch_with_adapters
from benchmarks.peers.contestants import Contestant
from benchmarks.peers.environments import Environment
from benchmarks.peers.workloads import WorkloadSize


@pytest.mark.parametrize("engine", ["quickstep", "vllm"])
def test_servers_get_the_adapters_by_name(engine, tmp_path):
    one = Contestant(engine, "bf16", tmp_path, Environment(engine, tmp_path), threads=2)
    paths = [tmp_path / "a", tmp_path / "b"]
    command = launch_with_adapters(one, WorkloadSize(64, 64), paths, 16).command
    at = command.index("--lora-modules")
    assert command[at + 1 :] == tuple(f"{path.name}={path}" for path in paths)
    assert command[command.index("--max-loras") + 1] == "2"
