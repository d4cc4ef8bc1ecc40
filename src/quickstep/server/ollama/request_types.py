"""The JSON bodies of Ollama's API, as msgspec types: all fields, with their classes.

`request` and `endpoint` read them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quickstep.server.fields.field_classes import effect, hint, note, refused
from quickstep.server.fields.shared_fields import (
    Dimensions,
    Mirostat,
    MirostatSetting,
    NumKeep,
    RepeatPenalty,
    Tools,
    TopLogprobs,
    WithLogprobs,
)

_MODEL = effect("Which served name answers, with or without :latest; 404 for an unknown one.")
_TEMPLATE = effect("Given to the chat template.")


_OPERATOR = "the operator sets it when the server starts"
_NO_IMAGES = "the model reads text only"
_TEXT_ONLY = "the model gives text only"


class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`options`: how tokens are sampled, and how Ollama would load a model."""

    num_predict: Annotated[
        int | None,
        effect("Ends the answer after this many tokens; 0, -1 or -2 is the context's end."),
    ] = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: Annotated[int | None, effect("Determines the sampled tokens; -1 chooses a seed.")] = None
    stop: Annotated[
        str | list[str] | None,
        effect("Ends the answer where one of these texts appears; the text itself is cut off."),
    ] = None
    repeat_penalty: RepeatPenalty = None
    repeat_last_n: Annotated[
        int | None,
        effect(
            "-1 for the whole context, 0 to switch penalties off; others are 400 with a penalty."
        ),
    ] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_keep: NumKeep = None
    mirostat_tau: MirostatSetting = None
    mirostat_eta: MirostatSetting = None
    mirostat: Mirostat = None
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


# Seconds, or a duration of Go's time.ParseDuration.
_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
_DURATION = rf"^[-+]?({_NUMBER}|({_NUMBER}(ns|us|\u00b5s|ms|s|m|h))+)$"


class OllamaModelFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The fields that generating and embedding share."""

    model: Annotated[str, _MODEL]
    keep_alive: Annotated[
        Annotated[str, msgspec.Meta(pattern=_DURATION, max_length=64)] | float | None,
        effect(
            "Of several models: how long this one stays in memory after its last request, in "
            "seconds or as `5m`; 0 unloads it after this one, a negative number keeps it. On a "
            "server with API keys, of admin keys only."
        ),
    ] = None


class OllamaGenerateFields(
    OllamaModelFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The fields that `/api/chat` and `/api/generate` share. Streaming is the default."""

    options: Annotated[
        OllamaOptions | None,
        effect("How tokens are sampled; what is not given comes from the checkpoint."),
    ] = None
    stream: Annotated[
        bool | None, effect("False answers with one object; lines of JSON (NDJSON) if not given.")
    ] = None
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None,
        effect("The answer is a JSON object (json), or fits this JSON schema."),
    ] = None
    think: Annotated[
        bool | str | None,
        effect(
            "Turns the model's reasoning on or off, or sets its level where the chat template has "
            "one."
        ),
        hint("the model does not reason, or has no such level", conditional=True),
    ] = None
    logprobs: WithLogprobs = None
    top_logprobs: TopLogprobs = None
    truncate: Annotated[
        bool | None, hint("a conversation that is too long is refused", passes=(False,))
    ] = None
    shift: Annotated[
        bool | None, hint("the context does not shift; generation ends there", passes=(False,))
    ] = None


class OllamaCalledFunction(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Name and arguments of an earlier call; `index` is set when a client sends a response back."""

    name: Annotated[str, _TEMPLATE]
    arguments: Annotated[dict[str, Any], _TEMPLATE]
    index: Annotated[int | None, note("clients send back what a stream gave them")] = None


class OllamaCall(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An earlier call."""

    function: Annotated[OllamaCalledFunction, effect("What was called.")]
    id: Annotated[str | None, _TEMPLATE] = None
    type: Annotated[Literal["function"] | None, effect("Only function is known.")] = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A message. A tool's result belongs to the call of its id, else to the next of its name."""

    role: Annotated[Literal["user", "system", "assistant", "tool"], effect("Whose message it is.")]
    content: Annotated[str | None, effect("The text of the message.")] = None
    thinking: Annotated[
        str | None, effect("Given to the chat template, which may leave it out.")
    ] = None
    tool_calls: Annotated[
        list[OllamaCall] | None,
        effect("The calls that the model made; 400 if the template cannot write them."),
    ] = None
    tool_name: Annotated[str | None, _TEMPLATE] = None
    tool_call_id: Annotated[str | None, _TEMPLATE] = None
    images: Annotated[list[Any] | None, refused(_NO_IMAGES, passes=([],))] = None


class OllamaChatRequest(
    OllamaGenerateFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The body of `/api/chat`. A request without messages only loads the model."""

    messages: Annotated[
        list[OllamaMessage] | None,
        effect(
            "The conversation, as the model's chat template writes it; without one the answer"
            " reports that the model is loaded. An assistant's text at the end is continued."
        ),
    ] = None
    tools: Tools = None


class OllamaGenerateRequest(
    OllamaGenerateFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The body of `/api/generate`. A request without a prompt only loads the model."""

    prompt: Annotated[
        str | None, effect("What to answer; without one the answer says that the model is loaded.")
    ] = None
    suffix: Annotated[
        str | None,
        effect(
            "The model writes the text between prompt and suffix; 400 if it has no tokens for that."
        ),
    ] = None
    system: Annotated[str | None, effect("Instructions for the model.")] = None
    raw: Annotated[
        bool | None, effect("True continues the prompt as it is, without the chat template.")
    ] = None
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

    input: Annotated[str | list[str], effect("What to embed: a text or a list of them.")]
    truncate: Annotated[
        bool | None,
        effect("False refuses what is too long; its beginning is embedded if not given."),
    ] = None
    dimensions: Dimensions = None
    options: Annotated[dict[str, Any] | None, hint("nothing is sampled", passes=({},))] = None


class OllamaEmbeddingsRequest(
    OllamaModelFields, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """The body of the older `/api/embeddings`."""

    prompt: Annotated[str, effect("What to embed.")]
    options: Annotated[dict[str, Any] | None, hint("nothing is sampled", passes=({},))] = None


class OllamaShowRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/api/show`; `name` is the older name of `model`."""

    model: Annotated[str | None, _MODEL] = None
    name: Annotated[str | None, effect("The older name of model.")] = None
    verbose: Annotated[bool | None, hint("the response is always complete", passes=(False,))] = None
    system: Annotated[str | None, hint("the model has its own", passes=("",))] = None
    template: Annotated[str | None, hint("the model has its own", passes=("",))] = None
    options: Annotated[dict[str, Any] | None, hint("nothing is loaded", passes=({},))] = None
