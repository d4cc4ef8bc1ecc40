"""Thousands of requests drawn from our own document: each one answered as the document says.

No failure of ours, no hang, no answer of another shape, nothing left behind. What fits the schema
is refused only for a reason that a schema cannot tell; what does not fit is always refused.
"""

import json
import re

import httpx
import pytest
import schemathesis
from api_cases import (
    NEGATIVE,
    POSITIVE,
    GenerationMode,
    OpenApp,
    as_integers,
    default_api,
    endpoints,
    json_request,
    message_of,
    num_cases,
    operations,
    request_of,
)
from fake_engine import FakeEngine
from hypothesis import given, note
from hypothesis import strategies as st
from starlette.routing import Route

from quickstep.server.app import create_app

CASES_EACH = 100  # each mode of each endpoint with a body
SCHEMATHESIS_CASES_EACH = 5  # a second opinion, which takes 30 to 140 ms to draw a body
WITHOUT_BODY_EACH = 25
APP = create_app(FakeEngine())
API = default_api()
WITH_BODY = [item for item in endpoints(API.document) if API.has_body(*item)]
SECOND_PATHS = sorted({*operations(API.document)} - {*endpoints(API.document)})
WITHOUT_BODY = [item for item in operations(API.document) if not API.has_body(*item)]

# Why a body that fits the schema may be refused: rules across fields, and what lies in a text.
BEYOND_THE_SCHEMA = re.compile(
    r"""
    stream_options\ needs\ stream
    | background:\ true\ needs\ store
    | starting_after\ needs\ stream|conv_id\ is|conversation_id\ has
    | id_slot\ is\ -?\d+,|id_slot\ is\ '|slot\ \d+\ has\ no\ tokens|filename\ is\ '
    | from\ is\ .*,\ the\ stream\ has | a\ server\ without\ API\ keys\ lists
    | top_logprobs\ needs\ (logprobs|include)
    | logprob_token_ids\ needs\ logprobs | truncate_prompt_tokens\ is
    | truncation_side\ needs
    | \w+_budget(_tokens)?\ (is\ not\ supported|cannot|is\ -?\d+\ and)
    | reasoning_budget_message\ needs
    | repetition_detection\.min_(pattern_size|count)\ is
    | timeout_s\ is\ .*\ (inf|nan|above)
    | best_of\ is\ .*,\ (below|above)\ n
    | (length_penalty|early_stopping)\ needs\ use_beam_search
    | prompt_logprobs\ cannot\ be\ streamed
    | (max_tokens|max_completion_tokens|n_predict)\ is\ 0,\ it\ must\ be\ at\ least\ 1\ unless
    | suffix\ (is\ not\ supported|needs\ a\ prompt)
    | echo\ cannot\ go
    | (documents|text_[12])\ is\ (an\ empty\ list|missing)|input_type\ is
    | text_1\ has
    | dimensions\ is\ .*\ the\ model's\ embeddings\ have
    | input\ is\ (missing|empty)
    | input\[\d+\]\.(arguments|encrypted_content)
    | endpoint\ is\ |completion_window\ is\ |there\ is\ no\ file
    | send\ (one\ of\ prompt|the\ file\ as\ multipart)
    | after\ is\ .*(not\ in\ the\ list|no\ such\ item)
    | \w+\ does\ not\ go\ with
    | previous_response_id\ .*\ is\ not\ found
    | reasoning_effort|reasoning\.effort|output_config\.effort|thinking\.
    | .*\ holds\ token\ id
    | (prompt|input|.*tokens)\ .*\ the\ limit\ is
    | prompt\ mixes
    | samplers\ |repeat_last_n\ is|grammar\ is\ no\ GBNF
    | n_predict\ is\ .*\ and\ max_tokens|logit_bias\ of
    | response_fields | there\ is\ no\ adapter | lora\ has
    | messages\[\d+\]\ (calls\ a\ tool|is\ no\ message\ of\ the\ assistant)
    | continue_final_message\ and
    | the\ last\ message\ cannot\ be\ continued
    | text\.format(\.schema)?\ (cannot\ go|and)
    | tool_choice\ is|tool_choice\.(mode|tools\[\d+\])
    | tools\[\d+\]\.(strict\ is\ not|name\ .*twice|(parameters|input_schema)\ describes)
    | include\[
    | min_tokens\ is\ .*\ above\ max_tokens
    | max_tokens\ is\ .*\ and\ max_completion_tokens\ is
    | structured_outputs\ has | [\w.]+\ and\ [\w.]+\ both\ constrain
    | .*\ cannot\ go\ with\ 
    | tool_choice\ (asks\ for\ a\ call|cannot\ be\ enforced)
    | tools\[\d+\]\.function\.(parameters\ describes|name\ .*twice)
    | messages\[\d+\]\.content\ is\ missing
    | messages\[\d+\]\.tool_calls\[\d+\]\.function\.arguments\ is\ not\ the\ JSON\ text
    | response_format\.json_schema(\.schema)?\ is\ missing
    | the\ (prompt|input)\ is\ empty | prompt\ (has\ \d+\ tokens|is\ too\ long)
    | logit_bias\ (holds\ token\ id|has\ \d+\ characters\ in\ one\ text)
    | options\.repeat_last_n\ is | system\ cannot\ go | model\ is\ missing
    | models\ cannot\ be\  | the\ only\ model\ of\ this\ server
    | (ignore_eos|allowed_token_ids)\ cannot\ be\ combined\ with\ a\ grammar
    | temperature\ is\ .*,\ beam\ search\ takes
    | the\ model\ .*\ does\ not\ exist | lora_name\ .*(bytes|is\ empty|printed)
    | there\ is\ an\ adapter\ .*\ already | .*\ is\ the\ model's\ own\ name
    """,
    re.VERBOSE,
)

