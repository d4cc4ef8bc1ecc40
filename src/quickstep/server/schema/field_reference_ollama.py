"""The rows of Ollama's requests in the reference; see `field_reference`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quickstep.server.ollama import request_types
from quickstep.server.schema.field_classes import Effects, Note

__all__ = ["EFFECTS"]

_TEMPLATE = "Given to the chat template."
_MODEL = "Which served name answers, with or without :latest; 404 for an unknown one."

EFFECTS: Mapping[type[msgspec.Struct], Effects] = {
    request_types.OllamaOptions: {
        "num_predict": "Ends the answer after this many tokens; 0, -1 or -2 is the context's end.",
        "seed": "Determines the sampled tokens; -1 chooses a seed.",
        "stop": "Ends the answer where one of these texts appears; the text itself is cut off.",
        "repeat_penalty": "Divides positive and multiplies negative logits of tokens seen before.",
        "repeat_last_n": "-1 for the whole context, 0 to switch penalties off; others are 400 with "
        "a penalty.",
        "num_keep": Note("the context does not shift, so all is kept"),
        "mirostat_tau": Note("it acts with mirostat only, which is refused"),
        "mirostat_eta": Note("it acts with mirostat only, which is refused"),
    },
    request_types.OllamaModelFields: {"model": _MODEL},
    request_types.OllamaGenerateFields: {
        "options": "How tokens are sampled; what is not given comes from the checkpoint.",
        "stream": "False answers with one object; lines of JSON (NDJSON) if not given.",
        "format": "The answer is a JSON object (json), or fits this JSON schema.",
        "think": "Turns the model's reasoning on or off, or sets its level where the chat template "
        "has one.",
        "logprobs": "Gives the chosen tokens' logprobs, of the raw logits.",
        "top_logprobs": "Adds this many alternatives per token; needs logprobs: true.",
    },
    request_types.OllamaChatRequest: {
        "messages": "The conversation, as the model's chat template writes it; without one the "
        "answer says that the model is loaded. An assistant's text at the end is continued.",
        "tools": "Functions that the model is shown and may call.",
    },
    request_types.OllamaGenerateRequest: {
        "prompt": "What to answer; without one the answer says that the model is loaded.",
        "suffix": "The text between prompt and suffix is asked for; 400 if the model has no tokens "
        "for that.",
        "system": "Instructions for the model.",
        "raw": "True continues the prompt as it is, without the chat template.",
    },
    request_types.OllamaMessage: {
        "role": "Whose message it is.",
        "content": "What it says.",
        "thinking": "Given to the chat template, which may leave it out.",
        "tool_calls": "The calls that the model made; 400 if the template cannot write them.",
        "tool_name": _TEMPLATE,
        "tool_call_id": _TEMPLATE,
    },
    request_types.OllamaCall: {
        "id": _TEMPLATE,
        "function": "What was called.",
        "type": "Only function is known.",
    },
    request_types.OllamaCalledFunction: {
        "name": _TEMPLATE,
        "arguments": _TEMPLATE,
        "index": Note("clients send back what a stream gave them"),
    },
    request_types.OllamaEmbedRequest: {
        "input": "What to embed: a text or a list of them.",
        "truncate": "False refuses what is too long; its beginning is embedded if not given.",
        "dimensions": "Keeps the first ones and scales them to length 1 again.",
    },
    request_types.OllamaEmbeddingsRequest: {"prompt": "What to embed."},
    request_types.OllamaShowRequest: {
        "model": _MODEL,
        "name": "The older name of model.",
    },
}
