"""The process that tries out grammars: whatever dies of a grammar, it is not the engine."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from pathlib import Path

import pytest
from malicious_grammars import NASTY, chain
from tiny_checkpoint import write_checkpoint

from quickstep.errors import EngineError, RequestError
from quickstep.text.grammar.grammars import CompiledGrammar, GrammarCompiler
from quickstep.text.grammar.matcher import Refusal
from quickstep.text.grammar.source import GrammarLimits, GrammarSource, grammar_source
from quickstep.text.grammar.trial import TrialLimits
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Grammar

HUGE = 10**9
# nothing is refused by counting: the trial alone stands between a grammar and this process
LOOSE = GrammarLimits(
    text_bytes=HUGE,
    regex_bytes=HUGE,
    depth=HUGE,
    reference_levels=HUGE,
    lines=HUGE,
    groups=HUGE,
    choices=HUGE,
    compile_fuel=HUGE,
    step_fuel=HUGE,
    lexer_states=HUGE,
    symbols=HUGE,
)
FINE = GrammarSource("regex", "[ab]+")
TOO_DEEP = GrammarSource("json_schema", json.dumps(chain(20_000, lambda ref: {"items": ref})))
RULES = "\n".join(f"a{i}: a{i + 1}" for i in range(30_000))
TOO_MANY_RULES = GrammarSource("lark", f'start: a0\n{RULES}\na30000: "x"')
HEAVY = GrammarSource(
    "json_schema",
    json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 264)


@pytest.mark.parametrize("name", NASTY)
def test_a_malicious_grammar_compiles_or_is_refused_in_words(
    compiler: GrammarCompiler, name: str
) -> None:
    try:
        compiler.compile(NASTY[name])
    except RequestError as error:
        assert error.param == "grammar"
        assert str(error).startswith("grammar ")
        assert "\n" not in str(error)
    compiler.compile(Grammar.of_regex("[ab]+"))
    assert compiler.trial.num_started == 1  # the limits of llguidance and the counting held


@pytest.mark.parametrize("source", [TOO_DEEP, TOO_MANY_RULES])
def test_a_grammar_that_kills_its_worker_is_refused_and_the_next_one_compiles(
    tokenizer: Tokenizer, source: GrammarSource
) -> None:
    trial = GrammarCompiler(tokenizer, 264, LOOSE).trial
    for _ in range(3):  # the verdict is kept: one worker dies, not three
        with pytest.raises(Refusal, match="exhausts the compiler"):
            trial.check(source)
    trial.check(FINE)
    assert trial.num_started == 2


def test_a_grammar_that_takes_too_long_is_refused(tokenizer: Tokenizer) -> None:
    trial = GrammarCompiler(tokenizer, 264, LOOSE, TrialLimits(cpu_s=0.02)).trial
    with pytest.raises(Refusal, match=r"takes more than 0.02 s to compile"):
        trial.check(HEAVY)
    trial.check(FINE)
    assert trial.num_started == 2


def test_a_grammar_that_takes_too_much_memory_is_refused(tokenizer: Tokenizer) -> None:
    limits = TrialLimits(memory_bytes=8 * 2**20, cpu_s=60)
    trial = GrammarCompiler(tokenizer, 264, LOOSE, limits).trial
    with pytest.raises(Refusal, match="too much memory"):
        trial.check(GrammarSource("lark", 'start: "' + "a" * 50_000_000 + '"'))
    trial.check(FINE)


@pytest.mark.parametrize("length", [1, 1_000_000], ids=["reads little", "does not read"])
def test_a_worker_that_hangs_is_killed(tokenizer: Tokenizer, length: int) -> None:
    trial = GrammarCompiler(tokenizer, 264, LOOSE, TrialLimits(wall_s=0.2)).trial
    trial.check(FINE)
    assert trial.process_id is not None
    os.kill(trial.process_id, signal.SIGSTOP)
    os.waitpid(trial.process_id, os.WUNTRACED)  # until it has stopped: a busy machine takes a while
    stopped = GrammarSource("regex", "c" * length)
    with pytest.raises(EngineError, match=r"not compiled within 0.2 s.*send the request again"):
        trial.check(stopped)
    if length == 1:
        trial.check(stopped)  # it was no verdict
    trial.check(GrammarSource("regex", "d"))


def test_a_worker_that_died_between_two_grammars_fails_none(tokenizer: Tokenizer) -> None:
    trial = GrammarCompiler(tokenizer, 264, LOOSE).trial
    for number in (signal.SIGKILL, signal.SIGSEGV):
        trial.check(GrammarSource("regex", f"a{number}"))
        assert trial.process_id is not None
        os.kill(trial.process_id, number)
        os.waitid(os.P_PID, trial.process_id, os.WEXITED | os.WNOWAIT)
    trial.check(GrammarSource("regex", "b"))
    assert trial.num_started == 3


def test_verdicts_that_are_kept_are_bounded(tokenizer: Tokenizer) -> None:
    trial = GrammarCompiler(tokenizer, 264, LOOSE, TrialLimits(kept=1)).trial
    for source in (TOO_DEEP, FINE, TOO_DEEP):
        if source is FINE:
            trial.check(source)
        else:
            with pytest.raises(Refusal):
                trial.check(source)
    assert (trial.num_started, trial.process_id) == (2, None)  # the second one died as well


def test_what_the_trial_refuses_is_a_request_error_of_the_field(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 264, LOOSE)
    grammar = Grammar.of_json_schema(TOO_DEEP.text)
    assert grammar_source(grammar, LOOSE).form == "json_schema"
    with pytest.raises(RequestError, match=r"^grammar exhausts the compiler") as caught:
        compiler.compile(grammar)
    assert (caught.value.param, caught.value.status) == ("grammar", 400)


def test_the_worker_ends_with_its_owner(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 264)
    compiler.compile(Grammar.of_regex("a"))
    process_id = compiler.trial.process_id
    assert process_id is not None
    del compiler
    gc.collect()
    assert not Path(f"/proc/{process_id}").exists()


def test_too_many_that_wait_are_429(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 264)

    async def run() -> list[CompiledGrammar | BaseException]:
        grammars = [Grammar.of_regex(f"a{number}") for number in range(80)]
        prepared = (compiler.prepare(grammar) for grammar in grammars)
        return await asyncio.gather(*prepared, return_exceptions=True)

    errors = [error for error in asyncio.run(run()) if isinstance(error, BaseException)]
    assert len(errors) == 80 - 64
    assert {error.status for error in errors if isinstance(error, RequestError)} == {429}


def test_steps_of_the_engine_come_before_trials(compiler: GrammarCompiler) -> None:
    compiler.trial.check(FINE)
    process_id = compiler.trial.process_id
    assert process_id is not None
    assert os.getpriority(os.PRIO_PROCESS, process_id) > os.getpriority(os.PRIO_PROCESS, 0)
