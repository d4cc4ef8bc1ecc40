"""For every honoured field of the other surfaces (embeddings, tokens, batches, llama.cpp's
`/completion`) a value, and its visible effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
from field_effects import (
    ARRAY,
    LORA_CASE,
    Case,
    Cases,
    Seen,
    applies,
    cases,
    constrained,
    loaded_poet,
    read,
    sampled,
    shown,
    unknown_model,
)

from quickstep.sampling_params import RepetitionDetectionParams
from quickstep.server.batches.request_types import BatchRequest, ExpiresAfter
from quickstep.server.fields.shared_fields import LoRAScale
from quickstep.server.kept_streams.stream_routes import StreamLookup
from quickstep.server.llama_cpp.request_types import LlamaCompletionRequest, PromptObject
from quickstep.server.llama_cpp.slots import SlotFile
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.openai.tokenize import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quickstep.server.operate.lora_routes import LoadLoRAAdapter, UnloadLoRAAdapter
from quickstep.server.operate.models import ModelToChange
from quickstep.server.scores.request_types import (
    ClassifyRequest,
    RerankRequest,
    ScoreRequest,
    TextDocument,
)
from quickstep.types import Grammar, Pooling

BATCH_S = 10
POLL_S = 0.002  # in-memory requests give the batch no turn of their own
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "find_it"}}
YES_OR_NO = 'root ::= "yes" | "no"'
USER = [{"role": "user", "content": "yo"}]


def input_file(url: str, body: Mapping[str, Any]) -> Any:
    """Uploads a batch's only line."""

    async def upload(client: httpx.AsyncClient) -> Mapping[str, Any]:
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        sent = {"file": ("in.jsonl", json.dumps(line).encode())}
        answer = await client.post("/v1/files", data={"purpose": "batch"}, files=sent)
        return {"input_file_id": answer.json()["id"]}

    return upload


async def ended(client: httpx.AsyncClient, answer: Any) -> Any:
    """The batch once it is over, and its file of answers."""
    async with asyncio.timeout(BATCH_S):
        while answer["status"] not in ("completed", "failed"):
            await asyncio.sleep(POLL_S)
            answer = (await client.get(f"/v1/batches/{answer['id']}")).json()
    file_id = answer["output_file_id"]
    output = None if file_id is None else (await client.get(f"/v1/files/{file_id}")).json()
    return answer, output


COMPLETION_LINE = input_file(COMPLETIONS_URL, {"prompt": "a", "max_tokens": 2})
CHAT_LINE = input_file(CHAT_URL, {"messages": USER, "max_tokens": 2})


def completed(seen: Seen) -> bool:
    return bool(seen.later[0]["status"] == "completed")


def expires_after(seconds: int) -> Any:
    def holds(seen: Seen) -> bool:
        output = seen.later[1]
        return output["expires_at"] == output["created_at"] + seconds

    return holds


def started(value: Any, holds: Any) -> Case:
    """A field of a batch, whose line is answered."""
    return Case(value, holds, before=COMPLETION_LINE, after=ended)


def window(seen: Seen) -> bool:
    return bool(seen.answer["expires_at"] == seen.answer["created_at"] + 3600)


BATCHES: Cases = {
    "input_file_id": Case(
        None,
        lambda seen: completed(seen) and bytes(seen.submitted.prompt[1:]) == b"a",
        before=COMPLETION_LINE,
        after=ended,
    ),
    "endpoint": Case(CHAT_URL, completed, before=CHAT_LINE, after=ended),
    "completion_window": started("1h", window),
    "metadata": started({"a": "b"}, lambda seen: seen.answer["metadata"] == {"a": "b"}),
    "output_expires_after": started({"anchor": "created_at", "seconds": 7200}, expires_after(7200)),
}
EMBEDDINGS: Cases = cases(
    input=([7], lambda seen: seen.submitted.prompt == (7,)),
    model=("second", lambda seen: seen.answer["model"] == "second"),
    encoding_format=("base64", lambda seen: isinstance(seen.answer["data"][0]["embedding"], str)),
    dimensions=(1, lambda seen: len(seen.answer["data"][0]["embedding"]) == 1),
    user=("ann", lambda seen: seen.submitted.tenant == "ann"),
    pooling=("mean", lambda seen: seen.submitted.pooling is Pooling.MEAN),
    add_special_tokens=(False, lambda seen: seen.submitted.prompt == (97,)),
    priority=(-3, lambda seen: seen.submitted.priority == -3),
    cache_salt=("x", lambda seen: seen.submitted.cache_salt == "x"),
    timeout_s=(2.5, lambda seen: seen.submitted.deadline_s == 2.5),
    input_type=("query", lambda seen: bytes(seen.submitted.prompt[1:]) == b"Q: a"),
) | {
    "truncate_prompt_tokens": Case(
        2, lambda seen: seen.submitted.prompt == (1, 97), beside={"input": "abc"}
    )
}


