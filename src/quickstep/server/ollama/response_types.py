"""The JSON answers of Ollama's API, as types. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.openai.response_types import TopLogprob

__all__ = [
    "OllamaChatAnswer",
    "OllamaDetails",
    "OllamaEmbedAnswer",
    "OllamaEmbeddingsAnswer",
    "OllamaFunction",
    "OllamaGenerateAnswer",
    "OllamaLogprob",
    "OllamaMadeCall",
    "OllamaModel",
    "OllamaModels",
    "OllamaRunningModel",
    "OllamaRunningModels",
    "OllamaShowAnswer",
    "OllamaSpokenMessage",
    "OllamaStatus",
    "OllamaVersion",
]


class OllamaFunction(msgspec.Struct, frozen=True):
    """A call's function; the arguments are an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaMadeCall(msgspec.Struct, frozen=True):
    """A call, complete with its arguments."""

    id: str
    function: OllamaFunction


class OllamaSpokenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message; in a stream what is new of it."""

    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaMadeCall] | UnsetType = UNSET


class OllamaLogprob(msgspec.Struct, frozen=True):
    """A generated token, and the most likely ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] | UnsetType = UNSET


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What both answers share. The figures come with the end only."""

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


class OllamaChatAnswer(_Progress, frozen=True, kw_only=True):
    """The answer of `/api/chat`, or a line of its stream, whose last one is `done`."""

    message: OllamaSpokenMessage


class OllamaGenerateAnswer(_Progress, frozen=True, kw_only=True):
    """The answer of `/api/generate`, or a line of its stream, whose last one is `done`."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/api/embed`, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct, frozen=True):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is made of; empty where the server does not know."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name that is served. `digest` is of the weights, the dtype and the kernel set."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct, frozen=True):
    """The answer of `/api/tags`."""

    models: list[OllamaModel]


class OllamaRunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in memory: each name that is served, for as long as the server runs."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct, frozen=True):
    """The answer of `/api/ps`."""

    models: list[OllamaRunningModel]


class OllamaShowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/api/show`. `model_info` has the length of the context."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "insert", "embedding"]]
    modified_at: str
    license: str = ""


class OllamaVersion(msgspec.Struct, frozen=True):
    """The answer of `/api/version`: the version of Ollama whose API this is."""

    version: str


class OllamaStatus(msgspec.Struct, frozen=True):
    """How the management of models would be answered; here it is always refused."""

    status: str
