"""The JSON responses of Ollama's API, as types. Durations are in nanoseconds.

`endpoint` and `routes` encode them as they are; `/openapi.json` is generated from them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.generate.timings import RequestTimings
from quickstep.server.openai.response_types import TopLogprob


class OllamaFunction(msgspec.Struct, frozen=True):
    """The function of a call; the arguments are an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, frozen=True):
    """A call with all of its arguments."""

    id: str
    function: OllamaFunction


class OllamaResponseMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message; in a stream, its new text and calls."""

    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaLogprob(msgspec.Struct, frozen=True):
    """A generated token, and the most likely ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] | UnsetType = UNSET


class OllamaProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What both responses have. Durations and token counts come with `done: true` only."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    quickstep: RequestTimings | UnsetType = UNSET


class OllamaChatResponse(OllamaProgress, frozen=True, kw_only=True):
    """The response of `/api/chat`, or a line of its stream, of which the last has `done: true`."""

    message: OllamaResponseMessage


class OllamaGenerateResponse(OllamaProgress, frozen=True, kw_only=True):
    """The response of `/api/generate`, or a line of its stream; the last has `done: true`."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/api/embed`, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(msgspec.Struct, frozen=True):
    """The response of `/api/embeddings`."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model; empty if the server does not know them."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A served name. `digest` is of the weights, the dtype and the kernel set."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct, frozen=True):
    """The response of `/api/tags`."""

    models: list[OllamaModel]


class OllamaRunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in memory: each served name, as long as the server runs."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct, frozen=True):
    """The response of `/api/ps`."""

    models: list[OllamaRunningModel]


class OllamaShowResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/api/show`. `model_info` has the context length."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "insert", "embedding"]]
    modified_at: str
    license: str = ""


class OllamaVersion(msgspec.Struct, frozen=True):
    """The response of `/api/version`: the version of Ollama whose API this is."""

    version: str


class OllamaStatus(msgspec.Struct, frozen=True):
    """The response of the routes that manage models; this server always refuses them."""

    status: str