def reads(text: bytes) -> Any:
    """The prompt of the pair has the text."""
    return lambda seen: text in bytes(seen.submitted.prompt)


PAIRS: dict[str, Any] = {
    "model": ("second", lambda seen: seen.answer["model"] == "second"),
    "instruction": ("find it", reads(b"<Instruct>: find it")),
    "max_tokens_per_doc": (1, reads(b"<Document>: l\n")),
    "truncate_prompt_tokens": (
        305,
        lambda seen: len(seen.submitted.prompt) == 305,
    ),
    "user": ("ann", lambda seen: seen.submitted.tenant == "ann"),
    "priority": (-3, lambda seen: seen.submitted.priority == -3),
    "cache_salt": ("x", lambda seen: seen.submitted.cache_salt == "x"),
    "timeout_s": (2.5, lambda seen: seen.submitted.deadline_s == 2.5),
}
CLASSIFIED = ("model", "user", "priority", "cache_salt", "timeout_s")


RERANK: Cases = cases(
    query=("which", reads(b"<Query>: which")),
    documents=(["this one"], reads(b"<Document>: this one")),
    top_n=(1, lambda seen: len(seen.answer["results"]) == 1),
    return_documents=(False, lambda seen: "document" not in seen.answer["results"][0]),
    **PAIRS,
)
SCORE: Cases = cases(
    text_1=("which", reads(b"<Query>: which")),
    text_2=(["this one"], reads(b"<Document>: this one")),
    **PAIRS,
)
TEMPLATE: Cases = {
    **cases(
        messages=(USER, shown("user: yo")),
        tools=([TOOL], shown('"name": "find_it"')),
        add_generation_prompt=(False, lambda seen: "assistant:" not in seen.prompt),
        chat_template_kwargs=({"k": "v"}, shown("k=v")),
    ),
    "model": unknown_model(),
}
TOKENIZE: Cases = {
    **TEMPLATE,
    **cases(
        prompt=("yo", lambda seen: seen.answer["tokens"] == [1, *b"yo"]),
        content=("yo", lambda seen: seen.answer["tokens"] == [*b"yo"]),
        add_special_tokens=(True, lambda seen: seen.answer["tokens"][0] == 1),
        return_token_strs=(True, lambda seen: bool(seen.answer.get("token_strs"))),
        add_special=(True, lambda seen: seen.answer["tokens"] == [1, 97]),
        with_pieces=(True, lambda seen: seen.answer["tokens"] == [{"id": 97, "piece": "a"}]),
    ),
    "continue_final_message": Case(
        True,
        lambda seen: bytes(seen.answer["tokens"]).endswith(b"assistant: So"),
        {"messages": [{"role": "assistant", "content": "So"}]},
    ),
}


def lora(number: int, scale: float) -> dict[str, Any]:
    return {"lora": [{"id": number, "scale": scale}]}


