"""The rows of `/v1/responses`; see `field_reference`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quickstep.server.responses import request_types as schemas
from quickstep.server.schema.field_classes import Effects, Note

__all__ = ["EFFECTS", "REFUSED_FORMS"]

_ID = "Stands in the listing of the input; one is made if not given."
_STATUS = "Stands in the listing of the input."

EFFECTS: Mapping[type[msgspec.Struct], Effects] = {
    schemas.ResponsesRequest: {
        "input": "What to answer: a text, or items of a conversation.",
        "instructions": "A system message before the conversation; the next response forgets it.",
        "max_output_tokens": "Ends the response after this many tokens, with status incomplete.",
        "max_tool_calls": "Stands in the answer; it bounds tools that run inside the server, of "
        "which there are none.",
        "metadata": "Stands in the answer as it was sent.",
        "parallel_tool_calls": "False keeps the first call only.",
        "previous_response_id": "Continues a stored response; 400 for one that is not stored.",
        "safety_identifier": "OpenAI's later name of user.",
        "store": "Whether the response can be fetched and continued; true if not given.",
        "text": "The form of the answer.",
        "reasoning": "How much the model reasons, where its template can be told.",
        "include": "message.output_text.logprobs adds logprobs, reasoning.encrypted_content the "
        "reasoning in a form to hand back.",
        "tools": "Functions that the model is shown and may call.",
        "tool_choice": "Whether calls are possible, forbidden, or enforced by a grammar.",
        "top_logprobs": "Alternatives per token; needs message.output_text.logprobs in include.",
        "chat_template_kwargs": "Further variables for the chat template.",
        "stream_options": Note("it may only ask for nothing; needs stream: true"),
    },
    schemas.InputTextPart: {"text": "The text; parts are joined by line ends."},
    schemas.OutputTextPart: {
        "text": "The text, as the model wrote it.",
        "annotations": "Notes about the text; they come back in the listing of the input.",
        "logprobs": "Notes about the text; they come back in the listing of the input.",
    },
    schemas.OutputRefusalPart: {"refusal": "Read by the template as text."},
    schemas.MessageItem: {
        "role": "Who says it; developer is read as system.",
        "content": "What is said.",
        "type": "May be left out.",
        "id": _ID,
        "status": _STATUS,
    },
    schemas.FunctionCallItem: {
        "type": "Says that this is an earlier call.",
        "call_id": "Given to the chat template.",
        "name": "Given to the chat template.",
        "arguments": "Given to the chat template; mostly the JSON text of an object.",
        "id": _ID,
        "status": _STATUS,
    },
    schemas.FunctionCallOutputItem: {
        "type": "Says that this is a call's result.",
        "call_id": "Given to the chat template.",
        "output": "What the function gave back.",
        "id": _ID,
        "status": _STATUS,
        "name": Note("the call has the name already"),
    },
    schemas.ReasoningItem: {
        "type": "Says that this is earlier reasoning.",
        "id": _ID,
        "summary": "Read where there is no content.",
        "content": "Given to the chat template, which may leave it out.",
        "encrypted_content": "Reasoning that this server handed out; read where there is no "
        "content.",
        "status": _STATUS,
    },
    schemas.SummaryPart: {"text": "The text."},
    schemas.ReasoningPart: {"text": "The text."},
    schemas.FunctionToolSpec: {
        "type": "Only function is known.",
        "name": "The name in a call; each one once.",
        "description": "Included in the prompt.",
        "parameters": "The JSON schema of the arguments, shown to the model and enforced where a "
        "call is.",
        "strict": "Whether arguments have to fit where the model may choose to call.",
    },
    schemas.SchemaFormat: {
        "name": "Stands in the answer, and changes nothing else.",
        "schema": "The JSON schema that the output fits; a keyword that cannot be enforced is 400.",
        "description": "Stands in the answer, and changes nothing else.",
        "strict": "Stands in the answer; the schema is enforced whatever is said here.",
    },
    schemas.TextConfig: {
        "format": "Enforces the form of the whole output by a grammar.",
        "verbosity": "Sets the answer's length where the chat template has such a level.",
    },
    schemas.ReasoningConfig: {
        "effort": "Turns reasoning off (none), or sets the level where the chat template has one.",
    },
}

REFUSED_FORMS: Mapping[type[msgspec.Struct], str] = {
    schemas.InputImagePart: "the model reads text only",
    schemas.InputFilePart: "the model reads text only",
    schemas.InputAudioPart: "the model reads text only",
}
