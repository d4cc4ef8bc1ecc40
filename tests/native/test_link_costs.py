"""`quickstep doctor` measures what ranks and stages cost, and leaves nothing behind."""

from __future__ import annotations

import os

from process_lists import workers

from quickstep.cli.doctor import collect_facts
from quickstep.engine.ranks.link_costs import measured_link_costs


def test_links_are_measured_between_two_processes() -> None:
    costs = measured_link_costs()
    assert costs is not None
    assert min(costs.meeting_us, costs.gather_us, costs.frame_us, costs.chunk_us) > 0
    assert not workers(os.getpid(), b"engine.ranks.link_costs")


def test_links_are_not_measured_where_nothing_is() -> None:
    facts = collect_facts(with_bandwidth=False)
    assert facts["ranks and stages"] == {"measured_how": "not measured"}
