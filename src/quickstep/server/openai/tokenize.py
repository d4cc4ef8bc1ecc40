"""`/tokenize`, `/detokenize`, `/apply-template`: text to token ids and back, in the forms of vLLM
and of llama.cpp.

The fields decide the form: `prompt` or `messages` are vLLM's, `content` is llama.cpp's; a field of
one form together with the other's is refused. The response has the fields of both. Long inputs are
processed in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.fields.field_classes import effect, refused
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.shared_fields import (
    AddGenerationPrompt,
    ChatTemplateKwargs,
    ModelName,
    TemplateTools,
)
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.generate.prompts import ChatPrompt, rendered
from quickstep.server.generate.sampling import check_token_ids
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.chat import Chat
from quickstep.server.openai.request_types import ChatRequest, Message
from quickstep.server.options import bounded

# Shorter bodies are worked on in the event loop: a thread hop costs more.


_INLINE_BYTES = 2048
_SLICE_ENTRIES = 4096
_ENCODE = msgspec.json.Encoder().encode
_Schema = TypeVar("_Schema", bound=msgspec.Struct)

_SOURCES = ("prompt", "messages", "content")
# which fields go with which source; `model` goes with all
_FIELDS = {
    "prompt": {"add_special_tokens", "return_token_strs", "mm_processor_kwargs"},
    "messages": {
        "add_special_tokens",
        "return_token_strs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "tools",
    },
    "content": {"add_special", "parse_special", "with_pieces"},
}


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/tokenize`: `prompt` or `messages` (vLLM), or `content` (llama.cpp)."""

    model: ModelName = None
    prompt: Annotated[str | None, effect("The text (vLLM's name).")] = None
    messages: Annotated[
        list[Message] | None, effect("A conversation, as the chat template writes it.")
    ] = None
    content: Annotated[
        str | None, effect("The text (llama.cpp's name); the answer has llama.cpp's form.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, effect("Whether the tokenizer adds its special tokens.")
    ] = None
    return_token_strs: Annotated[bool | None, effect("Adds each token's text.")] = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: Annotated[
        bool | None, effect("Whether the prompt ends with the last message's text.")
    ] = None
    chat_template: Annotated[str | None, refused("start the server with --chat-template")] = None
    chat_template_kwargs: ChatTemplateKwargs = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, refused("the model reads text only")] = (
        None
    )
    tools: TemplateTools = None
    add_special: Annotated[
        bool | None, effect("llama.cpp's name of add_special_tokens; false if not given.")
    ] = None
    parse_special: Annotated[
        bool | None, refused("special tokens are recognised in every text", passes=(True,))
    ] = None
    with_pieces: Annotated[bool | None, effect("Adds each token's text, as llama.cpp does.")] = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/detokenize`, the same for vLLM and llama.cpp."""

    tokens: Annotated[list[int], effect("The token ids.")]
    model: ModelName = None


class ApplyTemplateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of llama.cpp's `/apply-template`."""

    messages: Annotated[list[Message], effect("The conversation.")]
    model: ModelName = None
    tools: TemplateTools = None
    add_generation_prompt: AddGenerationPrompt = None
    chat_template_kwargs: ChatTemplateKwargs = None


class TokenPiece(msgspec.Struct, frozen=True, gc=False):
    """A token (llama.cpp's `with_pieces`): its text, or its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenize`; `token_strs` are the vocabulary's own spellings."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class _EncodedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """`Tokenized` with its lists as JSON."""

    tokens: msgspec.Raw
    count: int
    max_model_len: int
    token_strs: msgspec.Raw | None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/detokenize`: the same text by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenizer_info`: what a client needs to write prompts by itself."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    vocab_size: int
    model_max_length: int
    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    eos_token_ids: list[int]


class RenderedPrompt(msgspec.Struct, frozen=True):
    """The answer of `/apply-template`."""

    prompt: str


