"""llama.cpp in a process of its own, over the bindings that `llama-cpp-python` carries, or
ik_llama.cpp over those of `ik-llama-cpp-python`, which repacks weights while it loads (`-rtr`).

Run by the Python of llama.cpp's environment (`benchmarks.peers.environments`), never imported. One
line of JSON is a request, and one is its response:

    {"window": [ids], "out": "file"}     logits of every token, float32, into the file
    {"prompt": [ids], "num_tokens": n}   the most likely tokens, one after the other
    {"prompts": [[ids]], "num_tokens": n}   seconds until each has a first token, and of the n steps
                                            after that, of all prompts at once; with "clock": "cpu"
                                            of the process's CPU time

Only ctypes and NumPy are needed: the package's own `__init__` imports others, so the bindings are
imported as a package without it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np

_MOST_BATCHED = 1024  # tokens of a call

_MODULES = {"llama_cpp": "llama_cpp.llama_cpp", "ik_llama_cpp": "ik_llama_cpp._ctypes_api"}


def bindings(package: Path) -> types.ModuleType:
    """The module of a package's sources that has the library's functions."""
    parent = types.ModuleType(package.name)
    parent.__path__ = [str(package)]
    sys.modules[package.name] = parent
    return importlib.import_module(_MODULES[package.name])


class Model:
    """One file, with a context of some sequences."""

    def __init__(
        self,
        lib: types.ModuleType,
        file: str,
        num_threads: int,
        num_sequences: int,
        most_tokens: int,
    ) -> None:
        self._lib = lib
        self._is_ik = lib.__name__ == _MODULES["ik_llama_cpp"]
        of_model = lib.llama_model_default_params()
        if self._is_ik:
            of_model.repack_tensors = True
        else:
            self._silent = lib.llama_log_callback(_say_nothing)  # as long as the library calls it
            lib.llama_log_set(self._silent, None)
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(file.encode(), of_model)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {file}")
        params = lib.llama_context_default_params()
        params.n_ctx = most_tokens * num_sequences
        params.n_batch = params.n_ubatch = _MOST_BATCHED
        params.n_seq_max = num_sequences
        if self._is_ik:  # its flash attention fails an assertion on a batch of several sequences
            params.flash_attn = num_sequences == 1
        params.n_threads = params.n_threads_batch = num_threads
        self._context = lib.llama_init_from_model(self._model, params)
        self.num_tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(_MOST_BATCHED, 0, 1)
        self._places = [0] * num_sequences

    def start(self) -> None:
        """Forget all tokens."""
        if self._is_ik:
            self._lib.llama_kv_cache_clear(self._context)
        else:
            self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._places = [0] * len(self._places)

    def logits(self, token_ids: list[int], num_last: int, sequence: int = 0) -> np.ndarray:
        """Append tokens to a sequence; the logits of the last ones, [num_last, V] float32."""
        return self.logits_of([(sequence, token_id) for token_id in token_ids], num_last)

    def logits_of(self, tokens: list[tuple[int, int]], num_last: int) -> np.ndarray:
        """Append tokens to their sequences, as `logits`; the last ones are in one batch."""
        while len(tokens) > _MOST_BATCHED:
            self._decode(tokens[:_MOST_BATCHED], 0)
            tokens = tokens[_MOST_BATCHED:]
        return self._decode(tokens, num_last)

    def _decode(self, tokens: list[tuple[int, int]], num_last: int) -> np.ndarray:
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for index, (sequence, token_id) in enumerate(tokens):
            batch.token[index] = token_id
            batch.pos[index] = self._places[sequence]
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = index >= count - num_last
            self._places[sequence] += 1
        if self._lib.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp cannot decode")
        rows = [
            np.ctypeslib.as_array(
                self._lib.llama_get_logits_ith(self._context, index), (self.num_tokens,)
            )
            for index in range(count - num_last, count)
        ]
        return np.array(rows, np.float32)


def seconds(
    model: Model, prompts: list[list[int]], num_tokens: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Until each prompt has a first token, and of the steps after that."""
    began = clock()
    newest = [
        int(model.logits(prompt, 1, sequence)[0].argmax())
        for sequence, prompt in enumerate(prompts)
    ]
    first = clock()
    for _ in range(num_tokens):
        logits = model.logits_of(list(enumerate(newest)), len(newest))
        newest = [int(row) for row in logits.argmax(1)]
    return {"first_s": first - began, "steps_s": clock() - first}


def _say_nothing(level: int, text: bytes, data: object) -> None:
    del level, text, data


def main() -> None:
    """Answer requests until the input ends."""
    package, file, *sizes = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # ik_llama.cpp prints
    model = Model(bindings(Path(package)), file, *map(int, sizes))
    for line in sys.stdin:
        request = json.loads(line)
        model.start()
        if "window" in request:
            token_ids = request["window"]
            model.logits(token_ids, len(token_ids)).tofile(request["out"])
            print(json.dumps({"vocab_size": model.num_tokens}), file=answers, flush=True)
            continue
        if "prompts" in request:
            clock = time.process_time if request["clock"] == "cpu" else time.perf_counter
            times = seconds(model, request["prompts"], request["num_tokens"], clock)
            print(json.dumps(times), file=answers, flush=True)
            continue
        token_ids, found = request["prompt"], []
        for _ in range(request["num_tokens"]):
            token_ids = [int(model.logits(token_ids, 1)[0].argmax())]
            found += token_ids
        print(json.dumps({"token_ids": found}), file=answers, flush=True)


if __name__ == "__main__":
    main()
