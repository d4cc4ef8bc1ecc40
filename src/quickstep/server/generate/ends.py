"""Ends of sequences that are no answer, and whose fault they are.

A grammar that breaks a limit late in its output, or fields that forbid every token together, are
the client's: 400 with the field's name, in a stream as its error event.
"""

from __future__ import annotations

from quickstep.engine.stream import Delta
from quickstep.errors import EngineError, RequestError
from quickstep.server.http.errors import GenerationFailed
from quickstep.types import FinishReason, SamplingParams

__all__ = ["check_end", "in_clients_words"]

_NAMES_OF_PROMPTS = ("prompt", "messages")  # the engine's and the chat template's
_MAY_FORBID_ALL = ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens", "grammar")


def check_end(delta: Delta, sampling: SamplingParams, grammar_field: str) -> None:
    """Return unless the delta says that its sequence could not continue.

    Raises:
        EngineError: It is our fault.
        RequestError: It is the request's, whose grammar came in `grammar_field`.
    """
    match delta.finish_reason:
        case FinishReason.ERROR:
            raise GenerationFailed(delta.error or "the model failed on this request")
        case FinishReason.SHUTDOWN:
            raise EngineError("the server is shutting down; send the request again")
        case FinishReason.REFUSED:
            error = RequestError(delta.error, param=_blamed(delta.error, sampling))
            raise in_clients_words(error, grammar_field)


def in_clients_words(
    error: BaseException, grammar_field: str, prompt_field: str = "prompt"
) -> BaseException:
    """A refused grammar or prompt under the name of the client's field; any other error as it
    is.
    """
    if not isinstance(error, RequestError):
        return error
    if error.param in _NAMES_OF_PROMPTS:
        error.param = prompt_field
    elif error.param == "grammar":
        message = str(error).removeprefix("the ").replace("grammar", grammar_field, 1)
        return RequestError(message, param=grammar_field, status=error.status, code=error.code)
    return error


def _blamed(why: str, sampling: SamplingParams) -> str | None:
    """The field to name: the grammar if it is said, else the first that forbids tokens."""
    if why.startswith("the grammar"):
        return "grammar"
    return next((name for name in _MAY_FORBID_ALL if getattr(sampling, name)), None)
