"""The JSON bodies of Ollama's API, as msgspec types: all fields, with their classes.

`request` and `endpoint` read them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quickstep.server.schema.field_classes import hint, refused

__all__ = [
    "OllamaCall",
    "OllamaCalledFunction",
    "OllamaChatRequest",
    "OllamaEmbedRequest",
    "OllamaEmbeddingsRequest",
    "OllamaGenerateFields",
    "OllamaGenerateRequest",
    "OllamaMessage",
    "OllamaModelFields",
    "OllamaOptions",
    "OllamaShowRequest",
]

_OPERATOR = "the operator sets it when the server starts"
_NO_IMAGES = "the model reads text only"
_TEXT_ONLY = "the model gives text only"


class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`options`: how tokens are sampled, and how Ollama would load a model."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_keep: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    mirostat: Annotated[int | None, refused("there is no Mirostat sampler", passes=(0,))] = None
    tfs_z: Annotated[float | None, refused("there is no tail-free sampler", passes=(1.0,))] = None
    penalize_newline: Annotated[
        bool | None, hint("line ends are penalized like other tokens", passes=(True,))
    ] = None
    num_ctx: Annotated[int | None, hint("the context is the server's --max-model-len")] = None
    num_batch: Annotated[int | None, hint(_OPERATOR)] = None
    num_gpu: Annotated[int | None, hint(_OPERATOR)] = None
    main_gpu: Annotated[int | None, hint(_OPERATOR)] = None
    num_thread: Annotated[int | None, hint(_OPERATOR)] = None
    numa: Annotated[bool | None, hint(_OPERATOR)] = None
    low_vram: Annotated[bool | None, hint(_OPERATOR)] = None
    f16_kv: Annotated[bool | None, hint(_OPERATOR)] = None
    logits_all: Annotated[bool | None, hint(_OPERATOR)] = None
    vocab_only: Annotated[bool | None, hint(_OPERATOR)] = None
    use_mmap: Annotated[bool | None, hint(_OPERATOR)] = None
    use_mlock: Annotated[bool | None, hint(_OPERATOR)] = None
    embedding_only: Annotated[bool | None, hint(_OPERATOR)] = None


class OllamaModelFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The fields that generating and embedding share."""

    model: str
    keep_alive: Annotated[
        str | float | None, hint("the model stays loaded", passes=(-1, -1.0, "-1"))
    ] = None


class OllamaGenerateFields(
    OllamaModelFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The fields that `/api/chat` and `/api/generate` share. Streaming is the default."""

    options: OllamaOptions | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: Annotated[
        bool | str | None,
        hint("the model does not reason, or has no such level", conditional=True),
    ] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: Annotated[
        bool | None, hint("a conversation that is too long is refused", passes=(False,))
    ] = None
    shift: Annotated[
        bool | None, hint("the context does not shift; generation ends there", passes=(False,))
    ] = None


class OllamaCalledFunction(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Name and arguments of an earlier call; `index` is set when a client sends a response back."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An earlier call."""

    function: OllamaCalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A message. A tool's result belongs to the call of its id, else to the next of its name."""

    role: Literal["user", "system", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[Any] | None, refused(_NO_IMAGES, passes=([],))] = None


class OllamaChatRequest(
    OllamaGenerateFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The body of `/api/chat`. A request without messages only loads the model."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(
    OllamaGenerateFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The body of `/api/generate`. A request without a prompt only loads the model."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Annotated[
        str | None,
        refused("the model's own chat template is used; send raw: true", passes=("",)),
    ] = None
    context: Annotated[
        list[int] | None,
        refused("send the conversation to /api/chat as messages", passes=([],)),
    ] = None
    images: Annotated[list[Any] | None, refused(_NO_IMAGES, passes=([],))] = None
    width: Annotated[int | None, refused(_TEXT_ONLY, passes=(0,))] = None
    height: Annotated[int | None, refused(_TEXT_ONLY, passes=(0,))] = None
    steps: Annotated[int | None, refused(_TEXT_ONLY, passes=(0,))] = None


class OllamaEmbedRequest(OllamaModelFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/api/embed`. `options` are about sampling and have no effect."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Annotated[dict[str, Any] | None, hint("nothing is sampled", passes=({},))] = None


class OllamaEmbeddingsRequest(
    OllamaModelFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The body of the older `/api/embeddings`."""

    prompt: str
    options: Annotated[dict[str, Any] | None, hint("nothing is sampled", passes=({},))] = None


class OllamaShowRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/api/show`; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[bool | None, hint("the response is always complete", passes=(False,))] = None
    system: Annotated[str | None, hint("the model has its own", passes=("",))] = None
    template: Annotated[str | None, hint("the model has its own", passes=("",))] = None
    options: Annotated[dict[str, Any] | None, hint("nothing is loaded", passes=({},))] = None
