"""The exactness checker: same request, same bits, whatever else is in the batch.

Each random request runs at batch size 1 first (one slot, the complete prompt at once, cold cache);
then in random groups under scenarios that chunk, hit prefixes, starve the pool, abort neighbours,
pause, overlap steps, speculate, load, evict and retire adapters, at each thread count. Token ids,
logprob bits and the finish reason have to be equal. One comparison is one sequence of one run
against its single run; an aborted neighbour is compared with the beginning of its single run.

Called by `quickstep verify` and by tests. Everything is a function of the model and the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import msgspec
from msgspec import structs
from msgspec.structs import replace

from quickstep.config import (
    KVTierConfig,
    PolicyName,
    ProposerConfig,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.sequence import sequence_seed
from quickstep.errors import EngineError
from quickstep.model.interface import Model
from quickstep.model.sizing import NO_STATES, MemoryPlan, StateMemory
from quickstep.ops.table import KVCache
from quickstep.ops.torch_import import has_torch
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.sampling.grammar import NewMatcher
from quickstep.runtime.speculation.combined import CombinedProposer
from quickstep.runtime.speculation.methods import open_lookup_proposers
from quickstep.runtime.speculation.proposer import Proposer
from quickstep.runtime.speculation.static import StaticProposer
from quickstep.runtime.steps.pipeline import StageLinks
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Admission
from quickstep.verify.adapters import adapter_ids, random_adapters
from quickstep.verify.report import Setup, VerifyOptions, VerifyReport
from quickstep.verify.requests import (
    LONG_OUTPUTS,
    MAX_OUTPUTS,
    MAX_PROMPT_LEN,
    RandomRequest,
    RequestVocabulary,
    random_requests,
)
from quickstep.verify.run import (
    AdapterRetired,
    Event,
    RunCounts,
    Signal,
    Trace,
    run_requests,
)

_MAX_NUM_SEQS = 24
_NUM_SAVED_STATES = 8
_MAX_DRAFTS = 15
_MAX_TOKENS = 512  # of a step
# Some prompts end so near to it that the context limit ends the sequence.
_MAX_MODEL_LEN = MAX_PROMPT_LEN + MAX_OUTPUTS - 24

Progress = Callable[[str, int, int], None]

# After each group, with the name of its scenario; False to end.
AfterGroup = Callable[[str, VerifyReport], bool]

# The model to verify, computing on that many CPU threads.
LoadForThreads = Callable[[int], Model]

# Our part of it, for a setup of several processes and the sizes of a plan, and the links to the
# stages of a pipeline.
LoadDivided = Callable[[Setup, MemoryPlan], tuple[Model, StageLinks | None]]

# What drafts for it with a model, by name (`draft`, `eagle`, ...), within the sizes of a plan.
OpenProposers = Callable[[Model, MemoryPlan], Mapping[str, Proposer]]


class Scenario(msgspec.Struct, frozen=True):
    """How a group of requests is run."""

    name: str
    is_chunked: bool = False
    prefix_caching: bool = False
    is_starved: bool = False
    has_aborts: bool = False
    has_pauses: bool = False
    pipeline_depth: int = 1
    policy: PolicyName = PolicyName.MIXED
    lookup: SpeculationMethod | None = None  # what drafts without a model
    drafts_expected: bool = False  # drafts are the tokens of the single run, with errors
    in_trees: bool = False  # these drafts
    has_loads: bool = False  # there is no room for all adapters
    draft_model: str = ""  # a proposer with a model, by name, or `_COMBINED`
    stores_kv: bool = False  # evicted blocks come back

    @property
    def has_drafts(self) -> bool:
        """Whether something proposes drafts."""
        return self.drafts_expected or self.lookup is not None or bool(self.draft_model)


_ALL_TOGETHER = Scenario(
    "all together",
    is_chunked=True,
    prefix_caching=True,
    is_starved=True,
    has_aborts=True,
    has_pauses=True,
    pipeline_depth=2,
)

SCENARIOS = (
    Scenario("batched"),
    Scenario("chunked", is_chunked=True),
    Scenario("prefix hits", prefix_caching=True),
    Scenario("prefill first", prefix_caching=True, policy=PolicyName.PREFILL_FIRST),
    Scenario("preempted", is_starved=True),
    Scenario("aborts", prefix_caching=True, has_aborts=True),
    Scenario("paused", prefix_caching=True, has_pauses=True, pipeline_depth=2),
    Scenario("overlapped", prefix_caching=True, pipeline_depth=2),
    _ALL_TOGETHER,
    Scenario("drafts", prefix_caching=True, drafts_expected=True),
    Scenario("drafts, starved", is_starved=True, drafts_expected=True),
    Scenario("trees", prefix_caching=True, drafts_expected=True, in_trees=True),
    replace(_ALL_TOGETHER, name="all with trees", drafts_expected=True, in_trees=True),
    Scenario("suffix", is_chunked=True, lookup=SpeculationMethod.SUFFIX),
    replace(_ALL_TOGETHER, name="all with drafts", drafts_expected=True),
    Scenario("adapters", prefix_caching=True, has_loads=True, drafts_expected=True),
    replace(_ALL_TOGETHER, name="adapters, starved", has_loads=True),
    Scenario("ngram", prefix_caching=True, has_aborts=True, lookup=SpeculationMethod.NGRAM),
    Scenario("stored", prefix_caching=True, stores_kv=True),
    replace(_ALL_TOGETHER, name="stored, starved", stores_kv=True),
)
# Every restore pays, however short a step is said to take.
_TIER = KVTierConfig(block_bytes=1, max_bytes=1 << 20, span_blocks=4, latency_s=-1.0)
_COMBINED = CombinedProposer.name  # all models and lookups together
# Those of a draft model, an EAGLE layer or Medusa heads, whose name comes first.
_MODEL_DRAFTS = (
    Scenario("", prefix_caching=True, has_aborts=True),
    Scenario(", chunked", is_chunked=True),
    replace(_ALL_TOGETHER, name=", starved"),
)
_LOOKUPS = (SpeculationMethod.NGRAM, SpeculationMethod.SUFFIX)
_SINGLE_AGAIN = Scenario("batch size 1 again")


def verify(
    load: LoadForThreads,
    options: VerifyOptions,
    eos_token_ids: frozenset[int] = frozenset(),
    progress: Progress | None = None,
    new_matcher: NewMatcher | None = None,
    tokenizer: Tokenizer | None = None,
    open_proposers: OpenProposers | None = None,
    after_group: AfterGroup | None = None,
    load_divided: LoadDivided | None = None,
) -> VerifyReport:
    """Generate, run and compare. Sets torch's thread count, and restores it.

    `load` is called once per thread count, since native kernels keep theirs for life; the model of
    one count is dropped before the next is loaded. Without `new_matcher` no request has a grammar,
    without `tokenizer` none has stop strings, without `open_proposers` no model drafts. With
    `options.num_ranks` or `num_stages`, `load_divided` is needed.

    Raises:
        EngineError: A request fails at batch size 1, a block leaked, or the scheduler is stuck.
    """
    threads_before = _set_torch_threads(options.threads[0])
    try:
        show = progress or _no_progress
        opens = open_proposers or _no_proposers
        verifier = _Verifier(
            load, options, eos_token_ids, show, new_matcher, tokenizer, opens, load_divided
        )
        return verifier.run(after_group or _go_on)
    finally:
        _set_torch_threads(threads_before)


def _set_torch_threads(num_threads: int) -> int:
    """Set torch's thread count, where torch is installed; return the one before."""
    if not has_torch():
        return num_threads
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    return before


