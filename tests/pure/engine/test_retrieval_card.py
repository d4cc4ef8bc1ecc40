"""What a checkpoint's sentence-transformers files say, and what is refused of them."""

import json
from pathlib import Path

import pytest

from quickstep.engine.retrieval.card import Retrieval, Scoring, read_retrieval
from quickstep.engine.retrieval.pairs import prompt_of_task
from quickstep.errors import ConfigError, RequestError
from quickstep.types import Pooling

POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
HEAD = {"type": "sentence_transformers.cross_encoder.modules.LogitScore", "path": "1_LogitScore"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


def card(path: Path, files: dict[str, object]) -> Retrieval:
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return read_retrieval(path, 7, 8)


def test_a_model_without_files_is_asked_if_it_can_answer(tmp_path: Path) -> None:
    asked = read_retrieval(tmp_path, 7, 8)
    assert (asked.scoring, asked.true_token_id, asked.false_token_id) == (Scoring.TOKENS, 7, 8)
    assert not asked.reads_pairs
    assert read_retrieval(tmp_path, None, 8) == Retrieval()
    assert read_retrieval(tmp_path / "model.gguf", None, None) == Retrieval()


@pytest.mark.parametrize(
    ("values", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.CLS),
        ({"pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
def test_a_pooling_makes_scores_cosines(
    tmp_path: Path, values: dict[str, object], pooling: Pooling
) -> None:
    read = card(tmp_path, {"modules.json": [POOLING], "1_Pooling/config.json": values})
    assert read == Retrieval(pooling=pooling)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        (
            {
                "1_Pooling/config.json": {
                    "pooling_mode_mean_tokens": True,
                    "pooling_mode_cls_token": True,
                }
            },
            " and ",
        ),
        ({"modules.json": [POOLING, DENSE]}, "module Dense"),
        (
            {
                "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False},
                "config_sentence_transformers.json": {"prompts": {"query": "Q: "}},
            },
            "without the prompt's tokens",
        ),
    ],
)
def test_what_is_not_implemented_refuses_vectors_and_scores(
    tmp_path: Path, files: dict[str, object], why: str
) -> None:
    read = card(tmp_path, files)
    assert why in read.refusal and why in read.scoring_refusal


def test_a_head_of_two_tokens_reads_pairs(tmp_path: Path) -> None:
    config = {"true_token_id": 3, "false_token_id": 4}
    read = card(tmp_path, {"modules.json": [HEAD], "1_LogitScore/config.json": config})
    assert (read.scoring, read.true_token_id, read.false_token_id) == (Scoring.TOKENS, 3, 4)
    assert read.reads_pairs
    one = card(tmp_path, {"1_LogitScore/config.json": {"true_token_id": 3}})
    assert "logit of one token" in one.scoring_refusal and not one.refusal


@pytest.mark.parametrize(
    "content", ['{"a"', "[1]", '[{"type": "a.Pooling", "path": "../x"}]', '[{"path": "x"}]']
)
def test_a_damaged_list_of_modules_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_retrieval(tmp_path, None, None)


def test_tasks_have_the_names_of_several_families() -> None:
    card = Retrieval(prompts={"search_query": "q: ", "code": "c: "}, default_prompt="code")
    assert prompt_of_task(card, None) == "c: "
    assert prompt_of_task(card, "query") == prompt_of_task(card, "search_query") == "q: "
    assert prompt_of_task(card, "code") == "c: "
    assert prompt_of_task(card, "passage") == ""
    with pytest.raises(RequestError, match="has texts for: code, search_query"):
        prompt_of_task(card, "clustering")
