"""`quickstep bench serve`: Poisson arrivals over HTTP, for `quickstep serve` or another server."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import add_model, model_of
from quickstep.cli.flags.parsing import Parser, command, positive_int, token_count
from quickstep.cli.flags.server_url import add_server_url, get, key_of
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.bench.serve import ServedRequest, Target

_TEXT = """\
Measure a server with streaming requests: Poisson arrivals, lognormal lengths, every tenth prompt
long.

Starts `quickstep serve MODEL` on a free port. With --url, measures a running server instead: any
that has OpenAI's /v1/completions with token-id prompts and `ignore_eos` (vLLM, llama-server).

ttft      time from a request's scheduled arrival to its first token
tpot      (last token - first token) / (output tokens - 1), per request
itl       times between tokens, of all requests together
e2e       time from a request's scheduled arrival to its last token
goodput   requests with ttft up to --ttft-slo-ms and no itl above --itl-slo-ms

Prints the median, minimum and maximum over the repeats."""


def add_serve(kinds: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        kinds, "serve", "Measure a server over HTTP: Poisson arrivals, streaming.", _run
    )
    parser.description = _TEXT
    add_model(parser)
    add_server_url(
        parser,
        url=None,
        what="a running server, such as http://127.0.0.1:8000 (default: start one)",
        key="a key of the server of --url",
    )
    parser.add_argument(
        "--server-flags",
        default="",
        metavar="'FLAGS'",
        help="flags for `quickstep serve`, such as '--quantization int8'",
    )
    parser.add_argument(
        "--request-rate",
        type=_positive,
        default=1.0,
        metavar="R",
        help="requests per second (default: %(default)s)",
    )
    parser.add_argument(
        "--num-prompts",
        type=positive_int,
        default=64,
        metavar="N",
        help="number of requests (default: %(default)s)",
    )
    parser.add_argument(
        "--long-prompt",
        type=token_count,
        default=2000,
        metavar="TOKENS",
        help="prompt length of every tenth request (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive_int,
        default=4096,
        metavar="N",
        help="prompts have token ids below N (default: %(default)s)",
    )
    for name, what in (("ttft", "first token"), ("itl", "largest gap between tokens")):
        parser.add_argument(
            f"--{name}-slo-ms", type=_positive, metavar="MS", help=f"limit on the {what}"
        )
    parser.add_argument(
        "--repeats", type=positive_int, default=1, metavar="N", help="rounds (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths, arrivals and prompts")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _run(args: argparse.Namespace) -> int:
    from quickstep.bench.serve import Objectives, send_all, serve_figures
    from quickstep.cli.screen import counting_bar

    if args.url and args.server_flags:
        raise ConfigError("--server-flags are for a server that is started here; leave out --url")
    objectives = Objectives(args.ttft_slo_ms, args.itl_slo_ms)
    rounds: list[dict[str, float]] = []
    with _target(args) as target:
        longest = target.max_model_len
        warm, *rest = [_requests(args, longest, place) for place in range(args.repeats + 1)]
        with counting_bar() as show:
            try:
                send_all(target, warm[:1])
                for place, requests in enumerate(rest, 1):
                    what = f"requests of repeat {place}"
                    answered = None if show is None else partial(show, what)
                    results = send_all(target, requests, answered)
                    rounds.append(serve_figures(results, objectives))
            except KeyboardInterrupt:
                if not rounds:
                    raise
    figures = {name: [figures_of_round[name] for figures_of_round in rounds] for name in rounds[0]}
    from quickstep.cli.bench_report import print_figures

    settings = _settings(args, target)
    return print_figures(figures, settings, args.json, num_repeats=args.repeats)


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[Target]:
    from quickstep.bench.serve import find_target
    from quickstep.bench.server_process import ServerProcess

    named = args.model or args.model_flag
    if args.url:
        get(args, "/v1/models")  # reports a missing key
        yield find_target(args.url.rstrip("/").removesuffix("/v1"), named, key_of(args) or None)
        return
    server = ServerProcess([model_of(args), *shlex.split(args.server_flags)])
    server.start()
    try:
        yield find_target(server.url)
    finally:
        server.stop()


def _requests(
    args: argparse.Namespace, max_model_len: int | None, place: int
) -> list[ServedRequest]:
    """The requests of a round: lengths and times are the same in every round, prompts are not.

    Lengths that the model does not support are cut.
    """
    import random

    from quickstep.bench.lengths import random_arrivals
    from quickstep.bench.serve import ServedRequest

    arrivals = random_arrivals(
        random.Random(args.seed), args.num_prompts, args.request_rate, args.long_prompt
    )
    rng = random.Random(f"prompts {args.seed} {place}")
    requests = []
    for arrival in arrivals:
        num_inputs, num_outputs = arrival.lengths.num_inputs, arrival.lengths.num_outputs
        if max_model_len is not None:
            num_outputs = min(num_outputs, max_model_len // 2)
            num_inputs = min(num_inputs, max_model_len - num_outputs)
        prompt = tuple(rng.randrange(args.vocab_size) for _ in range(num_inputs))
        requests.append(ServedRequest(prompt, num_outputs, arrival.at_s))
    return requests


def _settings(args: argparse.Namespace, target: Target) -> dict[str, object]:
    return {
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
