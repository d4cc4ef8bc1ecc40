"""How many drafts pay, and that a step's tokens reach a stream one by one."""

from __future__ import annotations

import msgspec
import pytest

from quickstep.cli.flags.engine import add_engine_flags, engine_config
from quickstep.cli.flags.parsing import Parser
from quickstep.config import ProposerConfig, SchedulerConfig, SpeculationConfig, SpeculationMethod
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.drafts.control import DraftControl, DraftMode
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.core.sequence import Acceptance
from quickstep.errors import ConfigError
from quickstep.sim.outcome import Arrival
from quickstep.sim.simulate import simulate
from quickstep.types import Grammar, Phase, Request, SamplingParams, StepRow

# A decode step of one row takes 10 ms; a draft adds 0.1 ms, and 10 ms in the slow one.
CHEAP = LinearCostModel(Coefficients(step_s=9.9e-3, token_s=1e-4))
EXPENSIVE = LinearCostModel(Coefficients(step_s=0.0, token_s=1e-2))

FULL = StepLoad(64, 64, 6400, 6400, num_logits_rows=64)


def control_at(num_rows: int, cost_model: LinearCostModel, max_drafts: int = 8) -> DraftControl:
    control = DraftControl(max_drafts)
    control.begin_step(num_rows)
    control.planned(StepLoad(num_rows, num_rows, 100 * num_rows, 100 * num_rows), cost_model)
    return control


def planned(control: DraftControl, load: StepLoad) -> DraftMode | None:
    control.begin_step(load.num_rows)
    return control.planned(load, CHEAP)


def run_step(control: DraftControl, with_drafts: float, num_rows: int = 1) -> bool:
    """A step of so many rows, each of which generates a token, in 10 ms; with drafts it is so many
    times as fast. Returns whether it uses drafts.
    """
    load = StepLoad(num_rows, num_rows, 100 * num_rows, 100 * num_rows, num_logits_rows=num_rows)
    mode = planned(control, load)
    uses = control.uses_drafts
    if mode is not None:
        control.measured(mode, load, 0, 0.01 / with_drafts if uses else 0.01, CHEAP)
    return uses


def with_rate(rate: float) -> Acceptance:
    """So many drafts that those of others hardly count."""
    return Acceptance(num_compared=1e6, num_right=1e6 * rate)


def draft_row(num_drafts: int, parents: tuple[int, ...] = ()) -> StepRow:
    """A row with the drafts 1, 2, ..."""
    token_ids = tuple(range(num_drafts + 1))
    return StepRow(
        0, 9, len(token_ids), token_ids, (), Phase.DECODE, True, 1, num_drafts, parents=parents
    )


def checked(
    control: DraftControl,
    acceptance: Acceptance,
    num_drafts: int,
    num_accepted: int,
    num_forced: int = 0,
) -> None:
    """Count a chain of drafts."""
    accepted = range(1, num_accepted + 1)
    control.checked(acceptance, draft_row(num_drafts), accepted, num_forced)


def test_more_drafts_pay_the_more_are_accepted() -> None:
    control = control_at(1, CHEAP)
    counts = [control.num_drafts(with_rate(rate)) for rate in (0.02, 0.1, 0.3, 0.5, 0.9)]
    assert counts == sorted(counts)
    assert counts[0] <= 1
    assert counts[-1] == 8


