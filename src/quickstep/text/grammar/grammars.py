"""Grammars of requests: bounded, tried out, compiled once and cached.

    Grammar --bounds--> source --trial in a separate process--> matcher, copied for each sequence

`submit` refuses a grammar that cannot be compiled; the server calls `prepare` first, which does the
same in a thread. A compiled grammar lives as long as the request that holds it, and the last used
ones longer; the runner gets its matchers from `new_matcher`, which never compiles. llguidance is
native code that a grammar can crash: a new grammar is tried in a worker process first, and only
compiled in this process if that succeeds. llguidance is imported by the first grammar, never with
this module.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from quickstep.errors import RequestError
from quickstep.runtime.sampling.closing_search import ClosingVocabulary
from quickstep.runtime.sampling.grammar import ClosingStart
from quickstep.text.grammar.matcher import (
    GrammarVocabulary,
    Refusal,
    build_matcher,
    byte_vocabulary,
    grammar_vocabulary,
)
from quickstep.text.grammar.source import GrammarLimits, GrammarSource, grammar_source
from quickstep.text.grammar.trial import GrammarTrial, TrialLimits
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LOGGER = logging.getLogger(__name__)
_MAX_QUEUED = 64


class CompiledGrammar:
    """A matcher at the grammar's start, and the way to its end. It is cached while referenced.

    `ignored` names the keywords that are enforced less strictly than specified, for the client.
    """

    def __init__(self, matcher: LLMatcher, closing: ClosingStart, ignored: tuple[str, ...]) -> None:
        self.matcher = matcher
        self.closing = closing
        self.ignored = ignored


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
        self._last_used: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._compiled: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._trial = GrammarTrial(
            lambda: self._tokens, self._limits, trial_limits or TrialLimits()
        )
        # its thread starts with the first grammar; one, so that no client can keep all cores busy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quickstep-grammar")
        self._num_queued = 0

    @property
    def num_kept(self) -> int:
        """Compiled grammars that are kept even if no request holds them."""
        return len(self._last_used)

    @property
    def trial(self) -> GrammarTrial:
        """The process that tries new grammars."""
        return self._trial

    async def prepare(self, grammar: Grammar) -> CompiledGrammar:
        """`compile` in a thread. Raises RequestError, with status 429 if too many are queued."""
        known = self._known(grammar)
        if known is not None:
            return known
        if self._num_queued >= _MAX_QUEUED:
            raise RequestError(
                f"grammar has to wait for {self._num_queued} others; send it again later",
                param="grammar",
                status=429,
            )
        self._num_queued += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self.compile, grammar)
        finally:
            self._num_queued -= 1

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar; hold the result as long as `new_matcher` needs it.

        Raises:
            RequestError: The grammar cannot be enforced.
        """
        known = self._known(grammar)
        if known is not None:
            return known
        try:
            compiled = self._compile(grammar)
        except Refusal as refusal:
            raise RequestError(f"grammar {refusal}", param="grammar") from None
        with self._lock:
            self._compiled[grammar] = compiled
            self._keep(grammar, compiled)
        return compiled

    def new_matcher(self, grammar: Grammar) -> tuple[LLMatcher, ClosingStart]:
        """A new matcher at the grammar's start. Called in a step, so it never compiles.

        Raises:
            RequestError: The grammar is not compiled.
        """
        compiled = self._known(grammar)
        if compiled is None:
            raise RequestError("grammar is not compiled; submit to an engine", param="grammar")
        return compiled.matcher.deep_copy(), compiled.closing

    def _known(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._keep(grammar, known)
            return known

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._last_used[grammar] = compiled
        self._last_used.move_to_end(grammar)
        while len(self._last_used) > self._limits.kept:
            self._last_used.popitem(last=False)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        source, path = self._tried(grammar)
        if source.loosened:
            keywords = " and ".join(source.loosened)
            _LOGGER.warning("a schema is enforced less strictly than written: %s", keywords)
        vocabulary = self._closing_vocabulary
        matcher = build_matcher(source, self._vocabulary, self._limits)
        over_bytes = build_matcher(source, self._byte_vocabulary, self._limits)
        ending = None if path is None else vocabulary.spell(path)
        return CompiledGrammar(
            matcher, ClosingStart(over_bytes, vocabulary, ending), source.loosened
        )

    def _tried(self, grammar: Grammar) -> tuple[GrammarSource, str | None]:
        """The source that can be compiled, and its shortest text. Raises Refusal."""
        source = grammar_source(grammar, self._limits)
        try:
            return source, self._trial.check(source)
        except Refusal as refusal:
            refused, merges = refusal, "circular references" in str(refusal)
        # exclusive branches can allow nothing, or be too large to compile
        loosens = not grammar.strict and "oneOf" in grammar.text
        for one_of_as_any_of in [False] * merges + [True] * loosens:
            source = grammar_source(grammar, self._limits, one_of_as_any_of, merges)
            if one_of_as_any_of and "oneOf" not in source.loosened:
                break
            try:
                return source, self._trial.check(source)
            except Refusal as refusal:
                refused = refusal
        raise refused

    @cached_property
    def _tokens(self) -> GrammarVocabulary:
        """The vocabulary as plain data: a large one takes a moment."""
        return GrammarVocabulary.of(self._tokenizer, self._vocab_size)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return grammar_vocabulary(self._tokens, self._tokenizer)

    @cached_property
    def _byte_vocabulary(self) -> LLTokenizer:
        return byte_vocabulary(self._tokens)

    @cached_property
    def _closing_vocabulary(self) -> ClosingVocabulary:
        """The tokens that spell the endings of grammars."""
        tokens = self._tokens
        return ClosingVocabulary(tokens.tokens, tokens.special_token_ids, tokens.end_token_ids[0])


def check_grammar(
    grammar: Grammar | None, compiler: GrammarCompiler | None
) -> CompiledGrammar | None:
    """Compile a request's grammar, if it has one. Raises RequestError."""
    return None if grammar is None else _required(compiler).compile(grammar)


async def prepare_grammar(
    grammar: Grammar | None, compiler: GrammarCompiler | None
) -> CompiledGrammar | None:
    """The same in a thread. Raises RequestError."""
    return None if grammar is None else await _required(compiler).prepare(grammar)


def _required(compiler: GrammarCompiler | None) -> GrammarCompiler:
    if compiler is None:
        raise RequestError("grammar is not supported by this engine", param="grammar")
    return compiler
