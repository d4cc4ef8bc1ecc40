"""Where threads and weights go, on machines made up as Linux describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from quickstep.engine.machine import usable_cpus
from quickstep.ops.thread_placement import Cpu, ThreadPlaces, choose_places


def machine(
    root: Path, cores: Sequence[Sequence[int]], nodes: Mapping[int, str], name: str
) -> Path:
    """A tree of `/sys`: the CPUs of each core, and those of each node as Linux writes them."""
    system = root / "sys/devices/system"
    for core in cores:
        for cpu in core:
            topology = system / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / name).write_text(",".join(map(str, core)) + "\n")
    for node, cpulist in nodes.items():
        folder = system / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist + "\n")
    (system / "node").mkdir(exist_ok=True)
    (system / "node/online").write_text("0\n")
    return root


@pytest.fixture(params=["core_cpus_list", "thread_siblings_list"])
def two_sockets(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Two nodes of 4 cores; a core's second thread is 8 above its first."""
    cores = [(core, core + 8) for core in range(8)]
    return machine(tmp_path, cores, {0: "0-3,8-11", 1: "4-7,12-15"}, request.param)


def places(root: Path, num_threads: int, allowed: Sequence[int], pinned: bool = True) -> object:
    found = choose_places(usable_cpus(root, allowed), num_threads, pinned)
    return found.cpus, found.nodes


def test_cpus_know_their_core_and_node(two_sockets: Path) -> None:
    assert usable_cpus(two_sockets, [13, 0, 8]) == (Cpu(0, 0, 0), Cpu(8, 0, 0), Cpu(13, 5, 1))


def test_threads_stay_on_one_node_while_it_has_cores_for_them(two_sockets: Path) -> None:
    assert places(two_sockets, 3, range(16)) == ((0, 1, 2), (0,))
    assert places(two_sockets, 4, range(16)) == ((0, 1, 2, 3), (0,))


def test_more_threads_go_to_both_nodes_in_turn_a_core_each(two_sockets: Path) -> None:
    assert places(two_sockets, 5, range(16)) == ((0, 4, 1, 5, 2), (0, 1))
    assert places(two_sockets, 8, range(16)) == ((0, 4, 1, 5, 2, 6, 3, 7), (0, 1))


def test_second_threads_of_cores_come_last(two_sockets: Path) -> None:
    assert places(two_sockets, 10, range(16)) == ((0, 4, 1, 5, 2, 6, 3, 7, 8, 12), (0, 1))


def test_only_cpus_of_the_affinity_mask_are_taken(two_sockets: Path) -> None:
    assert places(two_sockets, 2, [3, 11, 12]) == ((3, 12), (0, 1))
    assert places(two_sockets, 2, [3, 11]) == ((3, 11), (0,))
    assert places(two_sockets, 3, [2, 4, 5, 6, 12]) == ((4, 5, 6), (1,))


def test_threads_of_neighbouring_numbers_on_a_core_are_told_apart(tmp_path: Path) -> None:
    root = machine(tmp_path, [(0, 1), (2, 3)], {0: "0-3"}, "core_cpus_list")
    assert places(root, 2, range(4)) == ((0, 2), (0,))
    assert places(root, 3, range(4)) == ((0, 2, 1), (0,))


def test_more_threads_than_cpus_are_left_to_the_system(two_sockets: Path) -> None:
    assert places(two_sockets, 17, range(16)) == ((), (0, 1))


def test_threads_that_are_not_pinned_may_read_from_every_node_of_the_process(
    two_sockets: Path,
) -> None:
    assert places(two_sockets, 2, range(16), pinned=False) == ((), (0, 1))
    assert places(two_sockets, 2, range(4), pinned=False) == ((), (0,))


def test_without_a_topology_every_cpu_is_a_core_of_one_node(tmp_path: Path) -> None:
    assert places(tmp_path, 2, [4, 7, 9]) == ((4, 7), (0,))


def test_without_an_affinity_mask_nothing_is_placed() -> None:
    assert choose_places((), 4, True) == ThreadPlaces()


def test_the_mask_of_nodes_has_a_bit_for_each() -> None:
    assert ThreadPlaces(nodes=(0, 2, 63, 64)).node_mask == 1 + 4 + 2**63


def test_ranks_share_no_cpu_and_stay_on_a_node() -> None:
    cpus = [Cpu(number, number, number // 4) for number in range(8)]
    found = [choose_places(cpus, 3, True, rank, 2) for rank in range(2)]
    assert [places.nodes for places in found] == [(0,), (1,)]
    assert len({cpu for places in found for cpu in places.cpus}) == 6
    assert choose_places(cpus, 5, True, 1, 2).cpus == ()  # more threads than CPUs
