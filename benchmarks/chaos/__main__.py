"""`python -m benchmarks.chaos [--minutes 30] [--seed N]`: faults under load, counted.

Clients of several keys send requests of every kind, each with a deadline, to one server after the
other (`sites.SITES`): two replicas of the demo model, its engines on two other hosts, three models
with room for two. Meanwhile faults come at random times (`faults.FAULTS`): processes are killed and
stopped, disks are full or slow, clocks jump, descriptors and memory run out, cables are pulled,
hosts are cut off and packets lost, adapters, engines and models come and go. What has to hold,
whatever happens:

- every request ends with an answer, an error with its reason, or what there was at its time limit,
  within its deadline and a second, and the time that a fault took from its client (`Fault.holds`);
- an answer that ended by itself has the bits of a quiet server;
- an error, or a connection without an answer, was met by a fault that may cause it;
- nothing is left at the end: blocks, requests, processes, threads, descriptors, files, connections
  of the other hosts, exceptions that nothing has retrieved;
- the ledger has what the step log has, once, and a client's count of tokens;
- the 99th percentile of a neighbour's gaps is at most three times that without faults, where no
  network is cut;
- each of several models has answers again and again.

The table has, for each fault, how often it came, the requests that met it, how they ended, and the
verdict. The exit code is 1 if a promise was broken. As root all faults are possible; otherwise
those of disks and hosts are not, and are listed. `--only` takes faults by their names, and the
sites that have one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence

from benchmarks.chaos.faults import FAULTS, Fault
from benchmarks.chaos.report import print_report
from benchmarks.chaos.run import Effort, Run
from benchmarks.chaos.sites import SITES
from benchmarks.chaos.world import World, own_mounts
from benchmarks.machine import describe_machine
from benchmarks.pulled_cable import has_namespaces


def main() -> int:
    """Run, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=0.0, help="in place of --minutes")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and the requests")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults")
    parser.add_argument("--pool", type=int, default=63, help="different requests")
    parser.add_argument("--site", nargs="+", choices=SITES, help="the servers, all by default")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names of faults")
    text = "judge no times but those of requests that never end: for busy machines"
    parser.add_argument("--untimed", action="store_true", help=text)
    parser.add_argument("--log", action="store_true", help="print the server's log at the end")
    args = parser.parse_args()
    # a terminated run ends its server, as an interrupted one does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    seconds = args.seconds or 60 * args.minutes
    print(describe_machine())
    print(f"{seconds:g} s, seed {seed}, {args.clients} clients", flush=True)
    started_s, has_mounts = time.monotonic(), own_mounts()
    chosen = {
        name: [fault for fault in FAULTS if name in fault.sites and _is_wanted(fault, args.only)]
        for name in args.site or SITES
    }
    chosen = {name: faults for name, faults in chosen.items() if faults}
    if "hosts" in chosen and not has_namespaces():
        print("the site of hosts is not run: this user may not make network namespaces")
        del chosen["hosts"]
    sizes = (args.clients, args.every, args.pool)
    effort = Effort(seconds / max(1, len(chosen)), seed, *sizes, is_timed=not args.untimed)
    are_kept = [_run(name, faults, effort, has_mounts, args.log) for name, faults in chosen.items()]
    print(f"{time.monotonic() - started_s:.0f} s in all")
    return 0 if all(are_kept) else 1


def _run(
    name: str, faults: Sequence[Fault], effort: Effort, has_mounts: bool, prints_log: bool
) -> bool:
    """Run one site, and print what was found. Returns whether every promise was kept."""
    print(f"\n{name}: {effort.seconds:g} s", flush=True)
    world = World(SITES[name](), has_mounts)
    log: list[str] = []
    try:
        world.open()
        possible = [fault for fault in faults if _may_run(fault, world)]
        run = Run(world, possible, effort)
        asyncio.run(run.all())
        run.after(*world.close())
    finally:
        log = world.log() if prints_log else log
        world.remove()
        print(*log, sep="", end="", file=sys.stderr)
    return print_report(run, [fault.name for fault in faults if fault not in possible])


def _is_wanted(fault: Fault, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part in fault.name for part in parts)


def _may_run(fault: Fault, world: World) -> bool:
    """Whether this user and this machine can have the fault."""
    has = {"mounts": world.has_mounts, "shim": world.has_shim, "netns": True}
    return not fault.needs or has[fault.needs]


if __name__ == "__main__":
    sys.exit(main())