def _no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


def _go_on(scenario: str, report: VerifyReport) -> bool:
    return True


def _no_proposers(model: Model, plan: MemoryPlan) -> Mapping[str, Proposer]:
    """Nothing drafts with a model."""
    return {}


def _lookups(*methods: SpeculationMethod) -> list[Proposer]:
    """Proposers without a model."""
    proposers = tuple(ProposerConfig(method) for method in methods)
    return open_lookup_proposers(SpeculationConfig(proposers))


class _Verifier:
    def __init__(
        self,
        load: LoadForThreads,
        options: VerifyOptions,
        eos_token_ids: frozenset[int],
        progress: Progress,
        new_matcher: NewMatcher | None,
        tokenizer: Tokenizer | None,
        open_proposers: OpenProposers,
        load_divided: LoadDivided | None,
    ) -> None:
        self._load = load
        self._load_divided = load_divided
        self._links: StageLinks | None = None
        self._open_proposers = open_proposers
        self._new_matcher = new_matcher
        self._tokenizer = tokenizer
        self._setup = Setup(options.setups[0].threads)
        self._model = model = load(self._setup.threads)
        self._options = options
        self._progress = progress
        self._max_model_len = min(_MAX_MODEL_LEN, model.max_model_len)
        self._blocks_per_sequence = -(-self._max_model_len // options.block_size)
        self._num_blocks = (_MAX_NUM_SEQS + 1) * self._blocks_per_sequence
        self._kv = self._allocated_kv()
        texts = () if tokenizer is None else _texts(tokenizer, model.vocab_size)
        self._requests = random_requests(
            options.num_requests,
            options.seed,
            RequestVocabulary(
                model.vocab_size,
                eos_token_ids,
                new_matcher is not None,
                texts,
                tuple(adapter_ids(model, options.num_adapters)),
            ),
            options.block_size,
            self._max_model_len,
        )
        self._adapters = random_adapters(model, options.num_adapters, options.seed)
        self._proposers = open_proposers(model, self._plan)
        self._num_groups = 0
        self._single: dict[tuple[str, int], Trace] = {}
        # Before its first group, in the first setup, in whose groups each takes part.
        self._ran_single: set[str] = set()
        self._report = VerifyReport(options)

    def run(self, after_group: AfterGroup) -> VerifyReport:
        """All groups, or until `after_group` ends it."""
        total = len(self._requests) * (1 + len(self._options.setups) * self._options.rounds)
        done = 0
        for setup in self._options.setups:
            if setup != self._setup:
                self._use(setup)
            if self._single:
                self._compare_single_runs(setup)
            for scenario, group in self._groups(setup):
                for added in group:
                    if added.request.request_id not in self._ran_single:
                        self._progress("batch size 1", done, total)
                        self._ran_single.add(added.request.request_id)
                        self._single.update(self._run_single(added))
                        done += 1
                self._progress(f"{scenario.name}, threads {setup}", done, total)
                self._compare_group(scenario, group, setup)
                done += 0 if scenario.is_starved else len(group)
                if self._options.fail_fast and self._report.first_mismatch is not None:
                    return self._report
                if not after_group(scenario.name, self._report):
                    return self._report
        self._progress("done", total, total)
        return self._report

    def _use(self, setup: Setup) -> None:
        """Load the model again for another thread count, or in several processes."""
        _set_torch_threads(setup.threads)
        plan = self._plan  # of the model, before it leaves
        del self._model, self._proposers
        self._links = None
        if setup.num_processes == 1:
            self._model = self._load(setup.threads)
        else:
            assert self._load_divided is not None, "several processes are requested"
            self._model, self._links = self._load_divided(setup, plan)
        self._kv = self._allocated_kv()
        self._proposers = self._open_proposers(self._model, self._plan)
        options = self._options
        self._adapters = random_adapters(self._model, options.num_adapters, options.seed)
        self._setup = setup

    def _allocated_kv(self) -> KVCache:
        """For the model that is loaded."""
        options, model = self._options, self._model
        layout = model.kv_layout.stored_as(options.kv_dtype)
        blocks = self._num_blocks, options.block_size
        return allocate_kv(layout, *blocks, model.device, self._plan.states)

    @property
    def _plan(self) -> MemoryPlan:
        """The sizes for proposers with a model. States: one of each sequence, few others."""
        states = StateMemory(_MAX_NUM_SEQS + _NUM_SAVED_STATES, _MAX_DRAFTS)
        plan = MemoryPlan(self._num_blocks, self._max_model_len, _MAX_NUM_SEQS, _MAX_TOKENS, (), ())
        return replace(plan, states=states if self._model.kv_layout.states else NO_STATES)

    def _run_single(self, added: RandomRequest) -> dict[tuple[str, int], Trace]:
        """Each sequence at batch size 1: one slot, the prompt in one step, nothing cached."""
        config = SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=self._max_model_len,
            max_model_len=self._max_model_len,
        )
        request = added.request
        traces: dict[tuple[str, int], Trace] = {}
        for index, one in enumerate(_sequences(added)):
            pool = self._pool(self._num_blocks, prefix_caching=False)
            ran, _ = self._run(config, pool, [Event(0, request.request_id, one)])
            for (request_id, result), trace in ran.items():
                if trace.finish_reason is not None and trace.finish_reason.is_failure:
                    raise EngineError(f"{request.request_id} fails at batch size 1: {trace.error}")
                traces[request_id, index + result] = trace
        return traces

    def _run(
        self,
        config: SchedulerConfig,
        pool: KVBlockPool,
        events: list[Event | AdapterRetired],
        proposer: Proposer | None = None,
    ) -> tuple[dict[tuple[str, int], Trace], RunCounts]:
        return run_requests(
            self._model,
            self._kv,
            replace(config, num_state_slots=self._plan.states.num_slots, state_interval=32),
            pool,
            events,
            self._new_matcher,
            self._tokenizer,
            proposer,
            self._adapters,
            self._links,
        )

    def _proposer(self, scenario: Scenario, rng: random.Random) -> Proposer | None:
        if scenario.draft_model == _COMBINED:
            times = accumulate(iter(rng.random, None))  # so that each has its turns
            models = [*self._proposers.values()]
            return CombinedProposer(_lookups(*_LOOKUPS), models, lambda: next(times))
        if scenario.draft_model:
            return self._proposers[scenario.draft_model]
        if scenario.lookup is not None:
            return _lookups(scenario.lookup)[0]
        if not scenario.drafts_expected:
            return None
        return StaticProposer(
            self._expected_tokens,
            acceptance=rng.choice((0.5, 0.9, 1.0)),
            in_trees=scenario.in_trees and not self._kv.states,
        )

    def _expected_tokens(self, admission: Admission) -> list[int]:
        """The tokens of the single run; none for the beams of a search."""
        request_id, _, index = admission.sequence_id.rpartition("#")
        trace = self._single.get((_original(request_id), int(index)))
        return trace.token_ids if trace else []

    def _compare_single_runs(self, setup: Setup) -> None:
        """A part of the single runs again, in another setup."""
        for request in self._requests[::16]:
            self._compare(_SINGLE_AGAIN, setup, self._run_single(request))

    def _groups(self, setup: Setup) -> Iterator[tuple[Scenario, list[RandomRequest]]]:
        """Every request once per round, in groups of random size, scenarios in turn: the next
        setup continues where the last one ended.

        Starved groups are added to that.
        """
        rng = random.Random(f"groups {self._options.seed} {setup}")
        # small enough that every scenario gets its turn
        num_drawn = self._options.rounds * len(self._requests)
        scenarios = [scenario for scenario in SCENARIOS if self._adapters or not scenario.has_loads]
        for name in (*self._proposers, _COMBINED) if self._proposers else ():
            with_name = (
                replace(scenario, name=name + scenario.name, draft_model=name)
                for scenario in _MODEL_DRAFTS
            )
            scenarios.extend(with_name)
        largest = min(40, max(6, num_drawn // len(scenarios)))
        for _ in range(self._options.rounds):
            order = rng.sample(self._requests, len(self._requests))
            while order:
                scenario = scenarios[self._num_groups % len(scenarios)]
                self._num_groups += 1
                size = rng.randint(6, largest)
                if scenario.is_starved:
                    yield scenario, self._growing_group(rng)
                else:
                    yield scenario, order[:size]
                    del order[:size]

    def _growing_group(self, rng: random.Random) -> list[RandomRequest]:
        """Half of it sequences that grow by blocks: only those get preempted once admitted."""
        long = [request for request in self._requests if request.num_outputs >= LONG_OUTPUTS]
        group = rng.sample(long, min(8, len(long)))
        short = [request for request in self._requests if request.num_outputs < LONG_OUTPUTS]
        return group + rng.sample(short, min(8, len(short)))

    def _compare_group(self, scenario: Scenario, group: list[RandomRequest], setup: Setup) -> None:
        rng = random.Random(f"{scenario.name} {setup} {group[0].request.request_id}")
        config = SchedulerConfig(
            max_num_seqs=rng.randint(6 if scenario.is_starved else 3, _MAX_NUM_SEQS),
            max_num_batched_tokens=rng.choice((5, 16, 17, 33))
            if scenario.is_chunked
            else _MAX_TOKENS,
            max_model_len=self._max_model_len,
            pipeline_depth=max(scenario.pipeline_depth, setup.stages),
            num_stages=setup.stages,
            policy=scenario.policy,
            num_speculative_tokens=rng.choice((1, 4, _MAX_DRAFTS)) if scenario.has_drafts else 0,
            max_loras=rng.randint(1, 4) if scenario.has_loads else None,
            kv_tier=_TIER if scenario.stores_kv and self._has_all_blocks(setup) else None,
        )
        num_blocks = self._num_blocks
        if scenario.is_starved:
            num_blocks = self._blocks_per_sequence + rng.randint(1, 4)
        pool = self._pool(num_blocks, scenario.prefix_caching)
        span = 4 if scenario.is_starved else 2 * len(group)
        events: list[Event | AdapterRetired] = [*_events(group, span, scenario, rng)]
        if scenario.has_loads:
            events += _retirements(events, rng)
        traces, counts = self._run(config, pool, events, self._proposer(scenario, rng))
        self._compare(scenario, setup, traces)
        self._report.of(scenario.name).runs.add(counts)

    def _has_all_blocks(self, setup: Setup) -> bool:
        """Whether this process can move the bytes of KV blocks."""
        return setup.num_processes == 1

    def _pool(self, num_blocks: int, prefix_caching: bool) -> KVBlockPool:
        return KVBlockPool(num_blocks, self._options.block_size, prefix_caching)

    def _compare(
        self, scenario: Scenario, setup: Setup, traces: dict[tuple[str, int], Trace]
    ) -> None:
        for (request_id, index), got in traces.items():
            expected = self._single[_original(request_id), index]
            self._report.compare(scenario.name, setup, f"{request_id}#{index}", expected, got)


# Copies of a request: one that is aborted on its way, one that comes after the others.
_NEIGHBOUR, _AGAIN = "/neighbour", "/again"
_NUM_TEXTS = 1000  # tokens of which stop strings are made


def _original(request_id: str) -> str:
    return request_id.removesuffix(_NEIGHBOUR).removesuffix(_AGAIN)


def _texts(tokenizer: Tokenizer, vocab_size: int) -> tuple[str, ...]:
    """Of the first tokens, those that are complete characters."""
    texts = (tokenizer.decode([i]) for i in range(min(vocab_size, _NUM_TEXTS)))
    return tuple(text for text in texts if text and "\ufffd" not in text)


def _sequences(added: RandomRequest) -> list[RandomRequest]:
    """Each sequence as a request of its own; a search is one."""
    if added.beams is not None:
        return [added]
    request, sequences = added.request, []
    for index in range(request.sampling.n):
        scores = request.sampling.prompt_logprobs if index == 0 else None
        sampling = replace(request.sampling, n=1, prompt_logprobs=scores)
        seed = sequence_seed(request.seed, index)
        sequences.append(RandomRequest(structs.replace(request, sampling=sampling, seed=seed)))
    return sequences


def _events(
    group: list[RandomRequest], span: int, scenario: Scenario, rng: random.Random
) -> list[Event]:
    """Arrivals over `span` steps; with aborts, a third get a twin that is aborted on its way, with
    pauses a third are held for a while. Where KV is stored each comes again, to find its own.
    """
    events = []
    for random_request in group:
        request = random_request.request
        at = rng.randrange(span)
        events.append(Event(at, request.request_id, random_request))
        if scenario.stores_kv:
            copy = structs.replace(request, request_id=request.request_id + _AGAIN)
            copy_at = at + span + rng.randint(0, 60)
            events.append(Event(copy_at, copy.request_id, replace(random_request, request=copy)))
        if scenario.has_pauses and rng.random() < 1 / 3:
            paused_at = at + rng.randint(1, 12)
            events.append(Event(paused_at, request.request_id, Signal.PAUSE))
            resumed_at = paused_at + rng.randint(1, 30)
            events.append(Event(resumed_at, request.request_id, Signal.RESUME))
        if scenario.has_aborts and rng.random() < 1 / 3:
            twin = structs.replace(request, request_id=request.request_id + _NEIGHBOUR)
            twin_at = max(0, at + rng.randint(-3, 3))
            events.append(Event(twin_at, twin.request_id, replace(random_request, request=twin)))
            events.append(Event(twin_at + rng.randint(1, 30), twin.request_id, Signal.ABORT))
    return events


def _retirements(events: list[Event | AdapterRetired], rng: random.Random) -> list[AdapterRetired]:
    """For half of the adapters, soon after the last request with them has arrived: they are
    unloaded or replaced, and what runs and waits ends with what it began with.
    """
    last_at: dict[str, int] = {}
    for event in events:
        if isinstance(event, Event) and isinstance(event.what, RandomRequest):
            adapter_id = event.what.request.adapter_id
            last_at[adapter_id] = max(event.at, last_at.get(adapter_id, 0))
    last_at.pop("", None)
    return [
        AdapterRetired(at + rng.randint(0, 6), adapter_id)
        for adapter_id, at in last_at.items()
        if rng.random() < 1 / 2
    ]
