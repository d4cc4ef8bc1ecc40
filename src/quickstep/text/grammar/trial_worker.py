"""The process that tries out grammars: `python -m quickstep.text.grammar.trial_worker`.

Started by `trial`, with frames on standard input and output. It may be killed at any moment, by its
parent, by its own limit of processor time (SIGPROF) or by the grammar, and has no state to lose. It
exits when its input ends. It imports no torch and no tokenizer: the vocabulary comes as data.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quickstep.runtime.sampling.closing_search import ClosingVocabulary
from quickstep.runtime.sampling.grammar import start_ending
from quickstep.text.grammar.matcher import (
    Refusal,
    build_matcher,
    byte_vocabulary,
    grammar_vocabulary,
    reason_of,
)
from quickstep.text.grammar.source import GrammarSource
from quickstep.text.grammar.trial import TrialOpening, Verdict
from quickstep.text.worker_process import read_frame, write_frame

if TYPE_CHECKING:
    from llguidance import LLMatcher

_STDIN, _STDOUT = 0, 1
_DEFAULT_STACK = 8 * 1024**2
_LEAST_STACK = 512 * 1024
_WALKED_TOKENS = 8
_NICE = 10  # steps of running requests come first


def main() -> int:
    """Serve until the input ends. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    threading.stack_size(_half_stack())
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()
    return 0


def _half_stack() -> int:
    """Half the stack of the parent's threads: a grammar that compiles here compiles there."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    full = _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft
    return max(min(full, _DEFAULT_STACK) // 2, _LEAST_STACK)


def _serve() -> None:
    try:
        opening = msgspec.msgpack.decode(read_frame(_STDIN), type=TrialOpening)
        worker = _Trial(opening)
        limit = _address_space() + opening.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        write_frame(_STDOUT, b"")
        while True:
            source = msgspec.msgpack.decode(read_frame(_STDIN), type=GrammarSource)
            signal.setitimer(signal.ITIMER_PROF, opening.cpu_s)
            verdict = worker.verdict(source)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(_STDOUT, msgspec.msgpack.encode(verdict))
    except (EOFError, BrokenPipeError):
        pass
    except MemoryError:
        os.abort()


class _Trial:
    """Compiles grammars over the model's vocabulary and over bytes."""

    def __init__(self, opening: TrialOpening) -> None:
        vocabulary = opening.vocabulary
        self._limits = opening.grammar_limits
        self._vocab_size = len(vocabulary.tokens)
        self._vocabulary = grammar_vocabulary(vocabulary, None)
        self._byte_vocabulary = byte_vocabulary(vocabulary)
        self._closing_vocabulary = ClosingVocabulary(
            vocabulary.tokens, vocabulary.special_token_ids, vocabulary.end_token_ids[0]
        )

    def verdict(self, source: GrammarSource) -> Verdict:
        """Whether the grammar can be compiled and followed, and a text that completes it."""
        try:
            matcher = build_matcher(source, self._vocabulary, self._limits)
            over_bytes = build_matcher(source, self._byte_vocabulary, self._limits)
        except Refusal as refusal:
            return Verdict(_printable(str(refusal)))
        walked = matcher.deep_copy()
        _walk(walked, self._vocab_size)
        if walked.is_error():
            reason = reason_of(walked.get_error())
            return Verdict(_printable(f"cannot be followed: {reason}"))
        ending = start_ending(over_bytes, self._closing_vocabulary)
        return Verdict("", None if ending is None else list(map(ord, ending.path)))


def _printable(text: str) -> str:
    """The text with halves of surrogate pairs replaced, which cannot be encoded."""
    return text.encode(errors="replace").decode()


def _walk(matcher: LLMatcher, vocab_size: int) -> None:
    """Advance a few tokens, as the sampler does: this finds steps that exceed the limits."""
    for step in range(_WALKED_TOKENS):
        matcher.compute_ff_tokens()
        matcher.compute_ff_bytes()
        if matcher.is_error() or matcher.is_stopped():
            return
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << vocab_size) - 1)
        if not mask:
            return
        # alternate between both ends: quotes and brackets have low ids, words have high ones
        token_id = mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1
        matcher.consume_token(token_id)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
