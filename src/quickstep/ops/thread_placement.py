"""Where the kernels' threads run and their weights are placed, decided from a machine as data.

`engine.machine` reads the machine, `ops.native.backend` does as decided. Threads get cores of
their own before any two share one, on as few NUMA nodes as have the cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_MAX_NODES = 64  # of the library's mask


class Cpu(msgspec.Struct, frozen=True):
    """A CPU that the process may use: its number, the core it is a thread of, its NUMA node.

    `core` is any number that CPUs of one core share and others lack.
    """

    cpu: int
    core: int
    node: int


class ThreadPlaces(msgspec.Struct, frozen=True):
    """A CPU for each thread, the calling one first; () leaves them to the system. Weights are
    spread over `nodes`.
    """

    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    @property
    def node_mask(self) -> int:
        """`nodes`, a bit each; nodes beyond the mask get no weights of their own."""
        return sum(1 << node for node in self.nodes if node < _MAX_NODES)


def choose_places(
    cpus: Sequence[Cpu], num_threads: int, is_pinned: bool, rank: int = 0, num_ranks: int = 1
) -> ThreadPlaces:
    """Places for `num_threads`; with more threads than CPUs, or not pinned, wherever they run.

    Of several ranks with so many threads each, no two get one CPU, and each gets CPUs of one node
    where the nodes are large enough.

    Threads that stay where they are put read the memory of their nodes only; others may run on any
    node of the process.
    """
    everywhere = tuple(sorted({cpu.node for cpu in cpus}))
    total = num_threads * num_ranks
    if not is_pinned or total > len(cpus):
        return ThreadPlaces((), everywhere)
    ranked = [place for node in _fewest_nodes(cpus, total) for place in _ranked(node)]
    placed = [cpu for *_, cpu in sorted(ranked, key=lambda place: (*place[:2], place[2].cpu))]
    placed = placed[:total]
    if num_ranks > 1:
        placed = sorted(placed, key=lambda cpu: cpu.node)[rank * num_threads :][:num_threads]
    nodes = tuple(sorted({cpu.node for cpu in placed}))
    return ThreadPlaces(tuple(cpu.cpu for cpu in placed), nodes)


def _fewest_nodes(cpus: Sequence[Cpu], num_threads: int) -> list[list[Cpu]]:
    """The CPUs of the nodes with the most cores, as many as have a core for every thread."""
    by_node: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        by_node.setdefault(cpu.node, []).append(cpu)
    nodes = sorted(by_node.values(), key=lambda node: (-_num_cores(node), node[0].node))
    num_cores = 0
    for count, node in enumerate(nodes, 1):
        num_cores += _num_cores(node)
        if num_cores >= num_threads:
            return nodes[:count]
    return nodes


def _num_cores(cpus: Sequence[Cpu]) -> int:
    return len({cpu.core for cpu in cpus})


def _ranked(node: Sequence[Cpu]) -> list[tuple[int, int, Cpu]]:
    """A node's CPUs with which thread of its core each is, and which core of its node that is.

    In the order of both, threads take a core each before they share one, and nodes in turn.
    """
    cores: dict[int, list[Cpu]] = {}
    for cpu in sorted(node, key=lambda cpu: cpu.cpu):
        cores.setdefault(cpu.core, []).append(cpu)
    return [
        (thread, core, cpu)
        for core, siblings in enumerate(cores.values())
        for thread, cpu in enumerate(siblings)
    ]