class Tokenizing:
    """The endpoints that tokenize, detokenize and render."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def routes(self) -> list[ApiRoute]:
        """The routes of the tokenizer and the chat template."""
        return [
            ApiRoute(
                "POST",
                "/tokenize",
                self.tokenize,
                "Token ids of a text or of a conversation.",
                request=TokenizeRequest,
                response=Tokenized,
                is_limited=True,
            ),
            ApiRoute(
                "POST",
                "/detokenize",
                self.detokenize,
                "The text of token ids.",
                request=DetokenizeRequest,
                response=Detokenized,
                is_limited=True,
            ),
            ApiRoute(
                "GET",
                "/tokenizer_info",
                self.info,
                "The vocabulary's special tokens and the chat template.",
                response=TokenizerInfo,
            ),
            ApiRoute(
                "POST",
                "/apply-template",
                self.apply_template,
                "The prompt text of a conversation.",
                request=ApplyTemplateRequest,
                response=RenderedPrompt,
                is_limited=True,
            ),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        body = body_of(request)
        model = await self._models.of_body(body, caller_of(request))
        return await self._off_the_loop(
            request, len(body), lambda: json_response(self._tokenized(request, body, model))
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = body_of(request)
        model = await self._models.of_body(body, caller_of(request))
        return await self._off_the_loop(
            request, len(body), lambda: json_response(self._detokenized(request, body, model))
        )

    async def info(self, _: Request) -> Response:
        """The vocabulary's special tokens and the chat template."""
        engine = self._models.default.engine
        tokenizer, template = engine.tokenizer, engine.chat_template
        named = tokenizer.special_tokens
        return json_response(
            TokenizerInfo(
                vocab_size=tokenizer.vocab_size,
                model_max_length=engine.max_model_len,
                chat_template=None if template is None else template.source,
                eos_token_ids=sorted(tokenizer.eos_token_ids),
                bos_token=named.get("bos_token"),
                eos_token=named.get("eos_token"),
                pad_token=named.get("pad_token"),
                unk_token=named.get("unk_token"),
            )
        )

    async def apply_template(self, request: Request) -> Response:
        """The prompt text of a conversation."""
        body = body_of(request)
        model = await self._models.of_body(body, caller_of(request))

        def answer() -> Response:
            fields = self._read(request, body, ApplyTemplateRequest)
            chat = ChatRequest(**msgspec.structs.asdict(fields))
            return json_response(RenderedPrompt(prompt=self._rendered(request, chat, model)))

        return await self._off_the_loop(request, len(body), answer)

    async def _off_the_loop(
        self, request: Request, size: int, work: Callable[[], Response]
    ) -> Response:
        if size <= _INLINE_BYTES:
            return work()
        return await self._models.server.lanes.of(caller_of(request)).run(size, work)

    def _read(self, request: Request, body: bytes, schema: type[_Schema]) -> _Schema:
        reader = FieldReader(self._models.server.field_rules)
        fields = reader.decode(body, schema)
        report_ignored(request, reader.ignored)
        return fields

    def _detokenized(self, request: Request, body: bytes, model: ServedModel) -> Detokenized:
        fields = self._read(request, body, DetokenizeRequest)
        bounded("tokens", len(fields.tokens), model.server.limits.detokenized, "entries")
        tokenizer = model.engine.tokenizer
        check_token_ids("tokens", fields.tokens, tokenizer.vocab_size)
        text = tokenizer.decode(fields.tokens, False)
        return Detokenized(prompt=text, content=text)

    def _tokenized(self, request: Request, body: bytes, model: ServedModel) -> _EncodedTokens:
        fields = self._read(request, body, TokenizeRequest)
        _check_source(fields)
        ids = self._ids(request, fields, model)
        tokenizer = model.engine.tokenizer
        tokens: Iterator[int | TokenPiece] = iter(ids)
        if fields.with_pieces:
            tokens = (TokenPiece(each, _piece(tokenizer.token_bytes(each))) for each in ids)
        strings = None
        if fields.return_token_strs:
            strings = _encoded_in_slices(tokenizer.piece(each) or "" for each in ids)
        return _EncodedTokens(
            tokens=_encoded_in_slices(tokens),
            count=len(ids),
            max_model_len=model.engine.max_model_len,
            token_strs=strings,
        )

    def _ids(self, request: Request, fields: TokenizeRequest, model: ServedModel) -> list[int]:
        """The ids; each source has its own default for special tokens."""
        encode = model.engine.tokenizer.encode
        if fields.content is not None:
            return encode(fields.content, bool(fields.add_special))
        if fields.prompt is not None:
            return encode(fields.prompt, fields.add_special_tokens is not False)
        chat = ChatRequest(
            messages=fields.messages or [],
            model=fields.model,
            tools=fields.tools,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template_kwargs=fields.chat_template_kwargs,
        )
        # the template has written the special tokens already
        return encode(self._rendered(request, chat, model), bool(fields.add_special_tokens))

    def _rendered(self, request: Request, chat: ChatRequest, model: ServedModel) -> str:
        """The prompt text, exactly as the chat route would render it."""
        parsed = Chat().parse(msgspec.json.encode(chat), model)
        report_ignored(request, parsed.ignored)
        (prompt,) = parsed.prompts
        assert isinstance(prompt, ChatPrompt), "a chat has one prompt, of this kind"
        return rendered(model.engine, prompt)


def _check_source(fields: TokenizeRequest) -> None:
    """One of the three sources, with its own fields. Raises RequestError."""
    given = [name for name in _SOURCES if getattr(fields, name) is not None]
    if len(given) != 1:
        sent = " and ".join(given) or "none of them"
        raise RequestError(
            f"send one of prompt, messages and content; the body has {sent}",
            param=given[1] if given else "prompt",
        )
    source = given[0]
    for name in fields.__struct_fields__:
        goes = name in _FIELDS[source] or name in ("model", source)
        if not goes and getattr(fields, name) is not None:
            raise RequestError(f"{name} does not go with {source}", param=name)


def _encoded_in_slices(entries: Iterator[object]) -> msgspec.Raw:
    """A JSON list of the entries, encoded in slices: other threads run between them. All at once
    would be up to 50 MB, with an object for each token, in one call of the interpreter.
    """
    slices = iter(lambda: list(islice(entries, _SLICE_ENTRIES)), [])
    return msgspec.Raw(b"[" + b",".join(_ENCODE(part)[1:-1] for part in slices) + b"]")


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a token that is a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
