"""The process that tries out grammars: `python -m quickstep.engine.grammar.trial_worker`.

Started by `grammar_trial`; frames on standard input and output. It may be killed at any moment, by
its parent, by its own clock of processor time (SIGPROF) or by what it compiles, and loses nothing.
It exits when its input ends. No torch, no tokenizer: the vocabulary comes as data.
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

from quickstep.engine.grammar.build import Refusal, build_matcher, reason_of
from quickstep.engine.grammar.source import GrammarSource
from quickstep.engine.grammar.trial import TrialOpening, Verdict, read_frame, write_frame
from quickstep.engine.grammar.vocabulary import byte_vocabulary, grammar_vocabulary
from quickstep.runtime.sampling.closing_search import ClosingVocabulary
from quickstep.runtime.sampling.grammar import start_ending

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["main"]

_STDIN, _STDOUT = 0, 1
_DEFAULT_STACK = 8 * 1024**2
_LEAST_STACK = 512 * 1024
_WALKED_TOKENS = 8


def main() -> int:
    """Serve until the input ends. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_half_stack())
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()
    return 0


def _half_stack() -> int:
    """Half of what a thread of the parent has, so that what passes here passes there."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    whole = _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft
    return max(min(whole, _DEFAULT_STACK) // 2, _LEAST_STACK)


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
    """Compiles what it is sent, over the model's vocabulary and over bytes."""

    def __init__(self, opening: TrialOpening) -> None:
        words = opening.vocabulary
        self._limits = opening.grammar_limits
        self._vocab_size = len(words.tokens)
        self._vocabulary = grammar_vocabulary(words, None)
        self._byte_vocabulary = byte_vocabulary(words)
        self._closing_vocabulary = ClosingVocabulary(
            words.tokens, words.special_token_ids, words.end_token_ids[0]
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
    """Without halves of surrogate pairs, which no encoding takes."""
    return text.encode(errors="replace").decode()


def _walk(matcher: LLMatcher, vocab_size: int) -> None:
    """A few tokens on, as the sampler goes: what is too much at once shows early."""
    for step in range(_WALKED_TOKENS):
        matcher.compute_ff_tokens()
        matcher.compute_ff_bytes()
        if matcher.is_error() or matcher.is_stopped():
            return
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << vocab_size) - 1)
        if not mask:
            return
        # from either end in turn: quotes and brackets are low ids, words are high ones
        token_id = mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1
        matcher.consume_token(token_id)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
