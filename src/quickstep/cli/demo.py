"""`quickstep demo` (and `make demo`): SmolLM2, or the bundled model where that is not installed,
completes code and answers a question. With a LoRA adapter the bundled model writes another style of
docstrings.

A table at the end shows the phases of each request, with the times that the engine measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.cli.flags.engine import add_engine_flags, engine_config
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.screen import console_on, print_table, write_out
from quickstep.config import LoRAConfig
from quickstep.errors import ConfigError
from quickstep.types import SamplingParams

if TYPE_CHECKING:
    from quickstep.cli.session import Answer
    from quickstep.engine.engine import Engine

_CODE = "import json\n\ndef load_config(path):\n    with open(path"
_QUESTION = "Why is the sky blue?"
_BUNDLED_QUESTION = "What does itertools.chain do?"  # the bundled model knows only Python
_ADAPTER = "demo-docstrings"
_FUNCTION = 'def copy_file(source, target, overwrite=False):\n    """Copy a file.'


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers, "demo", "Stream a completion and a chat answer from a small model.", run
    )
    parser.add_argument(
        "--model", help="smollm2 where its package is installed (default), or demo, the bundled one"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the answers, then print the table."""
    from quickstep.cli.session import with_engine
    from quickstep.model.checkpoint.placement import choose_device

    console = console_on(sys.stdout)
    model = args.model or _chosen_model()
    config = engine_config(args, model)
    if model == "demo" and choose_device(args.device).type == "cpu":
        config = replace(config, lora=LoRAConfig(((_ADAPTER, _ADAPTER),), max_loras=1))
    question = _BUNDLED_QUESTION if model == "demo" else _QUESTION
    answers = with_engine(config, partial(_stream_all, question=question), show_memory=True)
    print()
    columns = [_figures(answer) for answer in answers.values()]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    print_table(console, "phases of the run", ("", *answers), rows)
    return 0


def _chosen_model() -> str:
    """The better of the two small models that is here, and says which."""
    from quickstep.model.checkpoint.source import SMOLLM2, SMOLLM2_INSTALL, local_checkpoint

    try:
        local_checkpoint(SMOLLM2)
    except ConfigError:
        write_out(
            "model: demo, 5 M parameters, bundled, which knows only Python's standard library\n"
            f"(with SmolLM2 the demo answers better: {SMOLLM2_INSTALL})\n"
        )
        return "demo"
    write_out(
        "model: smollm2, SmolLM2-135M-Instruct in Q4_1 (the one that is bundled: --model demo)\n"
    )
    return SMOLLM2


async def _stream_all(engine: Engine, question: str) -> dict[str, Answer]:
    """The third prompt is the first with its completion, so the prefix cache has its blocks."""
    code = engine.tokenizer.encode(_CODE)
    write_out(f"\n>>> completion\n{_CODE}")
    completion = await _streamed(engine, code, SamplingParams(temperature=0.0, max_tokens=64))
    write_out(f"\n>>> chat: {question}\n")
    chat = engine.chat_prompt([{"role": "user", "content": question}])
    answer = await _streamed(engine, chat, SamplingParams(temperature=0.0, max_tokens=96))
    write_out("\n>>> completion, continued\n")
    resumed = await _streamed(
        engine, [*code, *completion.token_ids], SamplingParams(temperature=0.0, max_tokens=16)
    )
    answers = {"completion": completion, "chat": answer, "resumed": resumed}
    if engine.adapters:
        sampling = SamplingParams(temperature=0.0, max_tokens=64)
        prompt = engine.tokenizer.encode(_FUNCTION)
        for name, adapter in (("base model", ""), ("adapter", _ADAPTER)):
            shown = f"with the LoRA adapter {adapter}" if adapter else "without an adapter"
            write_out(f"\n>>> completion {shown}\n{_FUNCTION}")
            answers[name] = await _streamed(engine, prompt, sampling, adapter)
    return answers


async def _streamed(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams, adapter: str = ""
) -> Answer:
    from quickstep.cli.session import collect

    stream = engine.generate(prompt, sampling, adapter=adapter)
    (answer,) = await collect(stream, 1, write_out)
    write_out("\n")
    return answer


def _figures(answer: Answer) -> dict[str, str]:
    timings = answer.timings
    assert timings is not None, "a finished sequence has timings"
    assert answer.finish_reason is not None, "a finished sequence has a reason"
    per_token = answer.time_per_output_token_s
    return {
        "prompt tokens": str(timings.num_prompt_tokens),
        "cached": str(timings.num_cached_tokens),
        "output tokens": str(timings.num_output_tokens),
        "queue ms": _ms(timings.queue_s),
        "prefill ms": _ms(timings.prefill_s),
        "decode ms": _ms(timings.decode_s),
        "TTFT ms": _ms(answer.time_to_first_token_s),
        "TPOT ms": _ms(per_token),
        "tokens/s": f"{1 / per_token:.0f}" if per_token else "-",
        "device ms": _ms(timings.device_s),
        "KV blocks": str(timings.num_blocks),
        "finish reason": answer.finish_reason.value,
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
