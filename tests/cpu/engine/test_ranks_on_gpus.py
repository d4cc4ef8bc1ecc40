"""Ranks that have a GPU each, as far as that can be tested without one: which device each gets,
what of the memory, over what they exchange. CUDA and NCCL are doubles, or gloo between CPUs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import as_on_gpus
import pytest
import torch
import torch.distributed as dist
from golden_cases import Case
from msgspec.structs import replace
from rank_threads import run_ranks
from tiny_checkpoint import write_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode

from quickstep import LLM, SamplingParams
from quickstep.config import EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine import assembly, memory_plan
from quickstep.engine.ranks import processes
from quickstep.engine.ranks.processes import opening_config
from quickstep.errors import ConfigError, EngineError
from quickstep.model import loader
from quickstep.model.decoder import Decoder
from quickstep.model.sharding import planned_part
from quickstep.model.sizing import (
    ElementBytes,
    KVBlockSize,
    MemoryPlan,
    kv_bytes_per_token,
    weight_bytes,
    with_measured_activations,
)
from quickstep.model.spec import read_spec
from quickstep.ops import collective
from quickstep.ops.collective import CollectiveRanks, open_ranks
from quickstep.ops.native.backend import load_native
from quickstep.ops.native.ranks import RankMemory
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import CPU, Device, integers_on
from quickstep.ops.weights import LinearWeight
from quickstep.runtime.steps.eager import EagerSteps
from quickstep.runtime.steps.opening import device_graphs
from quickstep.runtime.steps.ranked import RankedSteps


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny"))


# -- which device ----------------------------------------------------------------------------------


def test_each_rank_has_the_next_gpu_and_the_kernels_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(LoadConfig("demo", device="cuda:2", tensor_parallel_size=3))
    ops = replace(reference_ops(), name="triton")
    opened = [opening_config(config, ops, Device("cuda", 2), rank).load for rank in (1, 2)]
    assert [(load.device, load.kernels) for load in opened] == [
        ("cuda:3", "triton"),
        ("cuda:4", "triton"),
    ]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert opening_config(config, ops, Device("cuda"), 1).load.device == "cuda:2"
    assert opening_config(config, ops, CPU, 1) == config


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(assembly, "_gpu_text", lambda _: "Some GPU")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"device": "cuda", "tensor_parallel_size": 4},
            "needs a GPU for each rank, cuda:0 to cuda:3, and torch sees 2 GPUs",
        ),
        (
            {"device": "cuda:1", "tensor_parallel_size": 2},
            "needs a GPU for each rank, cuda:1 to cuda:2, and torch sees 2 GPUs",
        ),
        ({"device": "cuda", "tensor_parallel_size": 2}, "needs NCCL, which this build of torch"),
        ({"device": "cuda", "pipeline_parallel_size": 2}, "size 2 runs on CPUs only"),
        (
            {"device": "cuda", "tensor_parallel_size": 2, "kv_cache_dir": "kv"},
            "stored KV blocks need engines of one process: leave --tensor-parallel-size",
        ),
    ],
)
def test_what_does_not_run_on_several_gpus_is_refused(
    checkpoint: Path, options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=says):
        LLM(str(checkpoint), kernels="reference", **options)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_on_gpus_hand_no_kv_blocks_over(checkpoint: Path) -> None:
    load = LoadConfig(str(checkpoint), device="cuda", kernels="reference", tensor_parallel_size=2)
    config = EngineConfig(load, scheduler=SchedulerConfig(transfers_kv=True))
    with pytest.raises(
        ConfigError, match="prefill and decode on different engines need engines of one process"
    ):
        assembly.open_engine(config)


@pytest.mark.usefixtures("two_gpus")
def test_a_start_on_gpus_says_that_these_ranks_were_tested_on_cpus(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(assembly, "plan_for", stop)
    with pytest.raises(KeyboardInterrupt):
        LLM(str(checkpoint), kernels="reference", device="cuda", tensor_parallel_size=2)
    assert "tested on CPUs only" in caplog.text


def stop(*_: object) -> None:
    raise KeyboardInterrupt


# -- over what they exchange -----------------------------------------------------------------------


class NCCLDouble:
    """`ProcessGroupNCCL`, over gloo."""

    class Options:
        _timeout: object = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options._timeout is not None
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
        self.allgather = self._group.allgather
        self.abort = self._group.abort


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCLDouble, raising=False)
    on_cpu = torch.device("cpu")
    monkeypatch.setattr(collective, "integers_on", lambda _, *values: integers_on(on_cpu, *values))


def in_threads(
    run: Callable[[CollectiveRanks, int], Any], store: Path, device: Device
) -> list[Any]:
    """What two ranks of a group return or raise."""
    memory, found = RankMemory.create(4096, 4096, 2), [None, None]

    def follow(rank: int) -> None:
        native = load_native(1)
        assert native is not None and native.steps is not None
        try:
            ranks = open_ranks(str(store), native.steps.ranks(memory, rank), device)
            found[rank] = run(ranks, rank)
        except EngineError as error:
            found[rank] = error

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.usefixtures("nccl")
def test_ranks_on_gpus_exchange_over_nccl(tmp_path: Path) -> None:
    def gathered(ranks: CollectiveRanks, rank: int) -> object:
        assert isinstance(ranks._group, NCCLDouble)
        own = range(2) if rank == 0 else range(2, 5)
        return ranks.gather(torch.full((1, len(own)), float(rank)), own, 5).tolist()

    found = in_threads(gathered, tmp_path / "store", Device("cuda", 0))
    assert found == [[[0.0, 0.0, 1.0, 1.0, 1.0]]] * 2


@pytest.mark.usefixtures("nccl")
def test_an_exchange_that_returns_something_else_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(NCCLDouble):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            gather = self.allgather

            def allgather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
                gather(outputs, inputs).wait()
                outputs[0][1].zero_()
                return SimpleNamespace(wait=lambda: None)

            self.allgather = allgather

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Wrong)
    found = in_threads(stop, tmp_path / "store", Device("cuda", 0))
    assert all("exchange their numbers" in str(error) for error in found)


def test_ranks_agree_on_the_least_count(tmp_path: Path) -> None:
    counts = (70, 60)
    found = in_threads(lambda ranks, rank: ranks.least(counts[rank]), tmp_path / "store", CPU)
    assert found == [60, 60]


def test_a_broken_exchange_ends_the_wait_of_the_other_rank(tmp_path: Path) -> None:
    def run(ranks: CollectiveRanks, rank: int) -> object:
        if rank == 0:
            ranks.break_()
            return None
        return ranks.least(1)

    _, error = in_threads(run, tmp_path / "store", CPU)
    assert isinstance(error, EngineError) and "the exchange between ranks failed" in str(error)


@pytest.mark.parametrize("error", [MemoryError(), EngineError("the same in all ranks")])
def test_the_others_do_not_wait_for_a_step_that_failed_in_rank_0_only(error: Exception) -> None:
    broken: list[bool] = []

    def fail(*_: object) -> None:
        raise error

    own: Any = SimpleNamespace(call=fail)
    ranks: Any = SimpleNamespace(post=lambda *_: None)
    exchange: Any = SimpleNamespace(break_=lambda: broken.append(True))
    steps = RankedSteps(own, ranks, exchange)
    call: Any = None
    with pytest.raises(type(error)):
        steps.call(call, (), (1, 1), False)
    assert bool(broken) == isinstance(error, MemoryError)


def test_results_that_a_lost_rank_has_left_incomplete_are_not_read(tmp_path: Path) -> None:
    """On a GPU, an exchange that is aborted raises nothing where its results are used."""

    def run(ranks: CollectiveRanks, rank: int) -> object:
        own: Any = SimpleNamespace(call=lambda *_: ranks.break_() if rank == 0 else "results")
        posting: Any = SimpleNamespace(post=lambda *_: None)
        call: Any = None
        return RankedSteps(own, posting, ranks).call(call, (), (1, 1), False)

    error, results = in_threads(run, tmp_path / "store", CPU)
    assert isinstance(error, EngineError) and results == "results"


def test_ranks_on_gpus_have_no_graphs_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ops = SimpleNamespace(reads_lengths=True, ranks=object())
    model: Any = SimpleNamespace(device=Device("cuda", 0), ops=ops)
    kv: Any = None
    assert device_graphs(model, kv, 8, 1, 64) is None
    assert "without CUDA graphs" in caplog.text


# -- what of the memory ----------------------------------------------------------------------------


def packed_bytes(model: Decoder) -> int:
    """Of the matrices, an embedding that is the projection once."""
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, LinearWeight | torch.Tensor):
            found[id(value)] = value.nbytes
        elif isinstance(value, tuple):
            for part in value:
                add(part)
        elif hasattr(value, "__struct_fields__"):
            for name in value.__struct_fields__:
                add(getattr(value, name))

    add(model.weights)
    return sum(found.values())


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_rank_plans_the_weights_and_kv_heads_of_its_part(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    Case("wide", family, sizes).save(tmp_path)
    load = LoadConfig(str(tmp_path), dtype="bfloat16", quantization=quantization)
    spec, elements = read_spec(tmp_path), ElementBytes(2, 0, quantization)
    part, of_part = planned_part(spec, elements, 2)
    assert of_part.weights is not None
    held, *_ = run_ranks(
        tmp_path,
        load,
        2,
        lambda model, _: (packed_bytes(model), model.kv_layout.bytes_per_token),
        store=tmp_path / "store",
        make_ops=reference_ops,
    )
    assert held[0] == pytest.approx(of_part.weights, rel=0.03)
    assert held[1] == kv_bytes_per_token(part, 2)
    assert part.intermediate_size == spec.intermediate_size  # activations are gathered
    complete = weight_bytes(spec, 2, quantization)
    _, of_held = planned_part(spec, replace(elements, weights=complete), 2)
    assert of_held.weights == pytest.approx(of_part.weights, rel=0.05)


def test_a_plan_has_the_blocks_that_fit_on_every_device() -> None:
    plan = MemoryPlan(1000, 8000, 64, 2048, (), ())
    block = KVBlockSize(16, 1 << 20)
    measured = with_measured_activations(plan, 2 << 30, 20 << 30, block, lambda own: own - 900)
    assert measured.num_blocks == 100 and measured.max_model_len == 1600
    assert "KV blocks 1000 became 100" in measured.notes[0]


@pytest.fixture
def measured_as_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(as_on_gpus.SITECUSTOMIZE)
    monkeypatch.syspath_prepend(tmp_path)  # of the processes that are started, too
    for module, name in (
        (assembly, "measured_plan"),
        (memory_plan, "_free_bytes"),
        (as_on_gpus.activation_probe, "measured_activation_bytes"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored at the end
    as_on_gpus.install()


@pytest.mark.usefixtures("measured_as_on_gpus")
def test_ranks_that_measure_their_memory_take_what_fits_in_all_of_them(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    options = {"kernels": "reference", "max_num_batched_tokens": 64, "enable_lora": True}
    found = []
    for size in (1, 2):
        with LLM(str(checkpoint), tensor_parallel_size=size, **options) as llm:
            plan = llm.engine.memory_plan
            assert plan is not None
            answers = llm.generate(["abc", "12 12"], params, use_tqdm=False)
            found.append((plan.num_blocks, [answer.outputs[0].token_ids for answer in answers]))
    (blocks, tokens), (fewer_blocks, same_tokens) = found
    assert fewer_blocks < blocks
    assert tokens == same_tokens


def test_a_rank_whose_device_is_full_says_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("1 MiB")

    monkeypatch.setattr(loader, "load_model", no_memory)
    config = EngineConfig(LoadConfig(str(checkpoint), device="cpu", tensor_parallel_size=2))
    plan, memory = MemoryPlan(1, 16, 1, 16, (), ()), RankMemory.create(4096, 4096, 2)
    with pytest.raises(ConfigError, match="cpu has too little free memory for its part"):
        assembly.open_rank(config, plan, memory, 1, 0, "")


def test_a_start_fails_with_the_sentence_of_a_rank_that_does_not_join(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another(config: EngineConfig, *_: object) -> EngineConfig:
        return replace(config, load=replace(config.load, model="missing"))

    monkeypatch.setattr(processes, "opening_config", of_another)
    with pytest.raises(ConfigError, match=r"^rank 1 of 2: .*missing"):
        LLM(str(checkpoint), kernels="reference", tensor_parallel_size=2)


FAILING_LOAD = """
from quickstep.errors import ConfigError
from quickstep.model import loader