LLAMA: Cases = {
    **cases(
        prompt=([7, "b"], lambda seen: seen.submitted.prompt == (7, 98)),
        model=("second", lambda seen: seen.answer["model"] == "second"),
        n_predict=(2, lambda seen: seen.answer["tokens_predicted"] == 2),
        max_tokens=(2, lambda seen: seen.answer["tokens_predicted"] == 2),
        temperature=(0.5, sampled("temperature", 0.5)),
        top_k=(5, sampled("top_k", 5)),
        top_p=(0.5, sampled("top_p", 0.5)),
        min_p=(0.5, sampled("min_p", 0.5)),
        typical_p=(0.5, sampled("typical_p", 0.5)),
        repeat_penalty=(1.5, sampled("repetition_penalty", 1.5)),
        presence_penalty=(1.5, sampled("presence_penalty", 1.5)),
        frequency_penalty=(1.5, sampled("frequency_penalty", 1.5)),
        dry_multiplier=(0.8, sampled("dry_multiplier", 0.8)),
        dry_base=(2.0, sampled("dry_base", 2.0)),
        dry_allowed_length=(3, sampled("dry_allowed_length", 3)),
        dry_penalty_last_n=(64, sampled("dry_range", 64)),
        dry_sequence_breakers=(["x"], sampled("dry_sequence_breakers", ("x",))),
        xtc_probability=(0.5, sampled("xtc_probability", 0.5)),
        xtc_threshold=(0.2, sampled("xtc_threshold", 0.2)),
        repetition_detection=(
            {"max_pattern_size": 8, "min_count": 3},
            sampled("repetition_detection", RepetitionDetectionParams(8, 0, 3)),
        ),
        seed=(99, lambda seen: seen.answer["generation_settings"]["seed"] == 99),
        stop=(["x"], sampled("stop", ("x",))),
        ignore_eos=(True, sampled("ignore_eos", True)),
        logit_bias=([[5, 1.5]], sampled("logit_bias", {5: 1.5})),
        grammar=(YES_OR_NO, sampled("grammar", Grammar.of_gbnf(YES_OR_NO))),
        json_schema=(ARRAY, constrained(ARRAY)),
        n_probs=(2, sampled("logprobs", 2)),
        n_cmpl=(2, lambda seen: len(seen.answer) == 2),
        stream=(True, lambda seen: len(seen.chunks) > 2),
        id_slot=(0, lambda seen: seen.answer["id_slot"] == 0),
        cache_prompt=(False, lambda seen: len(seen.submitted.cache_salt) == 16),
        return_tokens=(True, lambda seen: seen.answer["tokens"][:2] == [0, 1]),
        response_fields=(["content"], lambda seen: list(seen.answer) == ["content"]),
    ),
    "repeat_last_n": Case(0, sampled("repetition_penalty", 1.0), {"repeat_penalty": 1.5}),
    "samplers": Case(["temperature"], sampled("top_k", 0), {"top_k": 5}),
    "return_progress": Case(
        True,
        lambda seen: any("prompt_progress" in chunk for chunk in seen.chunks),
        {"stream": True},
    ),
    "timings_per_token": Case(True, lambda seen: "timings" in seen.chunks[0], {"stream": True}),
    "lora": LORA_CASE,
}


async def conversation(client: httpx.AsyncClient) -> Mapping[str, Any]:
    """A conversation to find."""
    header = {"x-conversation-id": "c"}
    await client.post("/v1/completions", json={"prompt": "a"}, headers=header)
    return {}


OTHER_CASES: dict[type[msgspec.Struct], Cases] = {
    EmbeddingRequest: EMBEDDINGS,
    RerankRequest: RERANK,
    ScoreRequest: SCORE,
    ClassifyRequest: {
        **cases(
            input=("ab", lambda seen: seen.submitted.prompt == (1, 97, 98)),
            **{name: value for name, value in PAIRS.items() if name in CLASSIFIED},
        ),
        "truncate_prompt_tokens": Case(
            2,
            lambda seen: seen.submitted.prompt == (1, 97),
            beside={"input": "abc"},
        ),
    },
    TextDocument: {
        "text": Case(
            None,
            reads(b"<Document>: this one"),
            whole={"query": "q", "documents": [{"text": "this one"}]},
        )
    },
    BatchRequest: BATCHES,
    ExpiresAfter: {
        "seconds": Case(
            None,
            expires_after(7200),
            whole={"output_expires_after": {"anchor": "created_at", "seconds": 7200}},
            before=COMPLETION_LINE,
            after=ended,
        )
    },
    StreamLookup: {
        "conversation_ids": Case(["c"], lambda seen: bool(seen.answer), before=conversation)
    },
    TokenizeRequest: TOKENIZE,
    DetokenizeRequest: {
        "tokens": Case([121, 111], lambda seen: seen.answer["content"] == "yo"),
        "model": unknown_model(),
    },
    ApplyTemplateRequest: TEMPLATE,
    PromptObject: {"prompt_string": read()},
    ModelToChange: {"model": unknown_model()},
    SlotFile: {
        "filename": Case("b.bin", lambda seen: seen.answer["filename"] == "b.bin"),
        "model": unknown_model(),
    },
    LoadLoRAAdapter: {
        **cases(
            lora_name=("poet", lambda seen: list(seen.engine.adapters) == ["poet"]),
            lora_path=("poems", lambda seen: [*seen.engine.adapters.values()] == ["poems"]),
        ),
        "load_inplace": Case(
            True,
            lambda seen: [*seen.engine.adapters.values()] == ["new"],
            {"lora_name": "poet", "lora_path": "new"},
            before=loaded_poet,
        ),
    },
    UnloadLoRAAdapter: cases(
        lora_name=("poet", lambda seen: seen.engine.adapters == {"poet": "unloaded"})
    ),
    LlamaCompletionRequest: LLAMA,
    LoRAScale: {
        "id": Case(None, applies("poet"), whole=lora(0, 1.0), before=loaded_poet),
        "scale": Case(None, applies("poet*-2"), whole=lora(0, -2), before=loaded_poet),
    },
}
