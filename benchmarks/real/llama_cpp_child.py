"""llama.cpp in a process of its own, over the bindings that `llama-cpp-python` carries.

Run by the Python of llama.cpp's environment (`benchmarks.peers.environments`), never imported. One
line of JSON is a request, and one is its response:

    {"window": [ids], "out": "file"}     logits of every token, float32, into the file
    {"prompt": [ids], "num_tokens": n}   the most likely tokens, one after the other
    {"prompts": [[ids]], "num_tokens": n}   seconds until each has a first token, and of the n steps
                                            after that, of all prompts at once

Only ctypes and NumPy are needed: the package's own `__init__` imports others, so the bindings are
imported as a package without it.
"""

from __future__ import annotations

import json
import sys
import time
import types
from pathlib import Path

import numpy as np

_MOST_TOKENS = 1024  # of a sequence


def bindings(package: Path) -> types.ModuleType:
    """`llama_cpp.llama_cpp` of the package's sources."""
    parent = types.ModuleType("llama_cpp")
    parent.__path__ = [str(package)]
    sys.modules["llama_cpp"] = parent
    import llama_cpp.llama_cpp as found

    return found


class Model:
    """One file, with a context of some sequences."""

    def __init__(
        self, lib: types.ModuleType, file: str, num_threads: int, num_sequences: int
    ) -> None:
        self._lib = lib
        self._silent = lib.llama_log_callback(_say_nothing)  # as long as the library calls it
        lib.llama_log_set(self._silent, None)
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            file.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {file}")
        params = lib.llama_context_default_params()
        params.n_ctx = _MOST_TOKENS * num_sequences
        params.n_batch = params.n_ubatch = _MOST_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = num_threads
        self._context = lib.llama_init_from_model(self._model, params)
        self.num_tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(_MOST_TOKENS, 0, 1)
        self._places = [0] * num_sequences

    def start(self) -> None:
        """Forget all tokens."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._places = [0] * len(self._places)

    def logits(self, token_ids: list[int], num_last: int, sequence: int = 0) -> np.ndarray:
        """Append tokens to a sequence; the logits of the last ones, [num_last, V] float32."""
        return self.logits_of([(sequence, token_id) for token_id in token_ids], num_last)

    def logits_of(self, tokens: list[tuple[int, int]], num_last: int) -> np.ndarray:
        """Append tokens to their sequences, as `logits`."""
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


def seconds(model: Model, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
    """Until each prompt has a first token, and of the steps after that."""
    began = time.perf_counter()
    newest = [
        int(model.logits(prompt, 1, sequence)[0].argmax())
        for sequence, prompt in enumerate(prompts)
    ]
    first = time.perf_counter()
    for _ in range(num_tokens):
        logits = model.logits_of(list(enumerate(newest)), len(newest))
        newest = [int(row) for row in logits.argmax(1)]
    return {"first_s": first - began, "steps_s": time.perf_counter() - first}


def _say_nothing(level: int, text: bytes, data: object) -> None:
    del level, text, data


def main() -> None:
    """Answer requests until the input ends."""
    package, file, num_threads, num_sequences = sys.argv[1:5]
    model = Model(bindings(Path(package)), file, int(num_threads), int(num_sequences))
    for line in sys.stdin:
        request = json.loads(line)
        model.start()
        if "window" in request:
            token_ids = request["window"]
            model.logits(token_ids, len(token_ids)).tofile(request["out"])
            print(json.dumps({"vocab_size": model.num_tokens}), flush=True)
            continue
        if "prompts" in request:
            found = seconds(model, request["prompts"], request["num_tokens"])
            print(json.dumps(found), flush=True)
            continue
        token_ids, found = request["prompt"], []
        for _ in range(request["num_tokens"]):
            token_ids = [int(model.logits(token_ids, 1)[0].argmax())]
            found += token_ids
        print(json.dumps({"token_ids": found}), flush=True)


if __name__ == "__main__":
    main()
