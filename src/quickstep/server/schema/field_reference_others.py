"""The rows of embeddings, batches, tokens and llama.cpp's `/completion`; see `field_reference`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quickstep.server.batches import request_types as schemas_files
from quickstep.server.llama_cpp import request_types as schemas_llama_cpp
from quickstep.server.openai import tokenize as schemas_tokens
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.schema.field_classes import Effects, Note

__all__ = ["EFFECTS"]

_MODEL = "Which served name answers; the first one if not given, 404 for an unknown one."
_OPENS = "Whether the template opens an assistant message; true if not given."
_VARIABLES = "Further variables for the chat template."
_TOOLS = "Functions that the template shows."

EFFECTS: Mapping[type[msgspec.Struct], Effects] = {
    EmbeddingRequest: {
        "input": "What to embed: a text, token ids, or a list of either.",
        "model": _MODEL,
        "encoding_format": "Numbers, or the base64 of little-endian float32; float if not given.",
        "dimensions": "Keeps the first ones and scales them to length 1 again.",
        "user": "To whom the work is accounted, below the name of the API key.",
        "pooling": "How the hidden states become one vector; the model's card decides if not "
        "given, else the last token's state.",
        "add_special_tokens": "Whether the tokenizer adds its special tokens; true if not given.",
        "priority": "A lower number goes first, and may take the place of a running higher one; "
        "0 if not given.",
        "timeout_s": "After this many seconds the answer is the error 408.",
        "cache_salt": "Cached prefixes are shared only with requests of the same API key and salt.",
    },
    schemas_files.BatchRequest: {
        "input_file_id": "The file of requests; 400 or 404 if this key has no such file.",
        "endpoint": "The route that answers every line.",
        "completion_window": "After this time what is not answered is cancelled.",
        "metadata": "Stands in the batch as it was sent.",
        "output_expires_after": "How long the files of answers are kept.",
    },
    schemas_files.ExpiresAfter: {
        "anchor": "Only created_at is known.",
        "seconds": "The file is forgotten this long after it was made.",
    },
    schemas_tokens.TokenizeRequest: {
        "model": _MODEL,
        "prompt": "The text (vLLM's name).",
        "messages": "A conversation, as the chat template writes it.",
        "content": "The text (llama.cpp's name); the answer has llama.cpp's form.",
        "add_special_tokens": "Whether the tokenizer adds its special tokens.",
        "return_token_strs": "Adds each token's text.",
        "add_generation_prompt": _OPENS,
        "continue_final_message": "Whether the prompt ends with the last message's text.",
        "chat_template_kwargs": _VARIABLES,
        "tools": _TOOLS,
        "add_special": "llama.cpp's name of add_special_tokens; false if not given.",
        "with_pieces": "Adds each token's text, as llama.cpp does.",
    },
    schemas_tokens.DetokenizeRequest: {
        "tokens": "The token ids.",
        "model": _MODEL,
    },
    schemas_tokens.ApplyTemplateRequest: {
        "messages": "The conversation.",
        "model": _MODEL,
        "tools": _TOOLS,
        "add_generation_prompt": _OPENS,
        "chat_template_kwargs": _VARIABLES,
    },
    schemas_llama_cpp.PromptObject: {
        "prompt_string": "The text.",
    },
    schemas_llama_cpp.LlamaCompletionRequest: {
        "prompt": "What to continue: a text, token ids, both in one list, or several prompts.",
        "model": _MODEL,
        "n_predict": "Ends each choice after this many tokens; -1 or not given is the context.",
        "max_tokens": "Another name of n_predict; both may stand if they agree.",
        "repeat_penalty": "Divides positive and multiplies negative logits of tokens seen before.",
        "repeat_last_n": "-1 for the whole context, 0 to switch penalties off; others are 400.",
        "dry_penalty_last_n": "How far DRY looks back: -1 for the whole context, 0 for off.",
        "samplers": "Which samplers run; the order is fixed, another one is 400.",
        "seed": "Determines the draw; -1 draws one.",
        "stop": "Ends the choice where one of these texts appears.",
        "logit_bias": "Added to the logits of these token ids or texts; false bans.",
        "grammar": "The output follows this grammar (GBNF).",
        "json_schema": "The output fits this JSON schema.",
        "n_probs": "Gives this many alternatives per token.",
        "n_cmpl": "How many choices each prompt gets.",
        "stream": "Sends the answer as server-sent events while it is generated.",
        "cache_prompt": "False computes the whole prompt anew.",
        "return_tokens": "Adds the token ids.",
        "timings_per_token": "Every event tells the timings so far.",
        "response_fields": "Keeps these fields of the answer.",
        "n_keep": Note("the context does not shift, so all is kept"),
        "mirostat_tau": Note("it acts with mirostat only, which is refused"),
        "mirostat_eta": Note("it acts with mirostat only, which is refused"),
        "dynatemp_exponent": Note("it acts with dynatemp_range only, which is refused"),
    },
}
