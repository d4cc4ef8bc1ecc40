"""An engine process without torch: the real service around the scripted engine.

`RemoteEngine(command=command("hold"))` runs this file. The model's directory holds the tokenizer
that `write_model` put there. Modes: `serve`; `hold` (no step ever ends); `break` (the engine's
loop fails at the first step); `panic` (the same, with what pyo3 raises for a panic in Rust);
`fail` (every step fails); `unsendable` (the answers to "x" are no text); `garbage` (the first step
says what is no message); `poison` (a step with a prompt that is "x" ends the process); `die` and
`refuse` (while opening).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace
from scripted_engine import END, ScriptedEngine, ScriptedExecutor, byte_tokenizer

from quickstep.config import EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.engine import Engine
from quickstep.engine.stream import Sink
from quickstep.errors import ConfigError
from quickstep.types import Request, StepPlan, Ticket

NUM_BLOCKS = 64


def command(mode: str = "serve") -> tuple[str, ...]:
    """What starts the worker in a mode."""
    return (sys.executable, __file__, mode)


def config(path: Path, **scheduler: int) -> EngineConfig:
    """The scripted engine's configuration, its model in `path`."""
    write_model(path)
    settings = SchedulerConfig(**{"max_model_len": 256, "max_num_seqs": 8, **scheduler})
    return EngineConfig(LoadConfig(model=str(path)), scheduler=settings, seed=0)


def write_model(path: Path) -> None:
    """As much of a checkpoint as the server's process reads."""
    byte_tokenizer()._library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def opened(config: EngineConfig) -> Engine:
    """The scripted engine of a configuration."""
    return scripted(config).engine


def scripted(config: EngineConfig) -> ScriptedEngine:
    settings = config.scheduler
    return ScriptedEngine(
        num_blocks=NUM_BLOCKS,
        path=Path(config.load.model),
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        max_model_len=settings.max_model_len,
    )


class Panic(BaseException):
    """What pyo3 raises for a panic in Rust is no Exception either."""


def panic(plan: object) -> None:
    raise Panic("planted")


def spoil_answers(engine: Engine) -> None:
    submit = engine.submit

    def submitted(request: Request, sink: Sink) -> tuple[str, ...]:
        put = sink.put
        if bytes(request.prompt_token_ids) == b"x":
            sink.put = lambda delta: put(replace(delta, text=delta.text and "\ud800"))
        return submit(request, sink)

    engine.submit = submitted


def poisoned(executor: ScriptedExecutor) -> Callable[[StepPlan], Ticket]:
    """Steps that end the process while they run, if they begin a prompt that is "x"."""
    submit = executor.submit

    def submitted(plan: StepPlan) -> Ticket:
        if any(bytes(one.token_ids[: one.prompt_len]) == b"x" for one in plan.admitted):
            threading.Timer(0.02, os._exit, (9,)).start()
            executor.gate.clear()
        return submit(plan)

    return submitted


def opener(mode: str) -> Callable[[EngineConfig, Callable[[int, int], None]], Engine]:
    def open_engine(config: EngineConfig, progress: Callable[[int, int], None]) -> Engine:
        progress(1, 2)
        if mode == "die":
            os._exit(7)
        if mode == "refuse":
            raise ConfigError("the script wants no model")
        parts = scripted(config)
        if mode == "hold":
            parts.executor.gate.clear()
        if mode == "break":
            parts.executor.submit = None
        if mode == "panic":
            parts.executor.submit = panic
        if mode == "fail":
            parts.executor.broken = range(10**9)
        if mode == "unsendable":
            spoil_answers(parts.engine)
        if mode == "poison":
            parts.executor.submit = poisoned(parts.executor)
        if mode == "garbage":
            parts.executor.submit = lambda plan: os.write(int(sys.argv[2]), b"\0\0\0\1\xc1")
        progress(2, 2)
        return parts.engine

    return open_engine


if __name__ == "__main__":
    from quickstep.engine.remote.worker import run

    sys.exit(run(sys.argv[2:], opener(sys.argv[1])))