# What a 404 may say: every drawn path is one of ours.
NOT_THERE = re.compile(
    r"the model .*(does not exist|is not)|there is no (file|batch|page file|replica) "
    r"|the conversation .* has no stream that can be read"
    r"|response .* is not found|request .* is not in the log",
    re.S,
)


def judge_refusal(response: httpx.Response) -> None:
    """Fail where a body that fits the schema is refused for a reason that the schema could tell."""
    if response.status_code >= 400:
        message = message_of(response)
        known = NOT_THERE if response.status_code == 404 else BEYOND_THE_SCHEMA
        assert known.match(message), message


@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE], ids=["fits", "does_not_fit"])
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_any_body_is_answered_as_the_document_says(
    method: str, path: str, mode: GenerationMode
) -> None:
    """One app answers them all, so that what one leaves behind is there for the others."""
    num_seen = 0
    drawer = API.drawer(method, path)
    with OpenApp() as app:

        @num_cases(CASES_EACH)
        @given(st.integers(0, 2**60))
        def each(seed: int) -> None:
            nonlocal num_seen
            num_seen += 1
            body = drawer.fitting(seed) if mode is POSITIVE else drawer.breaking(seed)
            note(json.dumps(body))
            response = app.send(**json_request(method, path, body))
            API.judge_mode(method, path, mode, response)
            app.until_idle()
            if mode is POSITIVE:
                judge_refusal(response)

        each()
    assert num_seen >= CASES_EACH


def check_all(method: str, path: str, mode: GenerationMode, num: int) -> None:
    """Bodies and parameters of schemathesis; one app answers them all."""
    with OpenApp() as app:

        @num_cases(num)
        @given(API.operation(method, path).as_strategy(mode))
        def each(case: schemathesis.Case) -> None:
            case.query.pop("follow", None)  # endless: test_debug has it
            if mode is POSITIVE and case.operation.body:
                case.body = as_integers(case.body)
            response = app.send(**request_of(case))
            API.judge(case, response)
            app.until_idle()
            if mode is POSITIVE:
                judge_refusal(response)

        each()


@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE], ids=["fits", "does_not_fit"])
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_bodies_of_schemathesis_are_answered_as_the_document_says(
    method: str, path: str, mode: GenerationMode
) -> None:
    check_all(method, path, mode, SCHEMATHESIS_CASES_EACH)


def test_openais_endpoints_have_a_second_path() -> None:
    assert {path for _, path in SECOND_PATHS} == {
        "/chat/completions",
        "/classify",
        "/completions",
        "/embeddings",
        "/models",
        "/models/load",
        "/models/unload",
        "/rerank",
        "/responses",
        "/responses/{response_id}",
        "/responses/{response_id}/cancel",
        "/responses/{response_id}/input_items",
        "/score",
    }


@pytest.mark.parametrize(("method", "path"), SECOND_PATHS)
def test_a_second_path_is_the_same_endpoint_with_the_same_document(method: str, path: str) -> None:
    """So the cases of the first path, which have the same seed, are those of the second one."""
    routes = {
        route.path: route.endpoint
        for route in APP.routes
        if isinstance(route, Route) and method in (route.methods or ())
    }
    assert routes[path] == routes[f"/v1{path}"]
    second, first = (API.document["paths"][one][method.lower()] for one in (path, f"/v1{path}"))
    assert {**second, "operationId": ""} == {**first, "operationId": ""}


@pytest.mark.parametrize(("method", "path"), WITHOUT_BODY)
def test_a_route_without_a_body_answers_as_the_document_says(method: str, path: str) -> None:
    check_all(method, path, POSITIVE, WITHOUT_BODY_EACH)