def load_model(*_):
    raise ConfigError("its disk is gone")

loader.load_model = load_model
"""


def test_a_start_fails_with_the_sentence_of_a_rank_that_cannot_load_its_part(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for its part of the biases."""
    (tmp_path / "sitecustomize.py").write_text(FAILING_LOAD)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^rank 1 of 2: its disk is gone"):
        LLM(str(checkpoint), kernels="reference", tensor_parallel_size=2, enable_lora=True)


def test_hidden_states_leave_rank_0_through_memory_of_the_host() -> None:
    posted: list[torch.Tensor] = []
    computed: list[torch.Tensor] = []
    own: Any = SimpleNamespace(logits_with=lambda hidden, _: computed.append(hidden))
    ranks: Any = SimpleNamespace(post=lambda *_, data: posted.append(data))
    with FakeTensorMode():
        hidden = torch.empty((2, 8), device="cuda")
        RankedSteps(own, ranks).logits_with(hidden, None)
    assert posted[0].device.type == "cpu" and computed[0].device.type == "cuda"


def test_another_rank_computes_logits_on_its_own_device() -> None:
    seen: list[str] = []
    kv = KVCache((), ())
    model: Any = SimpleNamespace(
        device=Device("cuda", 0), logits=lambda hidden, _: seen.append(hidden.device.type)
    )
    with FakeTensorMode():
        EagerSteps(model, kv, 16).logits_with(torch.empty((2, 8)), None)
    assert seen == ["cuda"]
