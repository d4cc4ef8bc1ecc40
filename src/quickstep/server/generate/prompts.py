"""The forms of a prompt, how each becomes the tokens that the model reads, and how many tokens and
sequences one request may have.

An API makes prompts; `generation` tokenises them before it submits them. Prompts above a certain
length are rendered and tokenised in a thread, so that the event loop continues; a text that cannot
fit the context is refused before it is tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from quickstep.engine.interface import ServedEngine, Vocabulary
from quickstep.engine.retrieval.pairs import bounded_text, fitting_ids
from quickstep.errors import PromptTooLong, RequestError
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.options import RequestLimits
from quickstep.types import SamplingParams

# Shorter prompts are rendered and tokenised on the event loop: a thread hop costs more.
_INLINE_CHARS = 2048
_CHARS_OF_A_CALL = 64  # cost of the shortest prompt in addition to its text
# Special tokens for filling in the middle, by model family: before, after, middle.
_INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    (
        "<\uff5cfim▁begin\uff5c>",
        "<\uff5cfim▁hole\uff5c>",
        "<\uff5cfim▁end\uff5c>",
    ),  # DeepSeek-Coder
)


class TextPrompt(msgspec.Struct, frozen=True):
    """Text to tokenise; special tokens in the text itself are recognised."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True):
    """Token ids from the client."""

    token_ids: tuple[int, ...]


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation for the model's chat template. `num_chars` estimates its size.

    `continue_final_message`: the answer continues from the last message's text.
    """

    messages: tuple[Mapping[str, Any], ...]
    num_chars: int
    add_generation_prompt: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    continue_final_message: bool = False


class InfillPrompt(msgspec.Struct, frozen=True):
    """Text on both sides of what the model is to write; `marker_ids` are the tokens that
    precede the text before, the text after, and the middle.
    """

    before: str
    after: str
    marker_ids: tuple[int, int, int]
    add_special_tokens: bool = True


Prompt = TextPrompt | TokenPrompt | ChatPrompt | InfillPrompt


async def prompts_ids(
    engine: ServedEngine, prompts: Sequence[Prompt], lanes: WorkLanes, max_len: int | None
) -> list[Sequence[int]]:
    """The tokens of a request's prompts. `max_len` is the context that each has to fit, as far as
    that is known beforehand; None for any length.

    Raises:
        RequestError: A prompt is too long, or the template refuses it.
        ServerBusy: Too many prompts wait.
    """
    return await _in_lane(prompts, lanes, lambda: _all_ids(engine, prompts, max_len))


async def bounded_ids(
    engine: ServedEngine,
    prompts: Sequence[TextPrompt | TokenPrompt],
    lanes: WorkLanes,
    most: int | None,
) -> list[Sequence[int]]:
    """The tokens of the prompts, at most `most` of each: of a longer text its beginning, with the
    special tokens that end a prompt. None refuses what does not fit the context.

    Raises:
        RequestError: A prompt is too long, or nothing of a text fits.
        ServerBusy: Too many prompts wait.
    """
    if most is None:
        return await prompts_ids(engine, prompts, lanes, engine.max_model_len)

    def work() -> list[Sequence[int]]:
        bounded = [_bounded(engine, prompt, most) for prompt in prompts]
        return [
            ids if len(ids) <= most else _beginning(engine, prompt, most)
            for ids, prompt in zip(_all_ids(engine, bounded, None), bounded, strict=True)
        ]

    return await _in_lane(prompts, lanes, work)


async def _in_lane(
    prompts: Sequence[Prompt], lanes: WorkLanes, work: Callable[[], list[Sequence[int]]]
) -> list[Sequence[int]]:
    num_chars = sum(map(_num_chars, prompts))
    return work() if num_chars <= _INLINE_CHARS else await lanes.run(num_chars, work)


def _bounded(
    engine: ServedEngine, prompt: TextPrompt | TokenPrompt, most: int
) -> TextPrompt | TokenPrompt:
    if isinstance(prompt, TokenPrompt):
        return prompt
    return replace(prompt, text=bounded_text(engine.tokenizer, prompt.text, most))


def _beginning(engine: ServedEngine, prompt: TextPrompt | TokenPrompt, most: int) -> Sequence[int]:
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids[:most]
    special = prompt.add_special_tokens

    def write(text: str) -> list[int]:
        return engine.tokenizer.encode(text, special)

    return fitting_ids(engine.tokenizer, write, prompt.text, most)


def _num_chars(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt():
            return 0
        case TextPrompt(text=text):
            return max(len(text), _CHARS_OF_A_CALL)
        case ChatPrompt(num_chars=num_chars):
            return num_chars
        case InfillPrompt(before=before, after=after):
            return len(before) + len(after)


def _all_ids(
    engine: ServedEngine, prompts: Sequence[Prompt], max_len: int | None
) -> list[Sequence[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, TextPrompt)]
    if len(texts) < len(prompts) or len({text.add_special_tokens for text in texts}) != 1:
        return [_ids(engine, prompt, max_len) for prompt in prompts]
    for prompt in texts:
        _check_fits(engine, prompt.text, max_len)
    special = texts[0].add_special_tokens
    return [*engine.tokenizer.encode_all([prompt.text for prompt in texts], special)]


def _ids(engine: ServedEngine, prompt: Prompt, max_len: int | None) -> Sequence[int]:
    encode = engine.tokenizer.encode
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    if isinstance(prompt, TextPrompt):
        _check_fits(engine, prompt.text, max_len)
        return encode(prompt.text, prompt.add_special_tokens)
    if isinstance(prompt, InfillPrompt):
        _check_fits(engine, prompt.before + prompt.after, max_len)
        before, after, middle = prompt.marker_ids
        texts = (encode(prompt.before, False), encode(prompt.after, False))
        opening = encode("", prompt.add_special_tokens)
        return [*opening, before, *texts[0], after, *texts[1], middle]
    text = rendered(engine, prompt)
    _check_fits(engine, text, max_len)
    return encode(text, False)  # the template has written the special tokens already


def _check_fits(engine: ServedEngine, text: str, max_len: int | None) -> None:
    """Raise PromptTooLong for a text that has too many bytes for any tokens that fit."""
    if max_len is None or len(text) <= max_len:
        return
    least = engine.tokenizer.least_tokens(text)
    if least > max_len:
        raise PromptTooLong(least, max_len, at_least=True)


def rendered(engine: ServedEngine, prompt: ChatPrompt) -> str:
    """The prompt text of a conversation. Raises RequestError."""
    template = engine.chat_template
    if template is None:
        raise RequestError(
            f"{engine.model_name} has no chat template; use /v1/completions", param="messages"
        )
    return template.render(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        extra=prompt.extra,
        continue_final_message=prompt.continue_final_message,
    )


def check_num_sequences(num_prompts: int, num_each: int, limits: RequestLimits, field: str) -> None:
    """Prompts times sequences of each. Raises RequestError that names `field`."""
    if num_prompts * num_each > limits.sequences:
        raise RequestError(
            f"{field} is {num_each} for {num_prompts} prompts, which makes "
            f"{num_prompts * num_each} sequences; the limit is {limits.sequences} per request",
            param=field,
        )


def check_num_tokens(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    max_model_len: int,
    limits: RequestLimits,
) -> None:
    """Tokens of the prompts, and all that may be generated. Raises RequestError."""
    num_tokens = 0
    for prompt in prompts:
        num_free = max(0, max_model_len - len(prompt))
        num_outputs = (
            num_free if sampling.max_tokens is None else min(num_free, sampling.max_tokens)
        )
        num_tokens += len(prompt) + sampling.n * num_outputs
    if num_tokens > limits.tokens:
        raise RequestError(
            f"the request may take {num_tokens} tokens with its prompts and n times max_tokens, "
            f"the limit is {limits.tokens}; lower n or max_tokens, or send fewer prompts",
            param="max_tokens" if sampling.n == 1 else "n",
        )


def infill_markers(tokenizer: Vocabulary) -> tuple[int, int, int]:
    """The tokens for an `InfillPrompt`. Raises RequestError if the model has none."""
    for family in _INFILL_TOKENS:
        before, after, middle = map(tokenizer.token_id, family)
        if before is not None and after is not None and middle is not None:
            return before, after, middle
    raise RequestError(
        "suffix is not supported: the model does not fill in the middle", param="suffix"
    )
