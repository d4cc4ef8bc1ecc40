"""The pages of docs/guide show what their commands print."""

from __future__ import annotations

from pathlib import Path

import pytest
import write_guide_outputs

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "path",
    [
        page
        for page in sorted(write_guide_outputs.PAGES.rglob("*.md"))
        if write_guide_outputs.BLOCKS.search(page.read_text(encoding="utf-8"))
    ],
    ids=lambda p: p.stem,
)
def test_a_page_shows_what_its_commands_print(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert write_guide_outputs.with_outputs(page, slow_too=False) == page, "run make reference"


def test_the_tables_of_formats_have_a_row_for_each() -> None:
    page = write_guide_outputs.PAGES / "structured-output.md"
    text = page.read_text(encoding="utf-8")
    assert write_guide_outputs.with_tables(text) == text, "run make reference"
    assert "| `qwen3_coder` | `<tool_call> <function=NAME>" in text
    assert "| `gemma4` | `<\\|channel>thought" in text


def test_measurements_of_a_machine_are_left_alone() -> None:
    page = "```sh\nquickstep bench step\n```\n\n```text\n1 ms\n```\n"
    assert write_guide_outputs.with_outputs(page) == page


def test_padded_rows_are_as_long_as_the_longest() -> None:
    from quickstep.core.cost_model import StepLoad
    from quickstep.sim.engine import padded
    from quickstep.types import Phase, StepPlan, StepRow

    rows = tuple(
        StepRow(slot, start, num, (), (), Phase.PREFILL, emits=True, output_position=0)
        for slot, start, num in ((0, 0, 100), (1, 40, 10), (2, 300, 1))
    )
    plan = StepPlan(1, rows)
    load = StepLoad.of_plan(padded(plan))
    assert (load.num_rows, load.num_tokens, load.num_kv_tokens) == (3, 300, 3 * 301)
    assert padded(StepPlan(2, ())) == StepPlan(2, ())
