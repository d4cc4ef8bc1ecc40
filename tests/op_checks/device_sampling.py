"""Checks that sampling on a device equals NumPy's to the bit; each takes the device.

`tests/triton` runs them on a CPU, where the kernels are interpreted, `tests/cuda` on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from op_checks.sampling_cases import (
    EVERY_CHANGE,
    EVERY_FILTER,
    FixedMask,
    rows_of,
    samplings,
    state_of,
)
from quickstep.ops.tensors import FLOAT32, HostTensor
from quickstep.ops.triton.sampling.exact_math import exp_nonpositive, gumbel, log, noise_bits
from quickstep.ops.triton.sampling.sample import NOTHING_ALLOWED
from quickstep.ops.triton.sampling.sample import sample as sample_on_device
from quickstep.runtime.sampling import exact_math, noise
from quickstep.runtime.sampling.device_records import DeviceRecords
from quickstep.runtime.sampling.device_sampler import DeviceSampler, score_on_device
from quickstep.runtime.sampling.logprobs import score_tokens
from quickstep.runtime.sampling.sampler import SampleFailure, sample
from quickstep.runtime.speculation.verification import EmittingRow, sample_rows
from quickstep.types import SamplingParams

__all__ = ["CHECKS", "rows_of_every_kind"]


def assert_same_samples(logits, states, device, rows=None, sampler=None):
    """The same tokens, log-probabilities and failures as NumPy's."""
    sampler = sampler or DeviceSampler(logits.shape[1], device)
    found = sampler.sample(logits.to(device), states, rows)
    assert found == sample(logits, states, rows)
    return found


@triton.jit
def _math_kernel(x, keys, values, exps, logs, bits, noised, SIZE: tl.constexpr):
    ids = tl.arange(0, SIZE).to(tl.int64)
    value = tl.load(x + ids)
    tl.store(exps + ids, exp_nonpositive(0.0 - value))
    tl.store(logs + ids, log(value))
    found = noise_bits(tl.load(keys), tl.load(keys + 1), ids)
    tl.store(bits + ids, found)
    scaled = (tl.load(values + ids) - 3.0) / tl.load(x)
    tl.store(noised + ids, scaled + gumbel(found))


def noised_scores_have_the_bits_of_the_definition(device):
    size, seed, position = 4096, 2**63 + 5, 7
    draws = np.random.default_rng(0)
    x = np.abs(draws.normal(size=size)) * 10.0 ** draws.integers(-8, 3, size)
    values = draws.normal(size=size)
    keys = np.array(noise.row_keys(seed, position), dtype=np.uint64).view(np.int64)
    x_there, keys_there, values_there = (torch.from_numpy(a).to(device) for a in (x, keys, values))
    exps, logs, noised = (torch.empty_like(x_there) for _ in range(3))
    bits = torch.empty(size, dtype=torch.int64, device=device)
    _math_kernel[(1,)](
        x_there,
        keys_there,
        values_there,
        exps,
        logs,
        bits,
        noised,
        SIZE=size,
        num_warps=16,
        enable_fp_fusion=False,
    )
    expected_bits = noise.noise_bits(seed, position, np.arange(size))
    scores = (values - 3.0) / x[0] + noise.gumbel_of_bits(expected_bits)
    assert (bits.cpu().numpy().view(np.uint64) == expected_bits).all()
    assert (exps.cpu().numpy() == exact_math.exp_nonpositive(-x)).all()
    assert (logs.cpu().numpy() == exact_math.log(x)).all()
    assert (noised.cpu().numpy() == scores).all()


def random_parameters_give_the_tokens_of_the_definition(device):
    on_gpu = device == "cuda"
    sizes = (1, 2, 63, 64, 65, 1000, 1025) + ((4097, 70_000) if on_gpu else ())

    @settings(max_examples=400 if on_gpu else 20, deadline=None)
    @given(
        st.sampled_from(["normal", "normal", "ties", "flat", "masked", "broken"]),
        st.sampled_from(sizes),
        st.lists(samplings, min_size=1, max_size=4),
        st.integers(0, 2**64 - 1),
        st.sampled_from([0.1, 2.0, 12.0]),
    )
    def compare(kind, vocab, samplings, seed, scale):
        logits = rows_of(kind, len(samplings), vocab, seed, scale)
        states = [
            state_of(sampling, vocab, seed + index, outputs=range(index))
            for index, sampling in enumerate(samplings)
        ]
        assert_same_samples(logits, states, device)

    compare()


