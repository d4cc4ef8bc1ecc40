"""A model divided among processes, as ranks and as stages of a pipeline, against one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_cases import Case
from process_lists import workers
from tiny_checkpoint import VOCAB, write_checkpoint, write_tokenizer

from adapter_files import ALL, adapter_config, adapter_tensors, write_adapter, write_files
from quickstep import LLM, Grammar, LoRARequest, SamplingParams
from quickstep.cli.main import main
from quickstep.errors import ConfigError, EngineError
from quickstep.model.spec import read_spec
from quickstep.verify.report import VerifyOptions

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


RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}


def outputs(folder: Path, split: dict[str, int], **options: Any) -> list[Any]:
    """What requests of every kind get, in one batch, and the embeddings of the prompts."""
    with LLM(str(folder / "base"), num_threads=2, seed=0, **split, **options) as llm:
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
        pytest.param({"enable_lora": True, "enforce_eager": True}, id="op by op"),
        pytest.param({"kv_cache_dtype": "int8", "num_blocks": 40}, id="int8 keys, preempted"),
        pytest.param({"kv_cache_dtype": "int4"}, id="int4 keys"),
        pytest.param(
            {
                "quantization": "int8",
                "speculative_config": {"method": "suffix", "num_speculative_tokens": 4},
                "max_num_batched_tokens": 32,
            },
            id="drafts",
        ),
        pytest.param({"speculative_config": {"model": "base"}}, id="draft model"),
    ],
)
def test_processes_have_the_outputs_of_one(folder: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    draft = options.get("speculative_config", {})
    if "model" in draft:
        drafts = {"model": str(folder / draft["model"]), "num_speculative_tokens": 3}
        options["speculative_config"] = drafts
    one, two, stages = (outputs(folder, split, **options) for split in ({}, RANKS, STAGES))
    assert one == two
    assert one == stages


def test_a_mixture_of_experts_has_the_outputs_of_one_process(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "vocab_size": VOCAB}
    Case("mixture", "Mixtral", sizes | {"eos_token_id": 256}).save(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    spec = read_spec(tmp_path / "base")
    of_experts = (*ALL[:4], "gate", "w1", "w2", "w3")
    for index in range(3):
        targets = of_experts[: 4 + 2 * index]
        write_adapter(tmp_path / f"a{index}", spec, targets, rank=4, seed=index)
    options = {"enable_lora": True, "max_num_batched_tokens": 48}
    assert outputs(tmp_path, {}, **options) == outputs(tmp_path, {**RANKS, **STAGES}, **options)
    assert not ranks()


@pytest.mark.parametrize("lora_dtype", [None, "auto", "int8"])
def test_ranks_of_torch_have_the_outputs_of_one_process(
    folder: Path, lora_dtype: str | None
) -> None:
    options: dict[str, Any] = {"kernels": "reference"}
    if lora_dtype is not None:
        options |= {"enable_lora": True, "lora_dtype": lora_dtype}
    assert outputs(folder, {}, **options) == outputs(folder, RANKS, **options)
    assert not ranks()


def test_ranks_of_triton_with_adapters_have_the_outputs_of_one_process(folder: Path) -> None:
    """Interpreted, in processes of their own, as they run on GPUs."""
    pytest.importorskip("triton")

    def few_outputs(split: dict[str, int]) -> list[Any]:
        options = {"kernels": "triton", "enable_lora": True, "num_threads": 2}
        with LLM(str(folder / "base"), dtype="bfloat16", **options, **split) as llm:
            params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
            adapters = [LoRARequest("a1", 1, str(folder / "a1")), None]
            answers = llm.generate(["abc", "12"], params, use_tqdm=False, lora_request=adapters)
            return [answer.outputs[0].token_ids for answer in answers]

    one = few_outputs({})
    assert one == few_outputs(RANKS)
    assert not ranks()


def test_ranks_without_a_kv_cache_have_the_outputs_of_one_process(folder: Path) -> None:
    options = {"dtype": "bfloat16", "use_kv_cache": False}
    assert outputs(folder, {}, **options) == outputs(folder, RANKS, **options)


def test_stages_of_ranks_have_the_outputs_of_one_process(folder: Path) -> None:
    options = {"enable_lora": True, "max_lora_rank": 16, "max_num_batched_tokens": 48}
    assert outputs(folder, {}, **options) == outputs(folder, {**RANKS, **STAGES}, **options)
    assert not ranks()


@pytest.fixture(params=[RANKS, STAGES], ids=["ranks", "stages"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(folder / "base"), **request.param) as llm:
        yield llm


def ranks() -> list[int]:
    """The processes of other ranks and stages that this process has started."""
    return workers(os.getpid(), b"engine.ranks.worker")


def test_an_engine_whose_rank_was_killed_fails_and_can_be_closed(llm: LLM) -> None:
    (rank,) = ranks()
    assert llm.generate("abc", use_tqdm=False)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rank|stage"):
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


@pytest.mark.parametrize(
    "split",
    [("-tp", "2"), ("-tp", "2", "--against", "1"), ("-pp", "2", "--against", "2")],
    ids=["ranks", "ranks against one process", "stages against ranks"],
)
def test_verify_compares_processes(
    split: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "demo", *split, "--threads", "1", "--requests", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mismatches"] == 0 and report["comparisons"] > 24
    assert not ranks()


def test_verify_refuses_to_compare_ranks_with_as_many() -> None:
    with pytest.raises(ConfigError, match="compared with itself"):
        VerifyOptions(num_ranks=2, against=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 3}, "query heads and 2 KV heads; possible are 1, 2, 4"),
        ({"tensor_parallel_size": 0}, "must be from 1 to 64"),
        ({"pipeline_parallel_size": 9}, "the model has 2 layers; each stage needs one"),
        ({"pipeline_parallel_size": 2, "use_kv_cache": False}, "leave --no-kv-cache out"),
        ({"pipeline_parallel_size": 2, "kernels": "reference"}, "needs the native kernels"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    folder: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(str(folder / "base"), **options)
    assert not ranks()
