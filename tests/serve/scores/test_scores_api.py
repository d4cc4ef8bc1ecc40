"""Rerank and score over a scripted engine: shapes, order, limits, and what is refused."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import client_of
from fake_engine import FakeEngine, FakeStream, FakeTokenizer
from msgspec.structs import replace

from quickstep.core.admission import AdmissionState
from quickstep.engine.retrieval.card import Retrieval, Scoring
from quickstep.server.app import create_app
from quickstep.server.options import RequestLimits, ServerOptions, UsageOptions
from quickstep.server.usage.api_keys import ApiKey, ApiKeys
from quickstep.server.usage.limits import Budget, KeyLimits
from quickstep.server.usage.price_book import PriceBook, PriceEntry
from quickstep.types import Pooling, Request

RERANK = "/v1/rerank"
SCORE = "/v1/score"
COSINE = Retrieval(prompts={"query": "find: ", "passage": "text: "})


def post(
    path: str,
    body: dict[str, Any],
    engine: FakeEngine | None = None,
    options: ServerOptions | None = None,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def expected_score(prompt_len: int) -> float:
    """Of the scripted engine's logprobs: -1/n for yes, -1 for no."""
    return 1 / (1 + math.exp(1 / prompt_len - 1))


def test_the_likeliest_document_comes_first_with_its_index_and_text() -> None:
    engine = FakeEngine()
    body = {"query": "a", "documents": ["bb", {"text": "a long document"}, "c"]}
    answer = post(RERANK, body, engine).json()
    assert [result["index"] for result in answer["results"]] == [1, 0, 2]
    assert answer["results"][0]["document"] == {"text": "a long document"}
    lens = [len(item.prompt) for item in engine.submitted]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
        [expected_score(lens[index]) for index in (1, 0, 2)]
    )
    assert answer["usage"] == {"prompt_tokens": sum(lens), "total_tokens": sum(lens)}
    assert answer["meta"]["tokens"] == {"input_tokens": sum(lens), "output_tokens": 3}
    assert answer["model"] == "fake" and answer["id"].startswith("rerank-")


def test_equal_scores_keep_the_order_of_the_request() -> None:
    answer = post(RERANK, {"query": "a", "documents": ["x", "y", "z"]}).json()
    assert [result["index"] for result in answer["results"]] == [0, 1, 2]


def test_top_n_and_return_documents_cut_the_results() -> None:
    body = {"query": "a", "documents": ["bb", "cccc", "d"], "top_n": 2, "return_documents": False}
    answer = post(RERANK, body).json()
    assert [sorted(result) for result in answer["results"]] == [["index", "relevance_score"]] * 2
    body = {"query": "a", "documents": ["bb", "cccc"], "top_n": 0}
    assert len(post(RERANK, body).json()["results"]) == 2


@pytest.mark.parametrize("path", ["/v2/rerank", "/rerank"])
def test_coheres_path_has_the_same_answer(path: str) -> None:
    body: dict[str, Any] = {"query": "a", "documents": ["bb", "c"]}
    assert post(path, body).json()["results"] == post(RERANK, body).json()["results"]


def test_a_pair_is_the_question_of_the_model_card() -> None:
    engine = FakeEngine()
    post(RERANK, {"query": "why?", "documents": ["so"], "instruction": "find causes"}, engine)
    assert engine.chat_template is not None
    system, user = engine.chat_template.rendered
    assert system["role"] == "system" and 'only be "yes" or "no"' in system["content"]
    assert user["content"] == "<Instruct>: find causes\n<Query>: why?\n<Document>: so"
    [item] = engine.submitted
    assert item.sampling.max_tokens == 1 and item.sampling.logprob_token_ids == (121, 110)
    assert "enable_thinking=False" in engine.chat_template.texts[0]


def test_a_template_with_roles_for_pairs_gets_the_pair() -> None:
    engine = FakeEngine()
    engine.retrieval = replace(engine.retrieval, reads_pairs=True, default_prompt="query")
    post(RERANK, {"query": "why?", "documents": ["so"]}, engine)
    assert engine.chat_template is not None
    assert [(message["role"], message["content"]) for message in engine.chat_template.rendered] == [
        ("system", "Q: "),
        ("query", "why?"),
        ("document", "so"),
    ]


def test_a_model_with_a_pooling_compares_embeddings_with_its_own_prompts() -> None:
    engine = FakeEngine()
    engine.retrieval = COSINE
    answer = post(SCORE, {"text_1": "a", "text_2": ["bb", "cccc"]}, engine).json()
    assert [bytes(item.prompt[1:]).decode() for item in engine.submitted] == [
        "find: a",
        "text: bb",
        "text: cccc",
    ]
    assert all(item.pooling is Pooling.LAST for item in engine.submitted)
    lens = [len(item.prompt) for item in engine.submitted]
    assert [item["score"] for item in answer["data"]] == pytest.approx(
        [math.cos(lens[1] - lens[0]), math.cos(lens[2] - lens[0])]
    )
    assert answer["usage"]["prompt_tokens"] == sum(lens)
    refused = post(SCORE, {"text_1": "a", "text_2": "b", "instruction": "x"}, engine)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "instruction"