def every_filter_keeps_what_the_definition_keeps(device):
    vocab = 151_936 if device == "cuda" else 1100
    for scale in (0.5, 4.0):
        logits = rows_of("normal", len(EVERY_FILTER), vocab, 1, scale).bfloat16().float()
        states = [state_of(one, vocab, seed) for seed, one in enumerate(EVERY_FILTER)]
        assert_same_samples(logits, states, device)


def ties_and_exact_shares_are_cut_as_in_the_definition(device):
    vocab, count = 256, 100 if device == "cuda" else 3  # flat: boundaries are multiples of 1 / 256
    chosen = [SamplingParams(top_p=p) for p in (0.02, 0.25, 0.75)]
    chosen += [SamplingParams(top_k=7), SamplingParams(typical_p=0.5)]
    chosen += [SamplingParams(xtc_probability=1.0, xtc_threshold=1 / 256)]
    for kind in ("flat", "ties"):
        logits = rows_of(kind, 1, vocab, 3, 1.0).expand(len(chosen) * count, vocab).contiguous()
        seeds = range(count)
        states = [state_of(one, vocab, seed) for one in chosen for seed in seeds]
        assert_same_samples(logits, states, device)


def every_change_of_logits_is_applied(device):
    vocab = 300
    logits = rows_of("normal", len(EVERY_CHANGE), vocab, 5, 3.0)
    outputs = (3, 9, 5, 17, 3, 9, 5, 17, 11, 3)
    for num_outputs in (0, 1, 5, 10):
        states = [state_of(one, vocab, 7, outputs[:num_outputs]) for one in EVERY_CHANGE]
        assert_same_samples(logits, states, device)


def counts_on_the_device_follow_recorded_tokens(device):
    """More sequences than rows of counts, of which some are not in every step."""
    vocab, num_sequences = 200, 7
    sampler = DeviceSampler(vocab, device)
    kinds = [
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.4, logprobs=1),
        SamplingParams(presence_penalty=0.9, temperature=0.0),
        SamplingParams(repetition_penalty=0.7, top_k=5),
    ]
    states = [state_of(kinds[i % 3], vocab, i, range(i)) for i in range(num_sequences)]
    for step, sizes in enumerate((2, 7, 3, 5, 7, 1, 7)):
        chosen = [states[(step + i) % num_sequences] for i in range(sizes)]
        logits = rows_of("normal", sizes, vocab, step, 1.0)
        found = assert_same_samples(logits, chosen, device, sampler=sampler)
        for state, sampled in zip(chosen, found, strict=True):
            for token_id in (sampled.token_id, sampled.token_id, step):  # several, as with drafts
                state.record(token_id)
    states[3] = state_of(kinds[0], vocab, 3, range(50))  # another sequence takes its place
    logits = rows_of("normal", num_sequences, vocab, 9, 1.0)
    assert_same_samples(logits, states, device, sampler=sampler)


def grammar_masks_and_bans_that_yield_are_applied(device):
    draws = np.random.default_rng(2)
    vocab = 130
    masks = [b"", b"\x01", b"\x03", b"\xff" * 40, draws.bytes(17), draws.bytes(3)]
    logits = rows_of("normal", len(masks), vocab, 3, 2.0)
    for temperature in (0.0, 1.0):
        states = []
        for seed, mask in enumerate(masks):
            sampling = SamplingParams(temperature=temperature, min_tokens=2, logprobs=seed)
            states.append(state_of(sampling, vocab, seed))
            states[-1]._grammar = FixedMask(mask, vocab)
        assert_same_samples(logits, states, device)


def tokens_that_a_grammar_forces_have_their_own_logprobs(device):
    vocab = 100
    state = state_of(SamplingParams(logprobs=3, logprob_token_ids=(9, 4)), vocab, 1)
    state._grammar, state._always_adjusts = FixedMask(b"\xff" * 13, vocab, 5), True
    [found] = assert_same_samples(rows_of("normal", 1, vocab, 3, 2.0), [state], device)
    assert found.token_id == found.logprobs.token_id == 5


def logprobs_are_those_of_the_definition(device):
    vocab = 1100
    for kind in ("normal", "ties", "masked", "flat"):
        logits = rows_of(kind, 5, vocab, 4, 2.0)
        logits[2, ::3] = 0.0
        logits[2, 1::3] = -0.0
        states = [
            state_of(replace(one, logprob_token_ids=(7, 3, 1099)[: one.logprobs]), vocab, seed)
            for seed, one in enumerate(SamplingParams(logprobs=n) for n in (0, 1, 5, 20, 2000))
        ]
        assert_same_samples(logits, states, device)
        token_ids = [0, 7, 1099, 500, 3]
        found = score_on_device(logits.to(device), token_ids, 4)
        assert found == score_tokens(logits, token_ids, 4)
    logits[1, 3] = torch.nan
    assert score_on_device(logits.to(device), token_ids, 4) is None


