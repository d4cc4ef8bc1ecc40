"""`quickstep bench serve`: Poisson arrivals over HTTP, at `quickstep serve` or any such server."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import add_model, model_of
from quickstep.cli.flags.parsing import Parser, command, positive_int, token_count
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.bench.serve import ServedRequest, Target

__all__ = ["add_serve"]

_TEXT = """\
Measure a server under Poisson arrivals: lognormal lengths, every tenth prompt long, streaming.

Starts `quickstep serve MODEL` on a free port, or takes --url of any server with OpenAI's
/v1/completions that reads prompts of token ids and `ignore_eos` (vLLM, llama-server).

ttft      from the time a request is due to its first token
tpot      (last token - first) / (output tokens - 1), of each request
itl       gaps between tokens, of all requests together
e2e       from the time a request is due to its last token
goodput   requests with ttft within --ttft-slo-ms and no gap above --itl-slo-ms

Figures are medians over the repeats, with the least and the greatest."""


def add_serve(kinds: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(kinds, "serve", "A server over HTTP: Poisson arrivals, streaming.", _run)
    parser.description = _TEXT
    add_model(parser)
    parser.add_argument("--url", help="of a server that runs: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="that the server at --url asks for")
    parser.add_argument(
        "--server-flags",
        default="",
        metavar="'FLAGS'",
        help="for `quickstep serve`, such as '--quantization int8'",
    )
    parser.add_argument(
        "--request-rate",
        type=_positive,
        default=1.0,
        metavar="R",
        help="requests per second (default: %(default)s)",
    )
    parser.add_argument(
        "--num-prompts", type=positive_int, default=64, metavar="N", help="requests (default: 64)"
    )
    parser.add_argument(
        "--long-prompt",
        type=token_count,
        default=2000,
        metavar="TOKENS",
        help="of every tenth request (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive_int,
        default=4096,
        metavar="N",
        help="token ids of prompts are below (default: %(default)s)",
    )
    for name, what in (("ttft", "first token"), ("itl", "largest gap between tokens")):
        parser.add_argument(
            f"--{name}-slo-ms", type=_positive, metavar="MS", help=f"limit on the {what}"
        )
    parser.add_argument("--repeats", type=positive_int, default=1, metavar="N", help="rounds")
    parser.add_argument("--seed", type=int, default=0, help="draws lengths, arrivals, prompts")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _run(args: argparse.Namespace) -> int:
    from quickstep.bench.serve import Objectives, send_all, serve_figures

    if args.url and args.server_flags:
        raise ConfigError("--server-flags are for a server that is started here; leave out --url")
    objectives = Objectives(args.ttft_slo_ms, args.itl_slo_ms)
    rounds = []
    with _target(args) as target:
        longest = target.max_model_len
        warm, *rest = [_requests(args, longest, place) for place in range(args.repeats + 1)]
        send_all(target, warm[:1])
        rounds = [serve_figures(send_all(target, requests), objectives) for requests in rest]
    figures = {name: [one[name] for one in rounds] for name in rounds[0]}
    _print(args, target, figures)
    return 0


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[Target]:
    from quickstep.bench.serve import find_target
    from quickstep.bench.served import ServedChild

    named = args.model or args.model_flag
    if args.url:
        yield find_target(args.url, named, args.api_key)
        return
    child = ServedChild([model_of(args), *shlex.split(args.server_flags)])
    child.start()
    try:
        yield find_target(child.url)
    finally:
        child.stop()


def _requests(
    args: argparse.Namespace, max_model_len: int | None, place: int
) -> list[ServedRequest]:
    """The same lengths and times in every round, and prompts of its own; what the model cannot
    hold is cut.
    """
    import random

    from quickstep.bench.lengths import random_arrivals
    from quickstep.bench.serve import ServedRequest

    arrivals = random_arrivals(
        random.Random(args.seed), args.num_prompts, args.request_rate, args.long_prompt
    )
    rng = random.Random(f"prompts {args.seed} {place}")
    requests = []
    for one in arrivals:
        num_inputs, num_outputs = one.lengths.num_inputs, one.lengths.num_outputs
        if max_model_len is not None:
            num_outputs = min(num_outputs, max_model_len // 2)
            num_inputs = min(num_inputs, max_model_len - num_outputs)
        prompt = tuple(rng.randrange(args.vocab_size) for _ in range(num_inputs))
        requests.append(ServedRequest(prompt, num_outputs, one.at_s))
    return requests


def _print(args: argparse.Namespace, target: Target, figures: dict[str, list[float]]) -> None:
    from quickstep.cli.bench_report import machine_facts
    from quickstep.cli.screen import console_on, print_table

    asked = {
        "url": target.url if args.url else "started here",
        "model": target.model,
        "server_flags": args.server_flags,
        "request_rate": args.request_rate,
        "num_requests": args.num_prompts,
        "long_prompt": args.long_prompt,
        "ttft_slo_ms": args.ttft_slo_ms,
        "itl_slo_ms": args.itl_slo_ms,
        "repeats": args.repeats,
        "seed": args.seed,
    }
    medians = {name: statistics.median(values) for name, values in figures.items()}
    if args.json:
        spread = {name: [min(values), max(values)] for name, values in figures.items()}
        whole = {**medians, "spread": spread, **asked, "machine": machine_facts()}
        print(json.dumps(whole, indent=2))
        return
    console = console_on(sys.stdout)
    for name, value in {**machine_facts(), **asked}.items():
        console.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    console.print()
    rows = [
        (name, *(f"{value:.4g}" for value in (medians[name], min(values), max(values))))
        for name, values in figures.items()
    ]
    print_table(console, "", ("figure", "median", "min", "max"), rows)
