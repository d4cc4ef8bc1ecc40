"""An engine with a model whose layers keep states: what is cached, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import CASES, Case
from tiny_checkpoint import VOCAB, write_tokenizer

from quickstep import LLM, SamplingParams
from quickstep.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    case = next(case for case in CASES if case.name == request.param)
    sizes = {"vocab_size": VOCAB, "eos_token_id": 256, "max_position_embeddings": 512}
    Case(case.name, case.family, {**case.values, **sizes}).save(path)
    write_tokenizer(path)
    return path


def served(llm: LLM, prompt: str | list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt were cached."""
    given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    [output] = llm.generate([given], GREEDY)
    return list(output.outputs[0].token_ids), output.metrics.num_cached_tokens


def test_prefixes_are_found_again(checkpoint: Path) -> None:
    with (
        LLM(str(checkpoint), state_interval=32) as llm,
        LLM(str(checkpoint), enable_prefix_caching=False) as uncached,
    ):
        first, others = TEXT, [TEXT[:70] + " else entirely", TEXT[:70] + " besides"]
        tokens, num_cached = served(llm, first)
        assert num_cached == 0
        again, num_cached = served(llm, first)
        assert (again, num_cached) == (tokens, (len(TEXT) - 1) // 16 * 16)
        # branches off at 70: the interval's state first, then that of the branching point
        found = [served(llm, prompt) for prompt in others]
        assert [cached for _, cached in found] == [64, 64]
        encode = llm.get_tokenizer().encode
        turn = [*encode(TEXT), *tokens, *encode(" and then")]
        found.append(served(llm, turn))
        # of the last block, accepted drafts are not in the state before a next row replays them
        assert found[-1][1] in (80, 96)
        for prompt, (answer, _) in zip([*others, turn], found, strict=True):
            assert served(uncached, prompt) == (answer, 0)


def test_a_branching_point_is_saved(checkpoint: Path) -> None:
    with LLM(str(checkpoint)) as llm:
        cached = [served(llm, TEXT[:70] + end)[1] for end in (" one" * 9, " two" * 9, " more" * 9)]
    assert cached == [0, 0, 64]


def test_a_system_prompt_is_found_by_the_second_request(checkpoint: Path) -> None:
    with LLM(str(checkpoint)) as llm:
        encode = llm.get_tokenizer().encode
        system = [*encode(TEXT[:70]), 256]  # the model's end token
        cached = [served(llm, [*system, *encode(end)])[1] for end in (" one" * 9, " two" * 9)]
    assert cached == [0, 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dir": "kv"}, "--kv-cache-dir is not supported"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is 2.*which one process computes"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is 2.*which one process"),
        ({"state_slots": 1}, "--state-slots is 1, it must be at least 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(
    checkpoint: Path, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    if "kv_cache_dir" in options:
        options = {"kv_cache_dir": str(tmp_path / "kv")}
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint), **options)


def test_few_slots_are_fewer_sequences(checkpoint: Path) -> None:
    with LLM(str(checkpoint), state_slots=3) as llm:
        outputs = llm.generate([TEXT[:20], TEXT[20:50], TEXT[50:70], TEXT], GREEDY)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 4
        assert [served(llm, output.prompt or "")[0] for output in outputs] == [
            list(output.outputs[0].token_ids) for output in outputs
        ]