def test_pairs_of_two_lists_are_scored_one_by_one() -> None:
    for engine in (FakeEngine(), FakeEngine(retrieval=COSINE)):
        body = {"text_1": ["a", "bbb"], "text_2": ["cc", "d"]}
        answer = post(SCORE, body, engine).json()
        assert [item["index"] for item in answer["data"]] == [0, 1]
        assert answer["object"] == "list" and answer["data"][0]["object"] == "score"
    single = post(SCORE, {"text_1": "bbb", "text_2": "d"}).json()["data"][0]["score"]
    assert post(SCORE, body).json()["data"][1]["score"] == single


def test_long_documents_are_refused_or_shortened_as_the_request_says() -> None:
    engine = FakeEngine(max_model_len=400)
    body: dict[str, Any] = {"query": "q", "documents": ["short", "x" * 1000]}
    refused = post(RERANK, body, engine)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "documents"
    assert post(RERANK, {**body, "truncate_prompt_tokens": -1}, engine).status_code == 200
    assert [len(item.prompt) for item in engine.submitted][1] == 399
    engine.submitted.clear()
    assert post(RERANK, {**body, "max_tokens_per_doc": 7}, engine).status_code == 200
    short, long = (bytes(item.prompt) for item in engine.submitted)
    assert b"<Document>: xxxxxxx\n" in long and b"<Document>: short\n" in short
    too_few = post(RERANK, {**body, "truncate_prompt_tokens": 9}, engine)
    assert too_few.status_code == 400
    assert too_few.json()["error"]["param"] == "truncate_prompt_tokens"


class Watched(FakeEngine):
    """Notes how many steps had run when each request came."""

    def stream(self, request: Request) -> FakeStream:
        SEEN.append(self.num_steps)
        return super().stream(request)


SEEN: list[int] = []


@pytest.mark.parametrize(("block_size", "steps"), [(16, [0, 1, 1]), (256, [0, 0, 0])])
def test_the_first_pair_goes_ahead_of_those_that_share_its_beginning(
    block_size: int, steps: list[int]
) -> None:
    """Its blocks are in the cache when the others arrive: none of them computes the query again."""
    SEEN.clear()
    body = {"query": "q" * 40, "documents": ["a", "b", "c"]}
    assert post(RERANK, body, Watched(block_size=block_size)).status_code == 200
    assert steps == SEEN


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["t"]}, "rank_fields"),
        (RERANK, {"query": "a", "documents": ["b"] * 5}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "timeout_s": 0}, "timeout_s"),
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": [], "text_2": "b"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["b"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2}, None),
    ],
)
def test_a_bad_body_names_its_field(path: str, body: dict[str, Any], param: str | None) -> None:
    options = ServerOptions(limits=replace(RequestLimits(), prompts=4))
    refused = post(path, body, options=options)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == (param or "truncate_prompt_tokens")


def test_a_model_that_cannot_score_says_why() -> None:
    engine = FakeEngine(retrieval=Retrieval(refusal="no", scoring_refusal="its module Dense"))
    for path, body in ((RERANK, {"query": "a", "documents": ["b"]}), ("/v1/embeddings", None)):
        refused = post(path, body or {"input": "a"}, engine)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
    engine = FakeEngine(chat_template=None)
    refused = post(RERANK, {"query": "a", "documents": ["b"]}, engine)
    assert "no chat template" in refused.json()["error"]["message"]


def test_the_classes_of_texts_are_in_order_and_probabilities_add_up() -> None:
    engine = FakeEngine(retrieval=Retrieval(is_encoder=True, labels=("no", "yes")))
    answer = post("/v1/classify", {"input": ["a", "bcde"]}, engine).json()
    assert all(item.pooling is Pooling.CLASSES for item in engine.submitted)
    for index, (found, item) in enumerate(zip(answer["data"], engine.submitted, strict=True)):
        angle = len(item.prompt)
        assert found["index"] == index and found["num_classes"] == 2
        assert sum(found["probs"]) == pytest.approx(1)
        assert found["label"] == ("no" if math.cos(angle) > math.sin(angle) else "yes")
    assert answer["usage"]["total_tokens"] == sum(len(item.prompt) for item in engine.submitted)
    refused = post("/v1/classify", {"input": "a"}, FakeEngine(retrieval=COSINE))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
    assert post("/v1/classify", {"input": []}, engine).json()["error"]["param"] == "input"
    one = FakeEngine(retrieval=Retrieval(scoring=Scoring.CLASS, labels=("relevant",)))
    assert post(SCORE, {"text_1": "a", "text_2": "b"}, one).status_code == 200
    assert bytes(one.submitted[0].prompt) == b"\x01a\x02b\x02"


