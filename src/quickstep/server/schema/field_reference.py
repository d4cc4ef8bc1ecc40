"""What every field of every request does, in one line: its effect, or why it has none.

`openapi`, the page `/docs` and `docs/reference/api.md` print these rows; the tests demand a row
and a case for each field of each schema, so that a row is a claim which is tried. Here are the
effects; which fields are hints or refused is declared at the fields (`field_classes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from quickstep.sampling_params import sampling_fields
from quickstep.server.anthropic.request_types import MessagesRequest
from quickstep.server.llama_cpp.request_types import LlamaCompletionRequest
from quickstep.server.ollama import request_types as ollama_requests
from quickstep.server.openai import request_types as schemas
from quickstep.server.schema import field_reference_messages as messages
from quickstep.server.schema import field_reference_ollama as ollama
from quickstep.server.schema import field_reference_others as others
from quickstep.server.schema import field_reference_responses as responses
from quickstep.server.schema.field_classes import (
    Effects,
    FieldClass,
    Hint,
    Honoured,
    Note,
    Row,
    field_classes,
)

__all__ = ["REFUSED_FORMS", "reference_of"]

_SAMPLING: Effects = {
    "model": "Which served name answers; the first one if not given, 404 for an unknown one.",
    "preset": "Sets temperature and top_p for a kind of task; what the request says itself goes "
    "first.",
    "timeout_s": "Seconds after which what was generated is the answer, with finish_reason length.",
    "response_format": "Enforces the form of the whole output by a grammar.",
    "structured_outputs": "Enforces the form of the whole output by one of several grammars.",
    "stream": "Sends the answer as server-sent events while it is generated.",
    "stream_options": "What the stream tells beside the text; needs stream: true.",
    "user": "To whom the work is accounted, below the name of the API key.",
    "priority": "A lower number goes first, and may take the place of a running higher one; "
    "0 if not given.",
    "cache_salt": "Cached prefixes are shared only with requests of the same API key and salt.",
}
_COMPLETION: Effects = {
    "prompt": "What to continue: a text, token ids, or a list of either.",
    "add_special_tokens": "Whether the tokenizer adds its special tokens to the prompt; true if "
    "not given.",
    "best_of": "Draws this many and answers with the n of the highest mean logprob.",
    "echo": "The prompt stands before the text, with its logprobs if they are asked for.",
    "suffix": "The text between prompt and suffix is asked for; 400 if the model has no tokens "
    "for that.",
}
_CHAT: Effects = {
    "messages": "The conversation, as the model's chat template writes it.",
    "max_completion_tokens": "OpenAI's later name of max_tokens; both may stand if they agree.",
    "logprobs": "Gives the chosen tokens' logprobs, of the raw logits.",
    "top_logprobs": "Adds this many alternatives per token; needs logprobs: true.",
    "echo": "Puts the last message before the answer, if it is the assistant's.",
    "add_generation_prompt": "Whether the template opens an assistant message; true if not given.",
    "continue_final_message": "The answer continues from the last message's text, which is the "
    "assistant's; a grammar or a stop string is of what is new.",
    "chat_template_kwargs": "Further variables for the chat template.",
    "reasoning_effort": "Turns reasoning off (none), or sets the level where the chat template has "
    "one.",
    "verbosity": "Sets the answer's length where the chat template has such a level.",
    "metadata": "Stands in the answer as it was sent.",
    "safety_identifier": "OpenAI's later name of user.",
    "tools": "Functions that the model is shown and may call.",
    "tool_choice": "Whether calls are possible, forbidden, or enforced by a grammar.",
    "parallel_tool_calls": "False keeps the first call only.",
}
_CHOICES: Effects = {
    "return_tokens_as_token_ids": "Names the tokens of logprobs by their ids: token_id:7.",
    "truncate_prompt_tokens": "Reads only so many of the prompt's last tokens; -1 leaves room for "
    "the answer.",
    "return_token_ids": "Adds the token ids of prompt and output.",
    "use_beam_search": "Searches the n likeliest texts instead of drawing.",
    "length_penalty": "How much longer texts gain in a beam search; needs use_beam_search: true.",
    "early_stopping": "Ends a beam search with the first n texts; needs use_beam_search: true.",
}
_EFFECTS: Mapping[type[msgspec.Struct], Effects] = {
    schemas.SamplingFields: _SAMPLING,
    schemas.ChoiceFields: _CHOICES,
    schemas.CompletionRequest: _COMPLETION,
    schemas.ChatRequest: _CHAT,
    schemas.StreamOptions: {
        "include_usage": "The last chunk tells the usage and has no choices.",
        "continuous_usage_stats": "Every chunk tells the usage so far.",
    },
    schemas.JsonSchemaFormat: {"json_schema": "The schema, with a name."},
    schemas.JsonSchema: {
        "name": Note("for readers of the request"),
        "description": Note("for readers of the request"),
        "schema": "The JSON schema that the output fits; a keyword that cannot be enforced is 400.",
        "strict": Note("the schema is enforced whatever is said here"),
    },
    schemas.StructuredOutputs: {
        "json": "The output fits this JSON schema, given as an object or as its text.",
        "json_object": "The output is a JSON object.",
        "regex": "The whole output matches this regular expression (Rust's syntax).",
        "choice": "The output is one of these texts.",
        "grammar": "The output derives from this grammar, in llguidance's Lark or in GBNF.",
    },
    schemas.TextPart: {"text": "The text; a message's parts are joined by line ends."},
    schemas.RefusalPart: {"refusal": "Read by the template as text."},
    schemas.SystemMessage: {
        "content": "Instructions for the model.",
        "name": "Given to the chat template.",
    },
    schemas.DeveloperMessage: {
        "content": "Instructions; the template sees role system.",
        "name": "Given to the chat template.",
    },
    schemas.UserMessage: {
        "content": "What the user says.",
        "name": "Given to the chat template.",
    },
    schemas.AssistantMessage: {
        "content": "What the model said; null beside tool_calls only.",
        "name": "Given to the chat template.",
        "tool_calls": "The calls that the model made; 400 if the template cannot write them.",
        "reasoning_content": "Given to the chat template, which may leave it out.",
        "reasoning": "Another name of reasoning_content.",
    },
    schemas.ToolMessage: {
        "content": "What the tool gave back.",
        "tool_call_id": "Given to the chat template.",
        "name": "Given to the chat template.",
    },
    schemas.ToolCall: {
        "id": "Given to the chat template.",
        "function": "What was called.",
        "type": "Only function is known.",
        "index": Note("clients send back what a stream gave them"),
    },
    schemas.CalledFunction: {
        "name": "Given to the chat template.",
        "arguments": "Given to the chat template; mostly the JSON text of an object.",
    },
    schemas.FunctionTool: {"function": "The function that may be called."},
    schemas.FunctionSpec: {
        "name": "The name in a call; each one once.",
        "description": "Included in the prompt.",
        "parameters": "The JSON schema of the arguments, shown to the model and enforced where a "
        "call is.",
        "strict": "Whether arguments have to fit where the model may choose to call.",
    },
}
# Forms of a message, a part or a tool that are known so that they are refused in words.
REFUSED_FORMS: Mapping[type[msgspec.Struct], str] = MappingProxyType(
    {
        schemas.MediaPart: "the model reads text only",
        schemas.AudioPart: "the model reads text only",
        schemas.FilePart: "the model reads text only",
        schemas.FunctionMessage: "it is deprecated; send role tool",
        **responses.REFUSED_FORMS,
        **messages.REFUSED_FORMS,
    }
)

# Their fields with a name of `SamplingParams` have its description, where no table has another.
_SAMPLING_SCHEMAS = (
    schemas.SamplingFields,
    LlamaCompletionRequest,
    MessagesRequest,
    ollama_requests.OllamaOptions,
)
_TABLES = (_EFFECTS, responses.EFFECTS, messages.EFFECTS, others.EFFECTS, ollama.EFFECTS)


def reference_of(struct: type[msgspec.Struct]) -> dict[str, Row]:
    """The rows of a schema, inherited ones included; empty for what is no request."""
    told: dict[str, str | Note] = {}
    if issubclass(struct, _SAMPLING_SCHEMAS):
        known = sampling_fields()
        told |= {
            name: known[name].description for name in struct.__struct_fields__ if name in known
        }
    for parent in reversed(struct.__mro__):
        for table in _TABLES:
            told |= table.get(parent, {})
    classes = field_classes(struct)
    rows = {name: _row(effect, classes.get(name)) for name, effect in told.items()}
    return {**rows, **{name: known for name, known in classes.items() if name not in told}}


def _row(told: str | Note, declared: FieldClass | None) -> Row:
    if isinstance(told, Note):
        return told
    if declared is None:
        return Honoured(told)
    if isinstance(declared, Hint) and declared.conditional:
        return Honoured(told, declared)
    return declared  # a schema may refuse what it inherits