def test_fewer_drafts_pay_in_larger_batches() -> None:
    counts = [control_at(rows, CHEAP).num_drafts(with_rate(0.5)) for rows in (1, 8, 64, 512)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_none_pays_where_computation_is_the_limit() -> None:
    assert control_at(1, EXPENSIVE).num_drafts(with_rate(0.95)) == 0
    assert control_at(16, EXPENSIVE).num_drafts(with_rate(0.95)) == 0


def test_the_rate_follows_what_is_accepted() -> None:
    control = control_at(1, CHEAP)
    good, bad = Acceptance(), Acceptance()
    for _ in range(30):
        checked(control, good, 4, 4)
        checked(control, bad, 4, 0)
    assert control.num_drafts(good) == 8
    assert control.num_drafts(bad) < 4
    assert (good.num_drafts, good.num_accepted) == (120, 120)
    assert (bad.num_drafts, bad.num_accepted) == (120, 0)


def test_a_tree_is_as_large_as_its_later_drafts_are_accepted() -> None:
    """Two drafts after each token: the second one is right in every trial, or never."""
    counts = []
    for accepted in ((2, 4), (1, 3), ()):
        control = control_at(1, CHEAP)
        acceptance = Acceptance()
        for _ in range(200):
            control.checked(acceptance, draft_row(4, parents=(0, 0, 1, 2)), accepted)
        assert acceptance.in_trees
        assert acceptance.num_accepted == 200 * len(accepted)
        counts.append(control.num_drafts(acceptance))
    useless_first, useless_second, useless = counts
    assert useless_first == 0 < useless_second, "the first drafts are those that count"
    assert useless == 0


@pytest.mark.parametrize("with_drafts", [1.2, 0.9])
@pytest.mark.parametrize("in_trees", [False, True])
def test_a_sequence_for_which_no_drafts_pay_tries_one_now_and_then(
    in_trees: bool, with_drafts: float
) -> None:
    """In either mode, the step after the one that requests it checks it."""
    control = control_at(64, CHEAP)
    acceptance = Acceptance(num_compared=1e6, num_right=5e4, in_trees=in_trees)
    num_requested = num_checked = 0
    for _ in range(6400):
        control.begin_step(64)
        if num_requested > num_checked:
            assert control.num_checked(acceptance) == 1
            num_checked += 1
        num_requested += control.num_requested(acceptance)
        mode = control.planned(FULL, CHEAP)
        if mode is not None:
            speedup = with_drafts if control.uses_drafts else 1.0
            control.measured(mode, FULL, 0, 0.01 / speedup, CHEAP)
    assert 80 < num_requested < 6400 / 40


def test_drafts_that_are_accepted_more_often_are_used_soon() -> None:
    """Few of them were accepted, and slower, for a long time; then nearly all are, and faster."""
    control = control_at(64, CHEAP)
    others = Acceptance()
    for is_good in (False, True):
        used = 0
        for number in range(4000):
            if number % 64 == 0:  # as when all sequences try one
                for _ in range(64):
                    checked(control, others, 1, int(is_good))
            used += run_step(control, 1.5 if is_good else 0.8, 64)
            if is_good and used > 32:
                assert number < 200
                break
        else:
            assert not is_good and used < 400


def test_the_drafts_of_a_row_have_to_gain_what_the_row_costs() -> None:
    """A token takes 50 us in a full batch, a draft as good as nothing."""
    cheap = LinearCostModel(Coefficients(step_s=3.2e-3, token_s=1e-6))
    assert control_at(1, cheap).num_drafts(with_rate(0.4)) > 0
    assert control_at(64, cheap).num_drafts(with_rate(0.4)) == 0
    assert control_at(64, cheap).num_drafts(with_rate(0.8)) > 0


def test_a_new_sequence_begins_with_the_rate_of_the_others() -> None:
    for num_accepted in (0, 4):
        control = control_at(8, CHEAP)
        for _ in range(40):
            checked(control, Acceptance(), 4, num_accepted)
        assert (control.num_drafts(Acceptance()) > 2) is (num_accepted > 0)


@pytest.mark.parametrize(("with_drafts", "is_used"), [(2.0, True), (1.2, True), (0.9, False)])
def test_the_faster_mode_is_used_for_most_steps(with_drafts: float, is_used: bool) -> None:
    """Steps of one row take 10 ms without drafts; with drafts they are so many times as fast."""
    control = control_at(1, CHEAP)
    part = steps_with_drafts(control, 3000, with_drafts) / 3000
    assert part > 0.9 if is_used else part < 0.1


def steps_with_drafts(
    control: DraftControl, num_steps: int, with_drafts: float, num_rows: int = 1
) -> int:
    """How many of so many steps use drafts, which make them so many times as fast."""
    return sum(run_step(control, with_drafts, num_rows) for _ in range(num_steps))


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("with_drafts", [2.0, 0.8])
def test_comparisons_become_rare_and_a_change_is_noticed(with_drafts: float, num_rows: int) -> None:
    """A trial of one row takes more steps, because they say less."""
    control = control_at(num_rows, CHEAP)
    steps_with_drafts(control, 20_000, with_drafts, num_rows)
    in_faster = steps_with_drafts(control, 20_000, with_drafts, num_rows) / 20_000
    slower = 0.01 if num_rows > 1 else 0.03
    assert in_faster > 0.99 if with_drafts > 1.0 else in_faster < slower
    changed = 1.0 / with_drafts
    steps_with_drafts(control, 10_000, changed, num_rows)
    in_faster = steps_with_drafts(control, 1_000, changed, num_rows) / 1_000
    assert in_faster > 0.8 if changed > 1.0 else in_faster < 0.2


@pytest.mark.parametrize(("num_rows", "most_steps"), [(1, 250), (16, 60)])
@pytest.mark.parametrize("num_before", range(20_000, 20_500, 100))
def test_drafts_that_become_slower_are_switched_off_soon(
    num_before: int, num_rows: int, most_steps: int
) -> None:
    """Also if the next trial would be due much later. One row is averaged over more steps."""
    control = control_at(num_rows, CHEAP)
    steps_with_drafts(control, num_before, 2.0, num_rows)
    assert steps_with_drafts(control, 600, 0.8, num_rows) < most_steps


def test_contexts_of_different_lengths_do_not_look_like_a_gain() -> None:
    """Steps are longer with a longer context, which begins again every 200 steps; with drafts, all
    of them take 1.1 times as long and generate no more.
    """
    machine = LinearCostModel(Coefficients(step_s=1e-3, kv_token_s=1e-5))
    control = control_at(4, machine)
    steps_with = 0
    for number in range(4000):
        num_kv_tokens = 4 * (number % 200)
        load = StepLoad(4, 4, num_kv_tokens, num_kv_tokens, num_logits_rows=4)
        mode = planned(control, load)
        uses = control.uses_drafts
        steps_with += uses
        if mode is not None:
            seconds = machine.seconds(load) * (1.1 if uses else 1.0)
            control.measured(mode, load, 0, seconds, machine)
    assert steps_with < 200


def test_a_step_counts_for_the_mode_in_which_it_was_planned() -> None:
    """One batch gains by drafts and a smaller one loses by them; steps of both take turns."""
    control = control_at(64, CHEAP)
    used = {64: 0, 32: 0}
    for _ in range(4000):
        for num_rows, with_drafts in ((64, 1.5), (32, 0.7)):
            for _ in range(3):
                used[num_rows] += run_step(control, with_drafts, num_rows)
    assert used[64] > 0.9 * 12_000
    assert used[32] < 0.1 * 12_000


def test_steps_of_a_batch_in_which_a_sequence_is_replaced_are_alike() -> None:
    """64 sequences run, of which one computes its prompt in every second step; drafts do not pay.
    Then a batch of half that size begins in the mode of the larger one.
    """
    control = control_at(64, CHEAP)
    for number in range(4000):
        run_step(control, 0.9, 64 - number % 2)
    used = sum(run_step(control, 0.9, 64 - number % 2) for number in range(500))
    assert used < 20
    modes = [planned(control, StepLoad(rows, rows, rows, rows)) for rows in (64, 63, 33, 32)]
    full, replaced, half, smaller = [mode for mode in modes if mode is not None]
    assert full == replaced == half != smaller
    assert full.uses_drafts is smaller.uses_drafts


def test_it_is_off_without_drafts() -> None:
    control = control_at(1, CHEAP, max_drafts=0)
    assert not run_step(control, 2.0)
    assert control.num_drafts(with_rate(0.9)) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "magic"}, "magic"),
        ({"num_speculative_tokens": 0}, "must be 1 to 16"),
        ({"num_speculative_tokens": 17}, "must be 1 to 16"),
        ({"tree_width": 0}, "--speculative-tree-width is 0, it must be 1"),
        ({"tree_width": 17}, "--speculative-tree-width is 17"),
        ({"prompt_lokup_max": 3}, "prompt_lokup_max"),
        ({"method": "draft"}, "model"),
        ({"method": "off", "sampling": "rejection"}, "leave one of them out"),
        ({"quantization": "int8"}, "no --speculative-model is given to which it applies"),
        ({"proposers": []}, "give a list of objects"),
        ([], "empty list"),
        ([{"model": "a"}, 3], "object 2 is 3, it must be a JSON object"),
        ([{"model": "a"}, {"model": "a", "quantization": "int8"}], "a is given twice"),
        ([{"method": "off"}, {"model": "a"}], "method off and others"),
        ([{"model": "a"}, {"method": "magic"}], "object 2: Invalid enum value 'magic'"),
        (
            [{"method": "eagle", "model": "a"}, {"method": "eagle", "model": "b"}],
            "eagle takes one --speculative-model, but a and b are given",
        ),
        (
            [{"model": "a", "tree_width": 2}, {"model": "b", "tree_width": 3}],
            "tree_width is 2 and 3, but it holds for all proposers",
        ),
        ({"sampling": "typical"}, "typical"),
    ],
)
def test_a_bad_configuration_is_one_sentence(
    fields: dict[str, object] | list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SpeculationConfig.of_fields(fields, "--speculative-config")
    assert "\n" not in str(raised.value)


def test_names_are_vllms() -> None:
    config = SpeculationConfig.of_fields(
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "x"
    )
    assert config.proposers == (ProposerConfig(SpeculationMethod.NGRAM),)
    assert config.num_speculative_tokens == 5


def test_a_list_of_objects_has_a_proposer_each() -> None:
    first = {"method": "eagle", "model": "a", "num_speculative_tokens": 5}
    second = {"model": "b", "quantization": "int8", "revision": "c"}
    config = SpeculationConfig.of_fields([first, second, {"method": "ngram"}], "x")
    assert config.proposers == (
        ProposerConfig(SpeculationMethod.EAGLE, "a"),
        ProposerConfig(SpeculationMethod.AUTO, "b", "c", "int8"),
        ProposerConfig(SpeculationMethod.NGRAM),
    )
    assert config.num_speculative_tokens == 5
    assert not SpeculationConfig.of_fields({"method": "off"}, "x").is_on


def of_flags(*flags: str) -> SpeculationConfig:
    parser = Parser()
    add_engine_flags(parser)
    return engine_config(parser.parse_args(flags), "demo").speculation


def test_a_flag_given_several_times_is_a_list() -> None:
    models = ("--speculative-model", "a", "--speculative-model", "b")
    several = SpeculationConfig((ProposerConfig(model="a"), ProposerConfig(model="b")), 3)
    assert of_flags(*models, "--num-speculative-tokens", "3") == several
    listed = '[{"model": "a"}, {"model": "b"}]'
    config = ("--speculative-config", listed)
    assert of_flags(*config, "--num-speculative-tokens", "3") == several
    with pytest.raises(ConfigError, match="model is given twice"):
        of_flags(*config, "--speculative-model", "c")
    with pytest.raises(ConfigError, match="give --speculative-method as the method of one"):
        of_flags(*config, "--speculative-method", "suffix")
    with pytest.raises(ConfigError, match="draft takes one --speculative-model"):
        of_flags(*models, "--speculative-method", "draft")


def test_forced_drafts_pay_where_guesses_do_not_and_teach_nothing_about_them() -> None:
    control = control_at(8, LinearCostModel(Coefficients(step_s=5e-3, token_s=1e-3)))
    acceptance = with_rate(0.1)
    assert control.num_drafts(acceptance) <= 1
    assert control.num_forced() == 8
    checked(control, acceptance, 6, 6, num_forced=6)
    assert acceptance == msgspec.structs.replace(with_rate(0.1), num_drafts=6, num_accepted=6)
    checked(control, acceptance, 6, 4, num_forced=4)
    assert acceptance.num_right < 0.1 * acceptance.num_compared
    assert control_at(16, EXPENSIVE).num_forced() == 0


@pytest.mark.parametrize(("grammar", "speculation"), [(True, True), (True, False), (False, True)])
def test_only_a_request_with_a_grammar_asks_for_forced_drafts(
    grammar: bool, speculation: bool
) -> None:
    sampling = SamplingParams(max_tokens=20, grammar=Grammar.of_regex("a*") if grammar else None)
    config = SchedulerConfig(num_speculative_tokens=4)
    scheduler = Scheduler(config, KVBlockPool(8, 16, True), make_policy(config), CHEAP)
    scheduler.add(Request("r", (1, 2, 3), sampling, speculation=speculation), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert (plan.rows[0].num_next_forced > 0) == (grammar and speculation)


@pytest.mark.parametrize("speculation", [False, True])
def test_requests_that_want_no_drafts_say_nothing_of_their_gain(
    speculation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    monkeypatch.setattr(DraftControl, "measured", lambda _, *step: measured.append(step))
    config = SchedulerConfig(4, 64, 128, num_speculative_tokens=4)
    scheduler = Scheduler(config, KVBlockPool(16, 16), make_policy(config), LinearCostModel())
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    request = Request("r", (1, 2), sampling, speculation=speculation)
    simulate([Arrival(0.0, request)], scheduler, CHEAP)
    assert bool(measured) is speculation