def a_row_that_fails_fails_alone(device):
    logits = rows_of("normal", 6, 70, 0, 1.0)
    logits[1, 68], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    states = [
        state_of(SamplingParams(temperature=t, top_p=p, logprobs=1), 70)
        for t, p in ((0.0, 1.0), (1.0, 0.5), (1.0, 1.0), (0.5, 0.9), (1.0, 1.0), (0.0, 1.0))
    ]
    states[4] = state_of(SamplingParams(allowed_token_ids=(0,), min_tokens=3), 70)
    found = assert_same_samples(logits, states, device)
    assert [isinstance(one, SampleFailure) for one in found] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]


def rows_of_every_kind(vocab, seed, device):
    """Logits on the host, states, and their records on the device."""
    kinds = [*EVERY_FILTER, *EVERY_CHANGE]
    logits = rows_of("normal", len(kinds), vocab, seed, 2.0)
    states = [state_of(one, vocab, seed + i, range(4)) for i, one in enumerate(kinds)]
    changes = [state.changes(None) if state.adjusts_logits else None for state in states]
    records = DeviceRecords(vocab, device).build(states, changes, range(len(kinds)))
    return logits, states, records


def the_same_launches_sample_other_logits_and_seeds(device):
    """As a recorded step does: only numbers in the same tensors change. On a GPU it is captured."""
    vocab = 5000 if device == "cuda" else 1100
    logits, _, records = rows_of_every_kind(vocab, 1, device)
    there = logits.to(device)
    token_ids = sample_on_device(there, records)  # compiles the kernels

    def launch():
        token_ids.copy_(sample_on_device(there, records))

    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        launch = graph.replay
    for seed in (1, 2):
        logits, states, others = rows_of_every_kind(vocab, seed, device)
        there.copy_(logits)
        records.rows.copy_(others.rows)
        launch()
        assert token_ids.tolist() == [
            NOTHING_ALLOWED if isinstance(one, SampleFailure) else one.token_id
            for one in sample(logits, states)
        ]


def rows_in_any_order_and_in_groups_are_sampled_alike(device):
    logits = rows_of("normal", 6, 65, 3, 4.0)
    states = [
        state_of(SamplingParams(temperature=0.1 * seed, top_p=0.9, logprobs=2), 65, seed)
        for seed in range(6)
    ]
    sampler = DeviceSampler(65, device)
    assert_same_samples(logits, states[:2], device, [3, 0], sampler)
    assert sampler.sample(HostTensor(logits.numpy(), FLOAT32), states) == sample(logits, states)
    sampler._group_rows = 4
    together = assert_same_samples(logits, states, device, sampler=sampler)
    alone = [sampler.sample(logits[i : i + 1].to(device), [states[i]])[0] for i in range(6)]
    assert together == alone


def tokens_can_stay_on_the_device(device):
    """Steps of which the host learns the tokens one or two steps later, of more sequences than rows
    of counts, some of them not in every step, in groups.
    """
    vocab = 90
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(min_tokens=3, top_p=0.8, logprobs=2),
        SamplingParams(xtc_probability=0.5, logit_bias={3: 4.0}, allowed_token_ids=range(50)),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.9, logprobs=0),
        SamplingParams(temperature=0.0, presence_penalty=2.0),
        SamplingParams(repetition_penalty=0.5, min_tokens=2, logprob_token_ids=(4,), logprobs=1),
        SamplingParams(temperature=0.4, frequency_penalty=-1.5),
        SamplingParams(temperature=1.7, presence_penalty=1.0),
    ]
    sampler = DeviceSampler(vocab, device)
    sampler._group_rows = 3
    states = [state_of(one, vocab, seed) for seed, one in enumerate(kinds)]
    outputs = [[] for _ in kinds]
    in_flight = deque()
    for step, absent in enumerate(({2, 4}, set(), {3}, {5, 6, 7}, set(), {0, 3})):
        chosen = [i for i in range(len(kinds)) if i not in absent]
        logits = rows_of("flat" if step == 2 else "normal", len(chosen), vocab, step, 1.0)
        recorded = [state_of(kinds[i], vocab, i, outputs[i]) for i in chosen]
        expected = sample(logits, recorded)
        later = [states[i].ahead(len(outputs[i]) - states[i].num_outputs) for i in chosen]
        found = sampler.launch(logits.to(device), later)
        assert found.token_ids.tolist() == [one.token_id for one in expected]
        for i, one in zip(chosen, expected, strict=True):
            outputs[i].append(one.token_id)
        in_flight.append((chosen, found, expected))
        while len(in_flight) > step % 3:
            finished, samples, known = in_flight.popleft()
            assert samples.wait() == known
            for i, one in zip(finished, known, strict=True):
                states[i].record(one.token_id)
    logits = rows_of("normal", len(kinds), vocab, 7, 1.0)
    while in_flight:
        finished, _, known = in_flight.popleft()
        for i, one in zip(finished, known, strict=True):
            states[i].record(one.token_id)
    assert_same_samples(logits, states, device, sampler=sampler)


