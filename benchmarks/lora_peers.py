"""`python -m benchmarks.lora_peers`: many LoRA adapters at once, compared with vLLM.

Both engines serve the same checkpoint of random weights in bf16 with the same random adapters, of
rank 16 on the projections of attention, under the settings of `benchmarks.peers`, without drafts
and with a `--max-loras` that holds all of them. In a round each gets the same requests,
`--concurrency` of them at once, without adapters and with `--points` adapters, each equally often;
the one whose turn it is not is stopped. Figures are output tokens per second from sending to the
last token: medians of the rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lora import ATTENTION, choose_adapters, write_adapters
from benchmarks.machine import describe_machine
from benchmarks.peers.checkpoints import make_checkpoint, plain_tokens
from benchmarks.peers.client import fault_of, send_all
from benchmarks.peers.contestants import Contestant, Launch, launch_of
from benchmarks.peers.environments import Environment, prepare
from benchmarks.peers.servers import PeerServer, ServerFailed
from benchmarks.peers.workloads import PeerRequest, WorkloadSize

__all__ = ["launch_with_adapters", "main"]

_ENGINES = ("quickstep", "vllm")
_SHORT = PeerRequest((1,), 2)


def launch_with_adapters(
    contestant: Contestant, size: WorkloadSize, adapters: Sequence[Path], rank: int
) -> Launch:
    """An engine's server with these adapters, by the names of their directories."""
    launch = launch_of(contestant, "lora", size)
    flags = ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", str(rank)]
    flags += ["--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    if contestant.engine == "quickstep":  # which drafts by default, vLLM does not
        flags = ["--speculative-method", "off", *flags]
    return dataclasses.replace(launch, command=(*launch.command, *flags))


def tokens_per_s(server: PeerServer, requests: Sequence[PeerRequest]) -> float:
    """Output tokens per second of a round on a server that was stopped. Raises ServerFailed."""
    server.resume()
    send_all(server.port, server.api, [_SHORT])
    started_s = time.perf_counter()
    replies = send_all(server.port, server.api, requests)
    server.hold()
    for request, reply in zip(requests, replies, strict=True):
        fault = fault_of(request, reply)
        if fault is not None:
            raise ServerFailed(fault)
    last_s = max(reply.marks[-1] for reply in replies)
    return sum(request.num_outputs for request in requests) / (last_s - started_s)


def _requests(
    seed: int, token_ids: Sequence[int], lengths: tuple[int, int], models: Sequence[str]
) -> list[PeerRequest]:
    rng = random.Random(seed)
    num_inputs, num_outputs = lengths
    return [
        PeerRequest(tuple(rng.choices(token_ids, k=num_inputs)), num_outputs, model=model)
        for model in models
    ]


def _line(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.1f} ({min(figures):.1f} to {max(figures):.1f})"


def main() -> int:
    """Print a table with a line for each point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_peers")
    add = parser.add_argument
    add("--cache", type=Path, required=True, help="for environments, checkpoint and adapters")
    add("--shape", default="qwen2.5-0.5b", help="(default: %(default)s)")
    add("--rank", type=int, default=16, help="(default: %(default)s)")
    add("--points", type=int, nargs="+", default=[1, 8, 64], help="numbers of adapters")
    add("--concurrency", type=int, default=64, help="(default: %(default)s)")
    add("--input-len", type=int, default=32, help="(default: %(default)s)")
    add("--output-len", type=int, default=32, help="(default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--threads", type=int, default=2, help="(default: %(default)s)")
    args = parser.parse_args()
    base = make_checkpoint(args.shape, args.cache, seed=0)
    kept = args.cache / "adapters" / f"{args.shape}-rank{args.rank}-attention"
    paths = write_adapters(base, kept, max(args.points), args.rank, ATTENTION)
    size = WorkloadSize(args.concurrency, args.input_len + args.output_len)
    environments = {"quickstep": Environment("quickstep", args.cache)}
    environments["vllm"] = prepare("vllm", args.cache)
    servers: dict[str, PeerServer] = {}
    figures: dict[tuple[str, int], list[float]] = defaultdict(list)
    token_ids, lengths = plain_tokens(base), (args.input_len, args.output_len)
    print(describe_machine(), environments["vllm"].versions(), sep="\n")
    try:
        for engine in _ENGINES:
            contestant = Contestant(engine, "bf16", base, environments[engine], args.threads)
            launch = launch_with_adapters(contestant, size, paths, args.rank)
            log = args.cache / f"lora-{engine}.log"
            server = servers[engine] = PeerServer(engine, launch, log)
            server.start(_SHORT)
            server.hold()
        for seed in range(args.rounds + 1):
            for num_adapters in (0, *sorted(args.points)):
                models = ["model"] * args.concurrency
                if num_adapters:
                    chosen = choose_adapters(num_adapters, args.concurrency, "uniform", seed)
                    models = [paths[adapter].name for adapter in chosen]
                requests = _requests(1000 * seed + num_adapters, token_ids, lengths, models)
                for engine in random.Random(f"{seed} {num_adapters}").sample(_ENGINES, 2):
                    found = tokens_per_s(servers[engine], requests)
                    if seed:  # the first round loads adapters and is not counted
                        figures[engine, num_adapters].append(found)
    finally:
        for server in servers.values():
            server.close()
    print(
        "| adapters | Quickstep, tokens/s | vLLM, tokens/s | ratio |", "|---|---|---|---|", sep="\n"
    )
    for num_adapters in (0, *sorted(args.points)):
        ours, theirs = (figures[engine, num_adapters] for engine in _ENGINES)
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(f"| {num_adapters} | {_line(ours)} | {_line(theirs)} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
