"""JSON schemas of a collection: how many are supported, whether outputs are valid, what they cost.

    python -m benchmarks.bench_schemas DIRECTORY ... [--sample 100] [--vocab 131072]

Every `.json` file below a directory is a schema, or an object with a `schema` and its `tests`
(`[{"data": ..., "valid": true}]`, as in MaskBench, https://github.com/guidance-ai/jsonschemabench);
each directory is one collection, from which `--sample` schemas are chosen at random. A schema is
compiled as in a request, and outputs are sampled from random logits, so that rare branches of a
schema are reached. Each instance of `tests` is followed through the grammar: valid ones should be
accepted, others refused. Needs `jsonschema`, which checks the outputs (keywords, not formats).

Files that no server could enforce are left out and counted: those that are no schema of their
draft, those that refer to other documents, and those that refer to places where they have no
schema, which JSON Schema leaves undefined.

Times are CPU time of the thread. `compile` is a complete compilation in this process, without its
trial. `token` is the cost per token and sequence in addition to sampling: mask, distance to the
end, recording. `--vocab` adds joined tokens to the demo model's 4,096, since the cost of a mask
grows with the vocabulary.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

import quickstep
from benchmarks.machine import describe_machine
from quickstep.errors import RequestError
from quickstep.runtime.sampling.grammar import grammar_start
from quickstep.text.grammar.grammars import CompiledGrammar, GrammarCompiler
from quickstep.text.grammar.json_schema import with_known_draft
from quickstep.text.grammar.trial import TrialLimits
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Admission, Grammar, SamplingParams

_DEMO = Path(quickstep.__file__).parent / "bundled" / "demo"
_DEMO_VOCAB = 4096
_LONGEST_JOINED = 24


class WideTokenizer:
    """The demo model's tokens, and further ones that join two of them."""

    def __init__(self, inner: Tokenizer, vocab_size: int) -> None:
        self._inner = inner
        self.eos_token_ids = inner.eos_token_ids
        self._tokens = [inner.token_bytes(i) for i in range(_DEMO_VOCAB)]
        texts = [text for text in self._tokens if len(text) > 1 and text.isascii()]
        known, rng = set(self._tokens), random.Random(0)
        while len(self._tokens) < vocab_size:
            text = rng.choice(texts) + rng.choice(texts).lstrip()
            if text not in known and len(text) <= _LONGEST_JOINED:
                known.add(text)
                self._tokens.append(text)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, not text."""
        return token_id < _DEMO_VOCAB and self._inner.is_special(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self._tokens[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode with the demo model's tokenizer."""
        return self._inner.encode(text, add_special_tokens)


@dataclass(slots=True)
class Outcome:
    """The results of one collection, or of all."""

    num_schemas: int = 0
    num_supported: int = 0
    num_reported: int = 0
    num_outputs: int = 0
    num_complete: int = 0
    failures: collections.Counter[str] = field(default_factory=collections.Counter)
    num_valid: int = 0
    num_valid_accepted: int = 0
    num_wrong: int = 0
    num_wrong_refused: int = 0
    refused_valid: list[str] = field(default_factory=list)
    accepted_wrong: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    invalid_reported: list[str] = field(default_factory=list)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    compile_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def add(self, other: Outcome) -> None:
        """Add the results of another collection."""
        self.num_schemas += other.num_schemas
        self.num_supported += other.num_supported
        self.num_reported += other.num_reported
        self.num_outputs += other.num_outputs
        self.num_complete += other.num_complete
        self.failures += other.failures
        self.num_valid += other.num_valid
        self.num_valid_accepted += other.num_valid_accepted
        self.num_wrong += other.num_wrong
        self.num_wrong_refused += other.num_wrong_refused
        self.refused_valid += other.refused_valid
        self.accepted_wrong += other.accepted_wrong
        self.invalid += other.invalid
        self.invalid_reported += other.invalid_reported
        self.refusals += other.refusals
        self.left_out += other.left_out
        self.compile_s += other.compile_s
        self.token_s += other.token_s
        self.slowest = max(self.slowest, other.slowest)


