"""llama.cpp on a file: its logits, its most likely tokens and how long it takes, from a process of
its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.environments import Environment

_CHILD = Path(__file__).with_name("llama_cpp_child.py")


class LlamaCpp:
    """One model in llama.cpp, with room for so many sequences of `most_tokens`. A context manager;
    requests run one at a time. `bindings`: the folder of another package than `llama-cpp-python`'s.
    """

    def __init__(
        self,
        environment: Environment,
        file: Path,
        num_threads: int,
        num_sequences: int = 1,
        most_tokens: int = 1024,
        bindings: Path | None = None,
    ) -> None:
        libraries = environment.directory / "build" / "bin"
        package = bindings or environment.llama_cpp_bindings
        sizes = [str(size) for size in (num_threads, num_sequences, most_tokens)]
        self._folder = tempfile.TemporaryDirectory(prefix="quickstep-logits-")
        self._process = subprocess.Popen(
            [str(environment.python), str(_CHILD), str(package), str(file), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # ik_llama.cpp has no other way to say nothing
            stderr=None if bindings is None else subprocess.DEVNULL,
            text=True,
            env={**os.environ, "LLAMA_CPP_LIB_PATH": str(libraries)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def logits(self, window: Sequence[int]) -> Tensor:
        """Of every token of a text, [T, V] float32."""
        out = Path(self._folder.name) / "logits"
        answer = self._answer({"window": list(window), "out": str(out)})
        found = np.fromfile(out, np.float32).reshape(len(window), answer["vocab_size"])
        return torch.from_numpy(found)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely tokens, one after the other, also after an end."""
        token_ids: list[int] = self._answer({"prompt": list(prompt), "num_tokens": num_tokens})[
            "token_ids"
        ]
        return token_ids

    def seconds(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, clock: str = "elapsed"
    ) -> tuple[float, float]:
        """Until each prompt has a first token, and of the steps after that, of all at once; by the
        clock `cpu`, of the process's CPU time.
        """
        answer: dict[str, Any] = self._answer(
            {
                "prompts": [list(prompt) for prompt in prompts],
                "num_tokens": num_tokens,
                "clock": clock,
            }
        )
        return answer["first_s"], answer["steps_s"]

    def _answer(self, request: dict[str, object]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(json.dumps(request), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class LlamaCppWindows:
    """The logits of windows where a `Reference` has a model: its hidden states are a window's and a
    row's number, and only the last window is in memory.
    """

    def __init__(self, llama_cpp: LlamaCpp, windows: Sequence[Sequence[int]]) -> None:
        self._llama_cpp = llama_cpp
        self._windows = windows
        self._known: tuple[int, Tensor] | None = None

    def hidden(self) -> tuple[Tensor, ...]:
        """[T, 2] of each window."""
        return tuple(
            torch.stack((torch.full((len(window),), index), torch.arange(len(window))), 1)
            for index, window in enumerate(self._windows)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[E, 2] -> [E, V], rows of one window."""
        number = int(hidden[0, 0])
        if self._known is None or self._known[0] != number:
            self._known = number, self._llama_cpp.logits(self._windows[number])
        return self._known[1][hidden[:, 1]]