def test_embeddings_get_the_text_of_their_task_and_are_cut_on_request() -> None:
    engine = FakeEngine(max_model_len=20)
    for body in ({"input": "ab", "input_type": "search_query"}, {"input": "ab"}):
        assert post("/v1/embeddings", body, engine).status_code == 200
    assert [bytes(item.prompt[1:]) for item in engine.submitted] == [b"Q: ab", b"ab"]
    unknown = post("/v1/embeddings", {"input": "a", "input_type": "code"}, engine)
    assert "has texts for: query" in unknown.json()["error"]["message"]
    tokens = post("/v1/embeddings", {"input": [7], "input_type": "query"}, engine)
    assert tokens.json()["error"]["param"] == "input_type"
    engine.submitted.clear()
    long = {"input": "x" * 100}
    assert post("/v1/embeddings", long, engine).status_code == 400
    for most, num_tokens in ((-1, 20), (5, 5)):
        assert post("/v1/embeddings", {**long, "truncate_prompt_tokens": most}, engine).is_success
        assert len(engine.submitted[-1].prompt) == num_tokens


def test_the_time_of_an_answer_counts_from_its_request() -> None:
    """For every prompt, also for those that are submitted after the first is computed."""
    engine = FakeEngine(block_size=16)
    body = {"query": "q" * 40, "documents": ["a", "b", "c"], "timeout_s": 5}
    started_s = time.monotonic()
    assert post(RERANK, body, engine).status_code == 200
    received_s = {item.received_s for item in engine.submitted}
    assert len(received_s) == 1
    assert started_s <= (received_s.pop() or 0.0) <= time.monotonic()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RERANK, {"query": "q", "documents": ["a" * 4000]}),
        (SCORE, {"text_1": "q", "text_2": "a" * 4000}),
        ("/v1/embeddings", {"input": "a" * 4000}),
    ],
)
def test_a_budget_in_dollars_holds_for_requests_together(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """Of two that may cost most of it, one has to wait for what the other did cost."""
    prices = PriceBook(models={"fake": PriceEntry(input_per_million=1e6)})
    limits = KeyLimits(budgets=(Budget(per="day", usd=900.0),))
    options = ServerOptions(
        api_keys=ApiKeys([ApiKey("ann", "a", limits=limits)]),
        usage=UsageOptions(prices, tmp_path / "usage.db"),
    )

    async def run() -> list[int]:
        async with client_of(create_app(FakeEngine(max_model_len=8192), options)) as client:
            calls = (client.post(path, json=body, headers={"x-api-key": "a"}) for _ in "ab")
            return sorted(answer.status_code for answer in await asyncio.gather(*calls))

    assert asyncio.run(run()) == [200, 429]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/classify"])
def test_a_long_text_is_tokenized_as_far_as_it_is_read(path: str) -> None:
    tokenizer = CountingTokenizer()
    retrieval = Retrieval(is_encoder=True, labels=("no", "yes"))
    engine = FakeEngine(retrieval=retrieval, tokenizer=tokenizer, max_model_len=100)
    body = {"input": ["a" * 100_000, "b"], "truncate_prompt_tokens": 50}
    assert post(path, body, engine).status_code == 200
    assert [len(item.prompt) for item in engine.submitted] == [50, 2]
    assert sum(tokenizer.sizes) < 1000


class CountingTokenizer(FakeTokenizer):
    """Notes how many characters it tokenizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.sizes.append(len(text))
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RERANK, {"query": "a", "documents": ["b", "c"]}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/api/embed", {"model": "fake", "input": ["a", "b"]}),
    ],
)
def test_prompts_without_places_in_the_queue_are_not_tokenized(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.admission = AdmissionState(num_waiting=7, num_interactive=7, max_waiting=8)
    tokenized: list[object] = []
    monkeypatch.setattr(
        FakeTokenizer, "encode_all", lambda *args: tokenized.append(args), raising=False
    )
    assert post(path, body, engine).status_code == 429
    engine.admission = AdmissionState()
    assert not tokenized and not engine.submitted


def test_large_answers_are_encoded_too() -> None:
    body = {"query": "q", "documents": ["a" * 20_000, "b"], "max_tokens_per_doc": 300}
    answer = post(RERANK, body).json()
    assert {len(result["document"]["text"]) for result in answer["results"]} == {20_000, 1}