class Measurement:
    """Runs schemas through the compiler and the constraint, one at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._vocab = options.vocab
        self._tokenizer: Any = WideTokenizer(Tokenizer.open(_DEMO), self._vocab)
        waits = TrialLimits(wall_s=600.0)  # of processor time there are 2 s, as in a server
        self._compiler = GrammarCompiler(self._tokenizer, self._vocab, trial_limits=waits)
        self._compiler.compile(Grammar.of_json_object())  # the first compilation loads libraries

    def collection(self, files: Sequence[Path]) -> Outcome:
        """Measure these schemas."""
        outcome = Outcome()
        for file in files:
            self._schema(file, outcome)
        return outcome

    def _schema(self, file: Path, outcome: Outcome) -> None:
        text, tests = _schema_and_tests(file)
        grammar = Grammar.of_json_schema(text)
        schema = json.loads(text)
        why_not = "no schema of its draft"
        if isinstance(schema, dict):
            why_not = _why_unusable(with_known_draft(schema))
        if why_not:
            outcome.left_out[why_not] += 1
            return
        outcome.num_schemas += 1
        started = time.thread_time()
        try:
            compiled = self._compiler.compile(grammar)
        except RequestError as error:
            outcome.refusals[re.sub(r"\S*[/#]\S*|\d{3,}", "...", str(error))[:100]] += 1
            return
        outcome.compile_s.append(time.thread_time() - started)
        outcome.num_supported += 1
        outcome.num_reported += bool(compiled.ignored)
        for seed in range(self._options.outputs):
            self._check_output(file, compiled, grammar, seed, outcome)
        for test in tests:
            self._check_instance(file, grammar, test, outcome)

    def _check_instance(
        self, file: Path, grammar: Grammar, test: Mapping[str, Any], outcome: Outcome
    ) -> None:
        text = json.dumps(test["data"], ensure_ascii=False)
        refused_at = self._refused_at(grammar, text)
        if test["valid"]:
            outcome.num_valid += 1
            outcome.num_valid_accepted += refused_at is None
            if refused_at is not None:
                outcome.refused_valid.append(f"{file}: at {text[max(0, refused_at - 60) :][:90]!r}")
        else:
            outcome.num_wrong += 1
            outcome.num_wrong_refused += refused_at is not None
            if refused_at is None:
                outcome.accepted_wrong.append(f"{file}: {test.get('python_error', '')[:80]!r}")

    def _refused_at(self, grammar: Grammar, text: str) -> int | None:
        """The place of the first character that the grammar refuses; None if it accepts all."""
        matcher, _closing = self._compiler.new_matcher(grammar)
        place = 0
        for token_id in self._tokenizer.encode(text, False):
            if not matcher.try_consume_tokens([token_id]):
                return place
            place += len(self._tokenizer.token_bytes(token_id).decode(errors="replace"))
        return None if matcher.is_accepting() else place

    def _check_output(
        self,
        file: Path,
        compiled: CompiledGrammar,
        grammar: Grammar,
        seed: int,
        outcome: Outcome,
    ) -> None:
        tokens, has_ended = self._sample_output(file, grammar, seed, outcome)
        outcome.num_outputs += 1
        text = b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")
        try:
            value = json.loads(text)
        except ValueError:
            if has_ended:
                outcome.invalid.append(f"{file}: {text[:200]}")
            return
        outcome.num_complete += 1
        problem = _problem(with_known_draft(json.loads(grammar.text)), value)
        if problem:
            invalid = outcome.invalid_reported if compiled.ignored else outcome.invalid
            invalid.append(f"{file}: {problem}: {text[:200]}")

    def _sample_output(
        self, file: Path, grammar: Grammar, seed: int, outcome: Outcome
    ) -> tuple[list[int], bool]:
        limit = self._options.max_tokens
        ends = self._tokenizer.eos_token_ids
        sampling = SamplingParams(grammar=grammar, max_tokens=limit)
        admission = Admission(0, "bench#0", (1,), 1, sampling, seed, ends)
        start = grammar_start(admission, self._vocab, self._compiler.new_matcher)
        assert start is not None, "the request has a grammar"
        constraint = start.constraint(limit)
        rng = np.random.default_rng(seed)
        tokens: list[int] = []
        for _ in range(limit):
            started = time.thread_time()
            bits = constraint.allowed_bits()
            masked = time.thread_time()
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            if constraint.failure:  # the request would end with this error
                outcome.failures[constraint.failure[:100]] += 1
                return tokens, False
            if not allowed.size:
                return tokens, True
            sampled = int(rng.choice(allowed))
            resumed = time.thread_time()
            token_id = constraint.forced_token(sampled)
            constraint.record(token_id)
            spent = time.thread_time() - resumed + masked - started
            outcome.token_s.append(spent)
            outcome.slowest = max(outcome.slowest, (spent, f"{file.name} token {len(tokens)}"))
            if token_id in ends:
                return tokens, True
            tokens.append(token_id)
        return tokens, False


def _schema_and_tests(file: Path) -> tuple[str, Sequence[Mapping[str, Any]]]:
    text = file.read_text(encoding="utf-8")
    value = json.loads(text)
    if isinstance(value, dict) and isinstance(value.get("tests"), list) and "schema" in value:
        return json.dumps(value["schema"]), value["tests"]
    return text, ()


def _why_unusable(schema: Any) -> str:
    """Why a file cannot be enforced by any server; empty if it could be."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft7Validator, validator_for

    try:
        validator_for(schema, default=Draft7Validator).check_schema(schema)
    except SchemaError:
        return "no schema of its draft"
    own = {str(value.get(name)).partition("#")[0] for value in _objects(schema) for name in _IDS}
    for value in _objects(schema):
        base = str(value.get("$ref", "")).partition("#")[0]
        if isinstance(value.get("$ref"), str) and base and base not in own:
            return "refers to other documents"
    if not all(_has_schema(resource, reference) for resource, reference in _pointers(schema)):
        return "refers to a place without a schema"
    return ""


