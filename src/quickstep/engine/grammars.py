"""Grammars of requests: bounded, tried out, compiled once and kept for the next request.

    Grammar --bounds--> source --trial in a process of its own--> matcher, copied for each sequence

`submit` refuses what cannot be compiled; the server calls `prepare` before it, which does the same
in a thread. The runner takes its matchers from `new_matcher`. llguidance is native code that a
grammar can bring down: what it makes of a new one is tried in a worker process that may die, and
only what has passed is compiled in this process. It is loaded by the first grammar, never at
import.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from quickstep.engine.grammar_build import Refusal, build_matcher
from quickstep.engine.grammar_source import GrammarLimits, GrammarSource, grammar_source
from quickstep.engine.grammar_trial import GrammarTrial, TrialLimits
from quickstep.engine.grammar_vocabulary import GrammarVocabulary, grammar_vocabulary
from quickstep.engine.tokenizer import Tokenizer
from quickstep.errors import RequestError
from quickstep.runtime.closing import ClosingVocabulary
from quickstep.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler", "GrammarLimits", "check_grammar", "prepare_grammar"]

_MAX_QUEUED = 64


class GrammarCompiler:
    """One model's compiler; any thread may call it. `vocab_size` is the width of the logits."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        limits: GrammarLimits | None = None,
        trial_limits: TrialLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits or GrammarLimits()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._trial = GrammarTrial(lambda: self._words, self._limits, trial_limits or TrialLimits())
        # its thread starts with the first grammar; one, so that no client can keep all cores busy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quickstep-grammar")
        self._num_queued = 0

    @property
    def num_kept(self) -> int:
        """Compiled grammars that the next request finds."""
        return len(self._compiled)

    @property
    def trial(self) -> GrammarTrial:
        """Where new grammars are tried out."""
        return self._trial

    async def prepare(self, grammar: Grammar) -> None:
        """Compile in a thread. Raises RequestError, with status 429 when too many wait for it."""
        if self._known(grammar) is not None:
            return
        if self._num_queued >= _MAX_QUEUED:
            raise RequestError(
                f"grammar has to wait for {self._num_queued} others; send it again later",
                param="grammar",
                status=429,
            )
        self._num_queued += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.compile, grammar)
        finally:
            self._num_queued -= 1

    def compile(self, grammar: Grammar) -> None:
        """Have the grammar ready. Raises RequestError that says what is wrong with it."""
        self._prototype(grammar)

    def new_matcher(self, grammar: Grammar) -> tuple[LLMatcher, ClosingVocabulary]:
        """A matcher at the grammar's start, which shares no state. Raises RequestError."""
        prototype = self._prototype(grammar)
        return prototype.deep_copy(), self._closing_vocabulary

    def _known(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
            return known

    def _prototype(self, grammar: Grammar) -> LLMatcher:
        known = self._known(grammar)
        if known is not None:
            return known
        try:
            compiled = self._compile(grammar_source(grammar, self._limits))
        except Refusal as refusal:
            raise RequestError(f"grammar {refusal}", param="grammar") from None
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > self._limits.kept:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, source: GrammarSource) -> LLMatcher:
        self._trial.check(source)
        # both are built here, by the thread that prepares, and not in a step
        vocabulary, _ = self._vocabulary, self._closing_vocabulary
        return build_matcher(source, vocabulary, self._limits)

    @cached_property
    def _words(self) -> GrammarVocabulary:
        """The vocabulary as plain data: a large one takes a moment."""
        return GrammarVocabulary.of(self._tokenizer, self._vocab_size)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return grammar_vocabulary(self._words, self._tokenizer)

    @cached_property
    def _closing_vocabulary(self) -> ClosingVocabulary:
        """What the endings of grammars are spelled with."""
        return ClosingVocabulary(self._words.tokens, set(self._words.special_token_ids))


def check_grammar(grammar: Grammar | None, compiler: GrammarCompiler | None) -> None:
    """Compile a request's grammar, if it has one. Raises RequestError."""
    if grammar is not None:
        _required(compiler).compile(grammar)


async def prepare_grammar(grammar: Grammar | None, compiler: GrammarCompiler | None) -> None:
    """The same in a thread. Raises RequestError."""
    if grammar is not None:
        await _required(compiler).prepare(grammar)


def _required(compiler: GrammarCompiler | None) -> GrammarCompiler:
    if compiler is None:
        raise RequestError("grammar is not supported by this engine", param="grammar")
    return compiler
