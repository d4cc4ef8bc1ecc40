"""`--warm-prompts`: prompts that are computed before the server listens, so that their prefix is
cached for the first client.

A file named `.jsonl` has a JSON object a line: the body of a chat completion or a completion, and
perhaps `api_keys`, the names of the keys whose cache gets it (all of them by default). Any other
file has the text of a prompt a line. Empty lines are skipped. `cli.flags.serve` reads the file,
`server.run` has it computed.

Conversations that do not end with the user, such as a system prompt, are cached up to where the
user's message begins: what the prompts of two different messages have in common.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from quickstep.errors import ConfigError, RequestError
from quickstep.server.generate.api import GeneratingApi
from quickstep.server.generate.generation import check_end
from quickstep.server.generate.prompts import prompts_ids
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.chat import Chat
from quickstep.server.openai.completions import Completions
from quickstep.server.options import WarmPrompt
from quickstep.server.usage.api_keys import ApiKeys, cache_salt_of
from quickstep.types import Request, SamplingParams

_LOG = logging.getLogger("quickstep.server")
_ENDPOINT = "--warm-prompts"  # in the step log
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_FIRST_WORDS = ("a", "The")  # two messages that begin with different tokens


def read_warm_prompts(path: Path, keys: ApiKeys) -> tuple[WarmPrompt, ...]:
    """The prompts of a file. Raises ConfigError, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--warm-prompts {path} cannot be read: {error}") from None
    read = _json_line if path.suffix == ".jsonl" else _text_line
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(read(number, line, keys))
            except (msgspec.DecodeError, RequestError) as error:
                raise ConfigError(f"--warm-prompts {path} line {number}: {error}") from None
    if not prompts:
        raise ConfigError(f"--warm-prompts {path} contains no prompt")
    return tuple(prompts)


def _text_line(number: int, line: str, keys: ApiKeys) -> WarmPrompt:
    return WarmPrompt(number, {"prompt": line})


def _json_line(number: int, line: str, keys: ApiKeys) -> WarmPrompt:
    body = msgspec.json.decode(line)
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise RequestError("it must be an object with either messages or prompt")
    names = body.pop("api_keys", None)
    if names is None:
        return WarmPrompt(number, body)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or not names:
        raise RequestError("api_keys must be a list of names of API keys")
    unknown = [name for name in names if name not in keys.names]
    if unknown:
        raise RequestError(f"there is no API key with the name {unknown[0][:64]!r}")
    return WarmPrompt(number, body, tuple(names))


async def warm_prefix_cache(model: ServedModel, prompts: Sequence[WarmPrompt]) -> None:
    """Start the engine and compute the prompts, one after the other.

    Raises:
        ConfigError: A prompt cannot be served; the error names its line.
        EngineError: The engine failed.
    """
    await model.engine.start()
    num_tokens = 0
    for prompt in prompts:
        try:
            num_tokens += await _compute(model, prompt)
        except RequestError as error:
            raise ConfigError(f"--warm-prompts line {prompt.line}: {error}") from None
    _LOG.info("computed %d warm prompts with %d tokens", len(prompts), num_tokens)


async def _compute(model: ServedModel, prompt: WarmPrompt) -> int:
    """Compute a prompt for each of its keys; returns how many tokens that are."""
    all_ids, adapter, own_salt = await _token_ids(model, prompt)
    names = prompt.api_keys or model.server.api_keys.names or ("",)
    shared = model.server.shares_prefix_cache
    longest = max(map(len, all_ids))
    if longest < model.engine.block_size:
        _LOG.warning(
            "--warm-prompts line %d has %d tokens, less than a block of %d: none of it is cached",
            prompt.line,
            longest,
            model.engine.block_size,
        )
    salts = dict.fromkeys(cache_salt_of(name, own_salt, shared) for name in names)
    for salt in salts:
        for token_ids in all_ids:
            request = Request(
                prompt_token_ids=tuple(token_ids),
                sampling=_SAMPLING,
                adapter=adapter,
                cache_salt=salt,
                endpoint=_ENDPOINT,
            )
            stream = model.engine.stream(request)
            async with aclosing(stream):
                await stream.accepted()
                async for delta in stream:
                    check_end(delta, _SAMPLING, "")
    return len(salts) * sum(map(len, all_ids))


async def _token_ids(
    model: ServedModel, prompt: WarmPrompt
) -> tuple[list[Sequence[int]], str, str]:
    """The tokens of the prompts of a line, their adapter and their salt. Raises RequestError."""
    body = prompt.body
    if "prompt" in body:
        return await _parsed_ids(model, Completions(), body)
    messages = body["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    role = last.get("role") if isinstance(last, dict) else None
    if role not in ("system", "developer", "assistant") or body.get("continue_final_message"):
        return await _parsed_ids(model, Chat(), body)
    both = []
    for text in _FIRST_WORDS:
        longer = [*messages, {"role": "user", "content": text}]
        [ids], adapter, salt = await _parsed_ids(model, Chat(), {**body, "messages": longer})
        both.append(list(ids))
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))
    common = [token_id for token_id, _ in pairs]
    if not common:
        raise RequestError("the chat template puts nothing of it before the user's message")
    return [common], adapter, salt


async def _parsed_ids(
    model: ServedModel, api: GeneratingApi, body: dict[str, Any]
) -> tuple[list[Sequence[int]], str, str]:
    parsed = api.parse(msgspec.json.encode(body), model, "")
    max_len = model.engine.max_model_len
    ids = await prompts_ids(model.engine, parsed.prompts, model.server.lanes, max_len)
    return ids, parsed.request.adapter, parsed.request.cache_salt
