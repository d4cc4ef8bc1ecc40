"""The rows of Anthropic's `/v1/messages`; see `field_reference`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quickstep.server.anthropic import request_types as schemas
from quickstep.server.schema.field_classes import Effects, Note

__all__ = ["EFFECTS", "REFUSED_FORMS"]

_MARK = "Has the usage tell what was added to the cache; every prefix is cached without a mark."
_LIFETIME = Note("prefixes are cached for no fixed time")
_ONE_CALL = "True keeps the first call only."

EFFECTS: Mapping[type[msgspec.Struct], Effects] = {
    schemas.CountTokensRequest: {
        "model": "Which served name answers; 404 for an unknown one.",
        "messages": "The conversation, as the model's chat template writes it.",
        "system": "Instructions for the model.",
        "tools": "Tools that the model is shown and may call.",
        "tool_choice": "Whether calls are possible, forbidden, or enforced by a grammar.",
        "thinking": "Whether the model reasons, where its template can be told.",
        "output_config": "The form of the answer.",
        "cache_control": _MARK,
    },
    schemas.MessagesRequest: {
        "max_tokens": "Ends the message after this many tokens, with stop_reason max_tokens.",
        "stop_sequences": "Ends the message where one of these texts appears.",
        "stream": "Sends the message as server-sent events while it is generated.",
        "metadata": "Whom the work is accounted to.",
    },
    schemas.CacheControl: {"ttl": _LIFETIME},
    schemas.PlainBlock: {
        "text": "The text; blocks are joined by line ends.",
        "cache_control": _MARK,
    },
    schemas.ThinkingBlock: {
        "thinking": "Given to the chat template, which may leave it out.",
        "signature": Note("this server signs nothing"),
    },
    schemas.ToolUseBlock: {
        "id": "Given to the chat template.",
        "name": "Given to the chat template.",
        "input": "The arguments, given to the chat template.",
        "cache_control": _MARK,
    },
    schemas.ToolResultBlock: {
        "tool_use_id": "Given to the chat template.",
        "content": "What the tool gave back.",
        "is_error": "True puts `Error: ` before the result.",
        "cache_control": _MARK,
    },
    schemas.UserTurn: {"content": "What the user says, and the results of tools."},
    schemas.AssistantTurn: {
        "content": "What the model said and called; as the last turn, the "
        "beginning of the answer: a text."
    },
    schemas.SystemTurn: {"content": "Instructions inside the conversation."},
    schemas.CustomToolSpec: {
        "name": "The name in a call; each one once.",
        "input_schema": "The JSON schema of the arguments, shown to the model and enforced where a "
        "call is.",
        "description": "Included in the prompt.",
        "type": "May be left out.",
        "strict": "Whether arguments have to fit where the model may choose to call.",
        "cache_control": _MARK,
    },
    schemas.AutoChoice: {"disable_parallel_tool_use": _ONE_CALL},
    schemas.AnyChoice: {"disable_parallel_tool_use": _ONE_CALL},
    schemas.AnyTool: {
        "name": "The tool that has to be called.",
        "disable_parallel_tool_use": Note("one named tool is called once in any case"),
    },
    schemas.EnabledThinking: {
        "budget_tokens": "Tokens of reasoning after which its closing tag is written; from 1 to "
        "max_tokens - 1.",
    },
    schemas.JsonOutput: {"schema": "The JSON schema that the answer fits."},
    schemas.OutputConfig: {
        "effort": "Turns reasoning off (none), or sets the level where the chat template has one.",
        "format": "Enforces the form of the whole answer by a grammar.",
    },
    schemas.RequestMetadata: {
        "user_id": "To whom the work is accounted, below the name of the API key."
    },
}

REFUSED_FORMS: Mapping[type[msgspec.Struct], str] = {
    schemas.OpaqueBlock: "the model reads text only",
    schemas.DocumentBlock: "the model reads text only",
    schemas.SearchResultBlock: "the model reads text only",
    schemas.RedactedThinkingBlock: "only Anthropic can read it",
}