def _pointers(schema: Any) -> Iterator[tuple[Any, str]]:
    """Every `$ref` to a place, and the schema with a name around it, from which it counts."""
    is_old = re.search(r"draft-0[34]", str(schema.get("$schema"))) is not None
    keyword = "id" if is_old else "$id"
    pending = [(schema, schema)]
    while pending:
        value, resource = pending.pop()
        if isinstance(value, dict):
            name = value.get(keyword)
            if isinstance(name, str) and not name.startswith("#"):
                resource = value
            reference = value.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/"):
                yield resource, reference
            pending += [(inner, resource) for inner in value.values()]
        elif isinstance(value, list):
            pending += [(inner, resource) for inner in value]


def _has_schema(schema: Any, reference: str) -> bool:
    """Whether a pointer leads to a schema."""
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and key in schema:
            schema = schema[key]
        elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return False
    return isinstance(schema, dict | bool)


_IDS = ("$id", "id")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _problem(schema: Any, value: Any) -> str:
    """Why the value does not conform to the schema; empty if it does."""
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import Draft202012Validator, validator_for

    try:
        validator_for(schema, default=Draft202012Validator)(schema).validate(value)
    except ValidationError as error:
        return f"{error.validator} at /{'/'.join(map(str, error.absolute_path))}"
    return ""


def _files(directory: Path, sample: int, seed: int) -> list[Path]:
    files = sorted(directory.rglob("*.json"))
    random.Random(seed).shuffle(files)
    return files[:sample]


def _lines(name: str, outcome: Outcome) -> Iterator[str]:
    yield (
        f"{name:16} {outcome.num_supported:5}/{outcome.num_schemas:<5} supported "
        f"({outcome.num_reported} enforced less strictly)  {outcome.num_outputs} outputs, "
        f"{outcome.num_complete} complete, {outcome.failures.total()} ended by an error, "
        f"{len(outcome.invalid)} invalid, "
        f"{len(outcome.invalid_reported)} more under a reported keyword"
    )
    if outcome.num_valid or outcome.num_wrong:
        yield (
            f"{'':16} {outcome.num_valid_accepted}/{outcome.num_valid} valid instances accepted, "
            f"{outcome.num_wrong_refused}/{outcome.num_wrong} others refused"
        )
    if outcome.token_s:
        tokens, compiles = np.array(outcome.token_s) * 1e3, np.array(outcome.compile_s) * 1e3
        parts = [f"p{at} {np.percentile(tokens, at):.3f}" for at in (50, 90, 99)]
        yield f"{'':16} token ms {', '.join(parts)}, at most {tokens.max():.2f}" + (
            f"; compile ms p50 {np.percentile(compiles, 50):.1f}, "
            f"p99 {np.percentile(compiles, 99):.1f}"
        )


def main() -> int:
    """Measure and print. Returns 1 if an output is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--sample", type=int, default=100, help="schemas per directory")
    parser.add_argument("--outputs", type=int, default=2, help="outputs per schema")
    parser.add_argument(
        "--max-tokens", type=int, default=200, help="largest number of tokens of an output"
    )
    parser.add_argument(
        "--vocab", type=int, default=_DEMO_VOCAB, help="size of the vocabulary, 4096 or more"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of schemas")
    parser.add_argument("--show", type=int, default=10, help="instances judged wrongly to print")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    measurement, total = Measurement(options), Outcome()
    for directory in options.directories:
        outcome = measurement.collection(_files(directory, options.sample, options.seed))
        total.add(outcome)
        for line in _lines(directory.name, outcome):
            print(line, flush=True)
    for line in _lines("all", total):
        print(line)
    print(f"slowest token: {total.slowest[0] * 1e3:.2f} ms, {total.slowest[1]}")
    for reason, count in total.left_out.most_common():
        print(f"{count:5} left out: {reason}")
    for reason, count in total.refusals.most_common():
        print(f"{count:5} {reason}")
    for reason, count in total.failures.most_common():
        print(f"{count:5} ended: {reason}")
    for text in total.invalid:
        print(f"INVALID {text}")
    for text in total.refused_valid[: options.show]:
        print(f"refused but valid {text}")
    for text in total.accepted_wrong[: options.show]:
        print(f"accepted but wrong {text}")
    for text in total.invalid_reported[:10]:
        print(f"reported {text}")
    return 1 if total.invalid else 0


if __name__ == "__main__":
    sys.exit(main())
