"""Flags of other engines: accepted where they ask for what holds, else refused with a sentence."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib import import_module

import pytest

from quickstep.cli.flags.foreign import FOREIGN_FLAGS, ForeignFlag
from quickstep.cli.flags.parsing import Parser
from quickstep.cli.main import main

ENGINE_COMMANDS = ("serve", "generate", "chat", "batch", "verify", "bench", "calibrate", "demo")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
ROWS = [pytest.param(flag, id=flag.names[0]) for flag in FOREIGN_FLAGS]
# the others have no value, and are accepted
REFUSED = [
    pytest.param(flag, id=flag.names[0])
    for flag in FOREIGN_FLAGS
    if flag.takes or "" not in flag.accepted
]


@cache
def parser_of(command: str) -> Parser:
    parser = Parser(prog="quickstep")
    subparsers = parser.add_subparsers()
    import_module(f"quickstep.cli.{command}").add_parser(subparsers)
    return subparsers.choices[command]


SERVE = parser_of("serve")
OWN_FLAGS = frozenset(SERVE._option_string_actions)
ALL_FLAGS = frozenset(
    flag for command in ENGINE_COMMANDS for flag in parser_of(command)._option_string_actions
)


def spelled(name: str, value: str | None) -> list[str]:
    return [name] if value is None else [name, value]


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a wrong command line prints: one line on stderr, and exit code 2."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_every_spelling_is_in_one_row_and_no_row_is_for_a_flag_of_ours() -> None:
    counts = Counter(name for flag in FOREIGN_FLAGS for name in flag.names)
    assert [name for name, count in counts.items() if count > 1] == []
    assert sorted(counts.keys() & OWN_FLAGS) == []


def test_the_most_used_flags_of_vllm_and_llama_cpp_are_answered() -> None:
    for engine in ("vLLM", "llama.cpp"):
        names = [name for flag in FOREIGN_FLAGS if engine in flag.engines for name in flag.names]
        assert len([name for name in names if name.startswith("--")]) >= 60


@pytest.mark.parametrize("flag", ROWS)
def test_a_row_names_flags_that_exist(flag: ForeignFlag) -> None:
    named = FLAG.findall(" ".join((flag.ours, flag.why, flag.otherwise)))
    assert [name for name in named if name not in ALL_FLAGS] == []
    assert flag.ours or flag.why or flag.accepted
    if flag.ours:
        assert flag.ours.partition(" ")[0] in OWN_FLAGS or flag.otherwise
    for arguments in flag.becomes.values():
        SERVE.parse_args(arguments)


@pytest.mark.parametrize("flag", ROWS)
def test_an_accepted_value_changes_nothing_and_a_replaced_one_is_ours(flag: ForeignFlag) -> None:
    plain = vars(SERVE.parse_args(["m"]))
    for name in flag.names:
        for value in flag.accepted:
            arguments = spelled(name, value or None)
            assert vars(SERVE.parse_args([*arguments, "m"])) == plain
            assert vars(SERVE.parse_args(["m", *arguments])) == plain
            if value:
                assert vars(SERVE.parse_args([f"{name}={value}", "m"])) == plain
        for value, ours in flag.becomes.items():
            assert vars(SERVE.parse_args(["m", name, value])) == vars(
                SERVE.parse_args(["m", *ours])
            )


@pytest.mark.parametrize("flag", REFUSED)
def test_any_other_value_is_refused_in_one_sentence(
    flag: ForeignFlag, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "7" if flag.takes and not flag.takes.startswith("[") else None
    if value is None and "" in flag.accepted:
        value = flag.takes.strip("[]").split("|")[1]
    for name in flag.names:
        for command in ("serve", "chat"):
            if name in parser_of(command)._option_string_actions:
                continue
            line = answer(capsys, command, *spelled(name, value), "m")
            assert line.startswith(f"quickstep {command}: {' '.join(spelled(name, value))} is a ")
            assert "{" not in line
            assert len(line) < 240


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("serve --ctx-size 100", "--ctx-size 100 is a flag of llama.cpp; give --max-model-len 100"),
        ("serve m -c 100", "-c 100 is a flag of llama.cpp; give --max-model-len 100"),
        ("serve --ctx-size", "give --max-model-len N"),
        ("serve --decode-context-parallel-size 2", "divides a model, on CPUs"),
        ("serve --decode_context_parallel_size=2", "--decode_context_parallel_size 2 is a flag"),
        ("serve --gpu-memory-utilization 0.9", "give --memory-bytes SIZE"),
        ("serve --gpu-layers 3", "all layers are on one device"),
        ("serve --trust-remote-code", "is never run"),
        ("chat --temp 0.5", "give --temperature 0.5"),
        ("serve --temp 0.5", "requests set it"),
        ("batch --ssl-key-file k", "`quickstep serve` has --ssl-keyfile"),
        ("chat --foo", "there is no flag --foo; see quickstep chat --help"),
    ],
)
def test_what_a_newcomer_types(argv: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in answer(capsys, *argv.split())


def test_after_two_dashes_nothing_is_a_flag() -> None:
    assert parser_of("generate").parse_args(["m", "--", "--jinja"]).prompt == "--jinja"


@pytest.mark.parametrize("flag", sorted(flag for flag in OWN_FLAGS if len(flag) > 8))
def test_a_typo_in_a_flag_of_ours_suggests_it(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = flag[:4] + flag[5] + flag[4] + flag[6:]
    if swapped in OWN_FLAGS or flag[4] == flag[5]:
        swapped = flag[:4] + flag[5:]
    near = answer(capsys, "serve", swapped).rpartition("did you mean ")[2]
    assert near == f"{flag}?"


@pytest.mark.parametrize(
    "name",
    [
        *("--gpu-memory-usage", "--tensor-cores", "--auto-tools", "--context", "--layers"),
        *("--remote-code", "--template", "--size", "-x", "--xy", "--max-tokens", "--key"),
    ],
)
def test_a_flag_that_is_near_to_none_gets_no_suggestion(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = answer(capsys, "serve", name)
    assert line == f"quickstep serve: there is no flag {name}; see quickstep serve --help"
