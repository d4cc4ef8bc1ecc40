"""`LLM(tensor_parallel_size=2)`: an engine of two processes, against one of one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_lists import workers
from tiny_checkpoint import write_checkpoint

from adapter_files import ALL, adapter_config, adapter_tensors, write_adapter, write_files
from quickstep import LLM, Grammar, LoRARequest, SamplingParams
from quickstep.cli.main import main
from quickstep.errors import ConfigError, EngineError
from quickstep.model.spec import read_spec

PROMPTS = ("a prompt of more than two blocks of sixteen tokens, twice" * 2, "xyz", "12 12 12 12 1")
KINDS = (
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1, "temperature": 0.9, "n": 2, "top_p": 0.9, "repetition_penalty": 1.2},
    {"seed": 2, "prompt_logprobs": 2, "stop": ["e"]},
    {"seed": 3, "frequency_penalty": 0.5, "min_p": 0.02, "logit_bias": {97: 2.0}},
    {"seed": 4, "grammar": Grammar.of_choice(["one", "two", "three"])},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("ranks")
    spec = read_spec(write_checkpoint(path / "base"))
    write_adapter(path / "a0", spec, ALL, rank=4)
    write_adapter(path / "a1", spec, (*ALL, "embed_tokens", "lm_head"), rank=16, seed=1)
    saved = adapter_tensors(spec, ALL, rank=3, seed=2)
    config = adapter_config(r=3, target_modules=list(ALL))
    write_files(path / "a2", config, saved)
    return path


def outputs(folder: Path, size: int, **options: Any) -> list[Any]:
    """What requests of every kind get, in one batch, and the embeddings of the prompts."""
    with LLM(
        str(folder / "base"), tensor_parallel_size=size, num_threads=2, seed=0, **options
    ) as llm:
        adapters: list[LoRARequest | None] = [None] * 5
        if "enable_lora" in options:
            names = [f"a{index}" for index in range(3)]
            adapters = [None, *(LoRARequest(name, 1, str(folder / name)) for name in names), None]
        prompts = [PROMPTS[place % 3] for place in range(25)]
        params = [SamplingParams(max_tokens=24, **KINDS[place // 5]) for place in range(25)]
        lora = [adapters[place % 5] for place in range(25)]
        answers = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
        found: list[Any] = [
            (answer.prompt_logprobs, [(one.token_ids, one.logprobs) for one in answer.outputs])
            for answer in answers
        ]
        return found + [one.outputs.embedding for one in llm.embed(list(PROMPTS), use_tqdm=False)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_lora": True, "max_lora_rank": 16}, id="adapters"),
        pytest.param({"enable_lora": True, "lora_dtype": "int8"}, id="int8 adapters"),
        pytest.param({"kv_cache_dtype": "int8", "num_blocks": 40}, id="int8 keys, preempted"),
        pytest.param(
            {
                "quantization": "int8",
                "speculative_config": {"method": "suffix", "num_speculative_tokens": 4},
                "max_num_batched_tokens": 32,
            },
            id="drafts",
        ),
        pytest.param({"dtype": "bfloat16", "use_kv_cache": False}, id="no cache"),
        pytest.param({"speculative_config": {"model": "base"}}, id="draft model"),
    ],
)
def test_two_processes_have_the_outputs_of_one(folder: Path, options: dict[str, Any]) -> None:
    draft = options.get("speculative_config", {})
    if "model" in draft:
        draft |= {"model": str(folder / draft["model"]), "num_speculative_tokens": 3}
    one, two = (outputs(folder, size, **options) for size in (1, 2))
    assert one == two


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder / "base"), tensor_parallel_size=2) as llm:
        yield llm


def ranks() -> list[int]:
    """The processes of other ranks than 0 that this process has started."""
    return workers(os.getpid(), b"engine.ranks.worker")


def test_an_engine_whose_rank_was_killed_fails_and_can_be_closed(llm: LLM) -> None:
    (rank,) = ranks()
    assert llm.generate("abc", use_tqdm=False)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineError, match="rank"):
        for _ in range(1000):
            llm.generate("abc", use_tqdm=False)
    llm.close()
    assert not ranks()


def test_a_closed_engine_leaves_no_process(llm: LLM) -> None:
    assert len(ranks()) == 1
    llm.close()
    assert not ranks()


def test_a_stopped_rank_delays_a_step_and_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=50, ignore_eos=True)
    (before,) = llm.generate("abc", params, use_tqdm=False)
    (rank,) = ranks()
    os.kill(rank, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 1; kill -CONT {rank}"], os.environ)
        (after,) = llm.generate("abc", params, use_tqdm=False)
        assert time.monotonic() > started_s + 0.5
    finally:
        os.kill(rank, signal.SIGCONT)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_verify_compares_ranks_with_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["verify", "demo", "-tp", "2", "--threads", "1", "--requests", "24", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mismatches"] == 0 and report["comparisons"] > 48
    assert not ranks()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 3}, "query heads and 2 KV heads; possible are 1, 2, 4"),
        ({"tensor_parallel_size": 0}, "must be from 1 to 64"),
        ({"tensor_parallel_size": 2, "enforce_eager": True}, "leave --enforce-eager out"),
        ({"tensor_parallel_size": 2, "kernels": "reference"}, "needs the native kernels"),
    ],
)
def test_what_ranks_cannot_compute_is_refused(
    folder: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(str(folder / "base"), **options)
    assert not ranks()