def a_row_that_fails_in_flight_fails_alone(device):
    logits = rows_of("normal", 4, 70, 0, 1.0)
    logits[1, 68] = torch.nan
    kinds = [
        SamplingParams(frequency_penalty=1.0, logprobs=1),
        SamplingParams(frequency_penalty=1.0, logprobs=1),
        SamplingParams(allowed_token_ids=(0,), min_tokens=3),
        SamplingParams(temperature=0.0),
    ]
    sampler = DeviceSampler(70, device)
    states = [state_of(one, 70, seed) for seed, one in enumerate(kinds)]
    expected = sample(logits, states)
    found = sampler.launch(logits.to(device), states).wait()
    assert found == expected
    assert [isinstance(one, SampleFailure) for one in found] == [False, True, True, False]
    later = [state.ahead(1) for state in states]
    known = [state_of(kinds[i], 70, i, (found[i].token_id,)) for i in (0, 3)]
    logits = rows_of("normal", 4, 70, 1, 1.0)
    after = sampler.launch(logits.to(device), later).wait()
    assert [after[0], after[3]] == sample(logits[[0, 3]], known)


class _Slot:
    """What verification reads of a slot."""

    def __init__(self, state):
        self.state, self.failure, self.is_refused = state, "", False
        self.end_token_ids, self.last_token = frozenset(), None


def drafts_are_verified_as_on_the_host(device):
    """Rows that are functions of the position, in one call, and others; one draft after the other
    and in a tree.
    """
    vocab = 50
    plain = [SamplingParams(temperature=0.7, min_tokens=4), SamplingParams(top_k=3, logprobs=1)]
    on_device = DeviceSampler(vocab, device).sample
    for kinds in (plain, [*plain, SamplingParams(frequency_penalty=1.0)]):
        logits = rows_of("normal", 4 * len(kinds), vocab, 8, 1.0)
        first = [
            sample(logits[4 * i : 4 * i + 1], [state_of(kind, vocab, i)])[0].token_id
            for i, kind in enumerate(kinds)
        ]
        for parents in ((), (0, 0, 2)):
            emitted = []
            for sampler, where, at_once in (
                (sample, "cpu", False),
                (sample, "cpu", True),
                (on_device, device, True),
            ):
                rows = []
                for i, kind in enumerate(kinds):
                    drafts = (3, first[i], 4) if parents else (first[i], 3, 4)
                    slot = _Slot(state_of(kind, vocab, i))
                    rows.append(EmittingRow(i, slot, slot.state, 4 * i, drafts, parents))
                sample_rows(sampler, logits.to(where), rows, at_once=at_once)
                emitted.append([(row.samples, row.nodes) for row in rows])
            assert emitted[0] == emitted[1] == emitted[2]
            assert all(len(samples) > 1 for samples, _ in emitted[0])


CHECKS: tuple[Callable[[str], None], ...] = (
    noised_scores_have_the_bits_of_the_definition,
    random_parameters_give_the_tokens_of_the_definition,
    every_filter_keeps_what_the_definition_keeps,
    ties_and_exact_shares_are_cut_as_in_the_definition,
    every_change_of_logits_is_applied,
    counts_on_the_device_follow_recorded_tokens,
    grammar_masks_and_bans_that_yield_are_applied,
    tokens_that_a_grammar_forces_have_their_own_logprobs,
    logprobs_are_those_of_the_definition,
    a_row_that_fails_fails_alone,
    the_same_launches_sample_other_logits_and_seeds,
    rows_in_any_order_and_in_groups_are_sampled_alike,
    tokens_can_stay_on_the_device,
    a_row_that_fails_in_flight_fails_alone,
    drafts_are_verified_as_on_the_host,
)
