"""A conversation to prompt text, through the checkpoint's template.

The template is untrusted code: it runs in Jinja's immutable sandbox, within bounds of time and size
(`template_limits`), with the additions that Hugging Face's templates rely on (`tojson` without HTML
escapes, `raise_exception`, `strftime_now`, loop controls, `generation` blocks). Called by the
engine's users before `Engine.submit`. Any error of a template or a conversation is a RequestError.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import do_items
from jinja2.parser import Parser
from msgspec.structs import replace

from quickstep.config import ContentFormat, InputConfig
from quickstep.errors import ConfigError, RequestError
from quickstep.model.checkpoint.config_fields import read_json
from quickstep.model.checkpoint.gguf_names import is_gguf
from quickstep.model.checkpoint.source import reading_checkpoint
from quickstep.text.message_content import (
    Content,
    ContentReading,
    checked_parts,
    content_readings,
    joined_contents,
    text_part,
)
from quickstep.text.template_limits import BoundedEnvironment
from quickstep.text.tool_calls.formats import OutputFormats, formats_of

Message = Mapping[str, Any]

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


_END_OF_TEXT = "\ue0fe\ue0ff"  # of private use: marks where a continued message ends
_TESTS_NONE = re.compile(r"\bcontent['\"]?\]?\s+is\s+(?:not\s+)?none\b")


class _Arguments(dict[str, Any]):
    """A call's arguments as templates need them: most read an object, DeepSeek's add the JSON text
    to a string, others print it. The text is the model's own, so that its tokens stay the same.
    """

    def __init__(self, members: Mapping[str, Any], text: str) -> None:
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class _BrokenArguments(str):
    """Arguments that are not the JSON of an object, because the model was cut or wrote something
    else: their text, and an object without members for a template that reads one.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __contains__(self, name: object) -> bool:
        return False

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return no members."""
        return ()

    def keys(self) -> tuple[str, ...]:
        """Return no names."""
        return ()

    def values(self) -> tuple[Any, ...]:
        """Return no values."""
        return ()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the default: there are no members."""
        return default


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an answer for training; it has no effect."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """The templates of one checkpoint, by name; `default` renders unless another one fits.

    `special_tokens` are variables of templates (`bos_token`, ...); `now` gives the date that a
    template may print. A render that takes longer than `limit_s` by the `clock` is refused; the
    clock counts the thread's processor time, so that a pause of the machine has no effect.
    `content_format` is what templates read of a message's content; by default each role of each
    template has what the template shows.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime],
        *,
        limit_s: float = 1.0,
        clock: Callable[[], float] = time.thread_time,
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> None:
        self._environment = environment = _environment(now, clock)
        self._limit_s = limit_s
        self._formats = _formats(templates)
        self._source = templates.get("default", next(iter(templates.values()), ""))
        self._empty_content = None if any(map(_TESTS_NONE.search, templates.values())) else ""
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _compiled(environment, text) for name, text in templates.items()}
        self._readings = {
            name: content_readings(content_format, self._probe(template))
            for name, template in self._templates.items()
        }

    @classmethod
    def open(
        cls,
        path: Path,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime],
        inputs: InputConfig | None = None,
    ) -> ChatTemplate | None:
        """The template of `inputs`, else those of the checkpoint directory `path`; None if there is
        none. Raises ConfigError.
        """
        inputs = inputs or InputConfig()
        made = partial(
            cls,
            special_tokens=special_tokens,
            now=now,
            limit_s=inputs.template_s,
            content_format=inputs.content_format,
        )
        if inputs.chat_template is not None:
            return made({"default": inputs.chat_template})
        with reading_checkpoint(path):
            templates = find_templates(path)
            return made(templates) if templates else None

    @property
    def source(self) -> str:
        """The text of the default template."""
        return self._source

    @property
    def formats(self) -> OutputFormats:
        """The formats of calls and reasoning of models with this template."""
        return self._formats

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation; special tokens are already in it.

        `extra` holds further template variables (`enable_thinking`, `documents`, ...).
        `continue_final_message` ends the prompt with the last message's text, so that the answer
        continues from there.

        System messages at the beginning are one message. A template that refuses a later one gets
        it as part of a user turn: agents send reminders so.

        Raises:
            RequestError: The template refuses the conversation, or alters the text that is to be
                continued, or `extra` hides an argument.
        """
        if continue_final_message:
            *earlier, last = messages
            content = last.get("content")
            if last.get("role") != "assistant" or not isinstance(content, (str, list, tuple)):
                raise RequestError(
                    "the last message is not a text of the assistant; only such a message can be "
                    "continued",
                    param="messages",
                )
            marked, end = _marked(content)
            text = self.render(
                [*earlier, {**last, "content": marked}], tools, add_generation_prompt, extra
            )
            return _up_to_the_mark(text, end)
        reserved = _RESERVED & set(extra or {})
        if reserved:
            raise RequestError(
                f"chat_template_kwargs holds {sorted(reserved)[0]}, which has a field of its own",
                param="chat_template_kwargs",
            )
        name = self._choose(with_tools=bool(tools))
        template, readings = self._templates[name], self._readings[name]
        plain = _with_one_beginning(
            [
                _as_read(_plain_message(message, self._empty_content), readings)
                for message in messages
            ]
        )
        known = self._formats.tool_calls
        if known is not None and known.numbered_ids:
            plain = _with_numbered_ids(plain)
        variables: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **(extra or {}),
            "messages": plain,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._rendered(template, variables)
        except RequestError:
            if not any(message["role"] == "system" for message in plain[1:]):
                raise
            try:
                retried = {**variables, "messages": _with_user_reminders(plain, readings)}
                return self._rendered(template, retried)
            except RequestError:
                pass
            raise  # the refusal of what the client sent

    def _rendered(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        try:
            with self._environment.within(self._limit_s):
                return template.render(variables)
        except Exception as error:  # a template may raise anything, on any conversation
            raise RequestError(
                f"the chat template refused the conversation: {error}", param="messages"
            ) from error

    def _probe(self, template: jinja2.Template) -> Callable[[Sequence[Message]], str]:
        """Renders conversations of which `content_readings` learns."""

        def render(messages: Sequence[Message]) -> str:
            variables = {
                **self._special_tokens,
                "documents": None,
                "messages": messages,
                "tools": None,
                "add_generation_prompt": False,
            }
            return self._rendered(template, variables)

        return render

    def _choose(self, with_tools: bool) -> str:
        """The name of the template."""
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        raise RequestError(
            f"the model has no default chat template, only {', '.join(sorted(self._templates))}; "
            "render the conversation yourself and send it as a completion",
            param="messages",
        )


def _compiled(environment: BoundedEnvironment, text: str) -> jinja2.Template:
    """A template. Raises ConfigError with the line at which it cannot be read."""
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" at line {line}"
        raise ConfigError(f"the chat template cannot be read{where}: {error}") from error


def _marked(content: Content) -> tuple[Content, str]:
    """The content with a mark at its end, and the text that is before the mark: the last part."""
    if isinstance(content, str):
        return f"{content}{_END_OF_TEXT}", content
    parts = checked_parts(content)
    end = str(parts[-1]["text"]) if parts else ""
    return [*parts[:-1], text_part(f"{end}{_END_OF_TEXT}")], end


def _up_to_the_mark(text: str, continued: str) -> str:
    """The prompt up to the end of the message that is continued.

    A template may trim a message; text that it removed cannot be continued.
    """
    before, mark, _ = text.rpartition(_END_OF_TEXT)
    if not mark or not before.endswith(continued.lstrip()):
        raise RequestError(
            "the last message cannot be continued: the chat template alters its text",
            param="messages",
        )
    return before


def _formats(templates: Mapping[str, str]) -> OutputFormats:
    """The formats of the templates that `render` uses with and without tools."""
    plain = templates.get("default", "")
    with_tools = formats_of(templates.get("tool_use", plain))
    return replace(with_tools, reasoning=with_tools.reasoning or formats_of(plain).reasoning)


def find_templates(path: Path) -> dict[str, str]:
    """All templates of a checkpoint directory or GGUF file by name, {} if it has none.

    `chat_template.jinja` and `additional_chat_templates/NAME.jinja` override those in
    `tokenizer_config.json`, whose entry is one template or a list of named ones.
    """
    if is_gguf(path):
        from quickstep.text.gguf_tokenizer import gguf_templates

        return gguf_templates(path)
    config = read_json(path / "tokenizer_config.json")
    legacy = read_json(path / "chat_template.json")
    entry = config.get("chat_template", legacy.get("chat_template"))
    templates = {}
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, Mapping):
        templates.update(entry)
    elif entry is not None:
        templates.update((named["name"], named["template"]) for named in entry)
    templates.update(_template_files(path))
    return templates


def read_template(source: str) -> str:
    """The text of a chat template, which `source` is itself or names the file of.

    Raises:
        ConfigError: There is no such file, or the template cannot be read.
    """
    if any(char in source for char in "{}\n"):
        text = source
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the chat template {source} cannot be read: {why}; give a file, or the template "
                "itself"
            ) from None
    _compiled(_environment(datetime.now, time.thread_time), text)
    return text


def _template_files(path: Path) -> Iterable[tuple[str, str]]:
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        yield file.stem, file.read_text(encoding="utf-8")
    file = path / "chat_template.jinja"
    if file.is_file():
        yield "default", file.read_text(encoding="utf-8")


def _environment(now: Callable[[], datetime], clock: Callable[[], float]) -> BoundedEnvironment:
    environment = BoundedEnvironment(clock, [_GenerationBlock, jinja2.ext.loopcontrols])

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment.filters["tojson"] = _tojson
    environment.filters["items"] = _items
    environment.bound_filters()
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not have."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Jinja's own filter refuses arguments that are not the JSON of an object."""
    return () if isinstance(value, _BrokenArguments) else do_items(value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _plain_message(message: Message, empty_content: str | None) -> dict[str, Any]:
    """A message as templates expect it: content of text or parts, tool arguments as an object.

    `empty_content` is the content of a message that has only calls: None for templates that test
    for it, "" for others, which print it.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("every message needs a role, such as `user`", param="messages")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        plain["content"] = checked_parts(content)
    if plain.get("tool_calls"):
        plain["content"] = plain.get("content") or empty_content
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    elif plain.get("content") is None:
        plain["content"] = ""  # a turn that was cut in its reasoning
    return plain


def _as_read(message: dict[str, Any], readings: Mapping[str, ContentReading]) -> dict[str, Any]:
    """The message with its content as the template reads that of its role."""
    if message.get("content") is None:
        return message
    reading = readings.get(message["role"], readings["user"])
    return {**message, "content": reading.of(message["content"])}


def _with_one_beginning(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the system messages at the beginning joined: some templates take one."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "system" and len(joined) == 1:
            joined[0] = _joined(joined[0], message)
        else:
            joined.append(message)
    return joined


def _with_numbered_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the ids of calls and of their results as the model writes them, which are
    the only place where such a template writes the name: `functions.NAME:INDEX`.
    """
    ids: dict[str, str] = {}
    num_calls = 0
    numbered: list[dict[str, Any]] = []
    for message in messages:
        calls: list[Any] = []
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                call_id = f"functions.{call['function'].get('name')}:{num_calls}"
                ids[str(call.get("id"))] = call_id
                call = {**call, "id": call_id}
                num_calls += 1
            calls.append(call)
        if calls:
            message = {**message, "tool_calls": calls}
        elif (answered := ids.get(str(message.get("tool_call_id")))) is not None:
            message = {**message, "tool_call_id": answered}
        numbered.append(message)
    return numbered


def _with_user_reminders(
    messages: Sequence[dict[str, Any]], readings: Mapping[str, ContentReading]
) -> list[dict[str, Any]]:
    """The messages with later system messages as user turns, and adjacent user turns joined, since
    templates that refuse such messages may also want roles to alternate.
    """
    first, *later = messages
    turns = [first]
    for message in later:
        is_reminder = message["role"] == "system"
        turn = _as_read({**message, "role": "user"}, readings) if is_reminder else message
        if turns[-1]["role"] == turn["role"] == "user":
            turns[-1] = _joined(turns[-1], turn)
        else:
            turns.append(turn)
    return turns


def _joined(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages of one role as one."""
    return {**first, "content": joined_contents(first["content"], then["content"])}


def _plain_tool_call(call: Any) -> Any:
    """OpenAI sends the arguments of a call as JSON text, templates print an object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        if not isinstance(arguments, str):
            arguments = "{}" if arguments is None else _tojson(arguments)
        text = arguments.strip() or "{}"
        members = _members(text)
        function["arguments"] = (
            _BrokenArguments(text) if members is None else _Arguments(members, text)
        )
    return {**call, "function": function}


def _members(text: str) -> dict[str, Any] | None:
    """The members of the object that a text is the JSON of; None if it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
