"""One scheduler, its shadow executor and a clock: what every scheduler test drives.

Each call is followed by `Scheduler.check()`. `verify` is the promise itself: every sequence got the
tokens that it gets when no other request runs, whatever happened to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from msgspec import structs
from shadow_executor import ShadowExecutor, Sizes, Trouble

from quickstep.config import KVTierConfig, PolicyName, SchedulerConfig
from quickstep.core.cost_model import CostModel, LinearCostModel
from quickstep.core.policies import Policy, PrefillFirstPolicy, StepView, make_policy
from quickstep.core.resources.adapter_residency import AdapterResidency
from quickstep.core.resources.block_pool import Digest, KVBlockPool, chain_digest
from quickstep.core.scheduler import Scheduler
from quickstep.core.service_order import PriorityOrder
from quickstep.errors import RequestError
from quickstep.types import (
    Activity,
    FinishReason,
    Phase,
    Request,
    Resumed,
    SamplingParams,
    SequenceOutput,
    SequenceTimings,
    StepPlan,
    StepRecord,
    TokenLogprobs,
)
from quickstep.verify.stored_blocks import StoredBlocks

NATURAL_ENDS = frozenset(
    {
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.MAX_TOKENS,
        FinishReason.CONTEXT_LIMIT,
        FinishReason.REPETITION,
        FinishReason.POOLED,
    }
)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def weak_digest(parent: bytes, token_ids: object) -> bytes:
    """Four digests for everything: only comparing tokens keeps prefixes apart."""
    return bytes([chain_digest(parent, list(token_ids))[0] & 3])  # type: ignore[call-overload]


@dataclass(frozen=True)
class Setup:
    """The sizes of a world."""

    num_blocks: int = 16
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 40
    pipeline_depth: int = 1
    num_stages: int = 1
    policy: PolicyName = PolicyName.MIXED
    prefix_caching: bool = True
    digest: Digest = chain_digest
    inter_token_target_s: float = 0.005
    priority_aging_s: float = 10.0
    max_waiting: int | None = None
    use_kv_cache: bool = True
    max_drafts: int = 0
    max_loras: int | None = None
    lora_bytes: int | None = None
    pinned: frozenset[str] = frozenset()  # adapter ids
    token_s: float = 1e-4  # what each token adds to a step
    halves: bool = False  # a policy of its own, in place of `policy`
    stored_blocks: int = 0  # most KV blocks that are kept outside of the pool
    state_slots: int = 0  # of a model with layers that keep states
    state_interval: int = 512

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            pipeline_depth=self.pipeline_depth,
            num_stages=self.num_stages,
            policy=self.policy,
            inter_token_target_s=self.inter_token_target_s,
            priority_aging_s=self.priority_aging_s,
            use_kv_cache=self.use_kv_cache,
            num_speculative_tokens=self.max_drafts,
            max_loras=self.max_loras,
            lora_bytes=self.lora_bytes,
            kv_tier=KVTierConfig(1, self.stored_blocks, span_blocks=3, latency_s=0.0)
            if self.stored_blocks
            else None,
            num_state_slots=self.state_slots,
            state_interval=self.state_interval,
        )

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            self.num_blocks,
            self.block_size,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            self.max_drafts,
            self.token_s,
            self.state_slots,
        )


@dataclass
class Received:
    """What a client got of one sequence."""

    request: Request
    index: int
    deadline_s: float | None
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    timings: SequenceTimings | None = None
    error: str = ""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    embedding: tuple[float, ...] | None = None

    @property
    def gained(self) -> tuple[object, ...]:
        return (self.token_ids, self.reason, self.prompt_logprobs, self.embedding)


class HalvesPolicy(PrefillFirstPolicy):
    """Prefill first with half of a step, then decode: preempts more than the built-in ones."""

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        return (view.num_tokens_left + 1) // 2 if phase is Phase.PREFILL else view.num_tokens_left


def policy_of(setup: Setup) -> Policy:
    if setup.halves:
        return HalvesPolicy(PriorityOrder(setup.priority_aging_s))
    return make_policy(setup.config)


class CountingPool(KVBlockPool):
    """Counts the blocks whose tokens are compared or hashed."""

    num_read = 0

    def _block_tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        self.num_read += 1
        return super()._block_tokens(token_ids, index)


def open_scheduler(setup: Setup) -> Scheduler:
    pool = KVBlockPool(setup.num_blocks, setup.block_size, setup.prefix_caching, setup.digest)
    return Scheduler(setup.config, pool, policy_of(setup), LinearCostModel())


class World:
    """Drives one scheduler; `open_one` lets a test plant a broken one."""

    def __init__(
        self, setup: Setup, open_one: Callable[[Setup], Scheduler] = open_scheduler
    ) -> None:
        self.setup = setup
        self.scheduler = open_one(setup)
        self.shadow = ShadowExecutor(setup.sizes, self._root_of)
        self.now = 0.0
        self.in_flight: deque[StepPlan] = deque()
        self.received: dict[str, Received] = {}
        self.records: list[StepRecord] = []
        self.plans: list[StepPlan] = []
        self.paused: set[str] = set()  # request ids
        self.planned_s = 0.0  # when the first step was planned
        self.committed_s = 0.0  # when the last one was committed
        self._holders: dict[int, str] = {}  # by slot, as the plans say
        self.loading: list[str] = []  # adapters, in the order of the loads
        self.resident: set[str] = set()
        self.retired: set[str] = set()  # adapters that are not forgotten yet
        self.unwanted: set[str] = set()  # those that were retired while they were loaded
        self.stored: StoredBlocks[tuple[int | None, ...]] | None = None
        if setup.stored_blocks:
            self.stored = StoredBlocks(
                self.scheduler, self.shadow.block_content, self.shadow.set_block_content
            )

    # -- the scheduler's calls --------------------------------------------------------------------

    def add(self, request: Request) -> bool:
        """False if it was refused."""
        if request.adapter_id:
            self._register(request.adapter_id)
        try:
            self.scheduler.add(request, self.now)
        except RequestError:
            self.scheduler.check()
            return False
        deadline_s = None if request.timeout_s is None else self.now + request.timeout_s
        for index in request.indices:
            self.received[f"{request.request_id}#{index}"] = Received(request, index, deadline_s)
        for part in request.resumed:
            if part.index in request.indices:
                self._has_before(request, part)
        self.scheduler.check()
        return True

    def _has_before(self, request: Request, part: Resumed) -> None:
        """The client has this of a sequence, from another engine."""
        one = self.received[f"{request.request_id}#{part.index}"]
        one.token_ids.extend(part.token_ids)
        scores = run_alone(request, self.setup)[part.index].prompt_logprobs
        one.prompt_logprobs += scores if part.token_ids else scores[: part.num_prompt_logprobs]

    @property
    def room(self) -> AdapterResidency | None:
        """The adapters in compute memory."""
        places = self.scheduler.held.adapters
        return None if places is None else places.residency

    def _register(self, adapter_id: str) -> None:
        """Let requests name an adapter, of as many bytes as its name has letters."""
        self.retired.discard(adapter_id)
        self.scheduler.register_adapter(
            adapter_id, len(adapter_id), adapter_id in self.setup.pinned
        )

    def retire(self, adapter_id: str) -> None:
        """No new request names an adapter; it is freed when no sequence uses it."""
        self.retired.add(adapter_id)
        room = self.room
        if room is not None and adapter_id in room:
            self.scheduler.register_adapter(adapter_id, len(adapter_id))  # it is pinned no more
        self._free_retired()

    def _free_retired(self) -> None:
        forgotten = {one for one in self.retired if self.scheduler.retire_adapter(one)}
        assert not forgotten & {one.request.adapter_id for one in self.live}, "it is in use"
        self.retired -= forgotten

    def abort(self, request_id: str, index: int | None = None) -> None:
        live = [one for one in self._of(request_id, index) if one.reason is None]
        outputs = self.scheduler.abort(request_id, self.now, index=index)
        assert len(outputs) == len(live), "abort ended other sequences than the live ones"
        self._take(outputs, FinishReason.ABORTED)

    def expire(self) -> None:
        due = [
            one
            for one in self.received.values()
            if one.reason is None and one.deadline_s is not None and one.deadline_s <= self.now
        ]
        outputs = self.scheduler.expire(self.now)
        late = [output for output in outputs if output.finish_reason is not FinishReason.ERROR]
        assert len(late) == len(due), "expire ended other sequences than those due"
        lost = tuple(output for output in outputs if output.finish_reason is FinishReason.ERROR)
        assert not lost or self.setup.pinned, "no adapter is pinned, and one has no room"
        self._take(tuple(late), FinishReason.DEADLINE)
        self._take(lost, FinishReason.ERROR)

    def pause(self, request_id: str) -> None:
        self.scheduler.pause(request_id, self.now)
        self.scheduler.check()
        self.paused.add(request_id)

    def resume(self, request_id: str) -> None:
        self.scheduler.resume(request_id, self.now)
        self.scheduler.check()
        self.paused.discard(request_id)

    def plan(self) -> StepPlan | None:
        self._free_retired()
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        self._follow_adapter_orders()
        if plan is None:
            if self.setup.pinned:  # then one may have no room: `wakeup` says that it is to be ended
                wakeup_s = self.scheduler.wakeup(self.now)
                if wakeup_s is not None and wakeup_s <= self.now:
                    self.expire()
                    return self.plan()
            waits = self.waits_for_more or self.loading or self.restores
            stuck = self.active and not self.in_flight and not waits
            assert not stuck, "nothing is in flight, sequences live, and no step is planned"
            return None
        self._holders |= {one.slot: one.sequence_id for one in plan.admitted}
        planned = {self.received[self._holders[row.slot]].request.request_id for row in plan.rows}
        assert not planned & self.paused, f"{planned & self.paused} are paused and have rows"
        if self.setup.max_loras is not None:
            missing = {row.adapter for row in plan.rows} - self.resident - {""}
            assert not missing, f"rows need {missing}, which are not in memory"
        assert len(self.in_flight) < self.setup.pipeline_depth, "planned deeper than allowed"
        has_unknown = any(not row.token_ids for row in plan.rows)
        assert not has_unknown or self.in_flight, "a token is unknown with no step in flight"
        assert not has_unknown or self.setup.num_stages == 1, "a stage does not know a token"
        self.planned_s = self.planned_s if self.plans else self.now
        self.shadow.submit(plan)
        self.in_flight.append(plan)
        self.plans.append(plan)
        return plan

    def commit(
        self, trouble: Trouble = Trouble.NONE, failing: frozenset[int] = frozenset()
    ) -> None:
        """Run the oldest plan and hand its result in."""
        plan = self.in_flight.popleft()
        if trouble is not Trouble.ROWS:
            failing = frozenset()
        result, failed_ids = self.shadow.run_next(trouble, failing)
        to_fail = {name for name in failed_ids if self.received[name].reason is None}
        if result is None:
            outputs = self.scheduler.fail(plan, "planted failure", self.now)
        else:
            self.now += result.seconds
            outcome = self.scheduler.commit(plan, result, self.now)
            self.records.append(outcome.record)
            self.committed_s = self.now
            outputs = outcome.outputs
        failed = {
            f"{one.request_id}#{one.index}"
            for one in outputs
            if one.finish_reason is FinishReason.ERROR
        }
        assert failed == to_fail, f"{failed} failed, {to_fail} should have"
        self._take(outputs, None)

    def _follow_adapter_orders(self) -> None:
        orders = self.scheduler.take_adapter_orders()
        if orders is None:
            return
        used = {row.adapter for plan in self.in_flight for row in plan.rows}
        assert not used & set(orders.evictions), "an adapter of a step in flight is freed"
        unknown = set(orders.evictions) - self.resident - set(self.loading) - self.unwanted
        assert not unknown, f"freed {unknown}, which are not in memory"
        self.resident -= set(orders.evictions)
        self.unwanted.clear()
        self.loading = [one for one in self.loading if one not in orders.evictions]
        self.loading += orders.loads
        assert self.setup.max_loras is not None
        assert len(self.resident) + len(self.loading) <= self.setup.max_loras, "no place for a load"

    def finish_load(self, fails: bool = False) -> None:
        """End the oldest load, if there is one."""
        if not self.loading:
            return
        adapter_id = self.loading.pop(0)
        room = self.room
        # else it was retired meanwhile
        is_wanted = room is not None and room.state(adapter_id).value == "loading"
        if not is_wanted:
            self.unwanted.add(adapter_id)
        if not fails:
            assert self.scheduler.adapter_loaded(adapter_id, self.now) == is_wanted
            if is_wanted:
                self.resident.add(adapter_id)
            self.scheduler.check()
            return
        waiting = {
            f"{one.request.request_id}#{one.index}"
            for one in self.live
            if one.request.adapter_id == adapter_id
        }
        outputs = self.scheduler.adapter_failed(adapter_id, "planted failure", self.now)
        assert {f"{one.request_id}#{one.index}" for one in outputs} == waiting
        self._take(outputs, FinishReason.ERROR)

    @property
    def restores(self) -> bool:
        """Whether KV blocks are on their way back to the pool."""
        tiers = self.scheduler.held.tiers
        return tiers is not None and tiers.is_restoring

    def move_blocks(self, fails: bool = False) -> None:
        """Carry out what is ordered for KV blocks that are kept outside of the pool; what is stored
        so far cannot be read if it `fails`.
        """
        if self.stored is None:
            return
        if fails:
            self.stored.broken.update(self.stored.spans)
        self.stored.restore_all(self.now)
        self.stored.save_all()
        self.scheduler.check()

    def advance(self, seconds: float) -> None:
        self.now += seconds

    # -- the end ----------------------------------------------------------------------------------

    @property
    def live(self) -> list[Received]:
        return [one for one in self.received.values() if one.reason is None]

    @property
    def active(self) -> list[Received]:
        """Live and not paused."""
        return [one for one in self.live if one.request.request_id not in self.paused]

    def drain(self, max_steps: int = 3000) -> None:
        """Run until everything is over: first what is not paused, which must not wait for it."""
        self._run_while(lambda: bool(self.active or self.in_flight), max_steps)
        for request_id in sorted(self.paused):
            self.resume(request_id)
        self._run_while(self.scheduler.has_work, max_steps)
        assert not self.live, "the scheduler is idle and sequences live"

    @property
    def waits_for_more(self) -> bool:
        """Whether the policy waits for more requests, for a limited time."""
        waits = self.setup.policy in (PolicyName.DYNAMIC, PolicyName.LENGTH_GROUPED)
        return waits and self.scheduler.wakeup(self.now) is not None

    def _run_while(self, goes_on: Callable[[], bool], max_steps: int) -> None:
        for _ in range(max_steps):
            if not goes_on():
                break
            while len(self.in_flight) < self.setup.pipeline_depth and self.plan() is not None:
                pass
            self.finish_load()
            self.move_blocks()
            if self.in_flight:
                self.commit()
            elif self.waits_for_more:
                self.advance(self.setup.config.batch_timeout_s)
        assert not goes_on(), f"work is left after {max_steps} steps"

    def verify(self) -> None:
        """Check tokens, blocks and seconds once all is over."""
        stats = self.scheduler.stats()
        assert stats.blocks.num_used == 0, f"{stats.blocks.num_used} blocks leaked"
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert (stats.num_preempted, stats.num_paused) == (0, 0)
        for one in self.received.values():
            self._verify_tokens(one)
            self._verify_timings(one)
        self._verify_seconds()

    def _verify_seconds(self) -> None:
        """From the first plan to the last commit, every second is counted once."""
        totals = self.scheduler.stats().totals
        timings = [one.timings for one in self.received.values() if one.timings]
        attributed = [one.device_s for one in timings]
        recomputed = [one.recomputed_s for one in timings]
        rejected = [one.rejected_s for one in timings]
        others = totals.unclaimed_s, totals.idle_s
        wall_s = self.committed_s - self.planned_s if self.records else 0.0
        parts_s = math.fsum([*attributed, *recomputed, *rejected, *others])
        assert _close(parts_s, wall_s), f"{parts_s} s are accounted of {wall_s} s"
        assert _close(totals.attributed_s, math.fsum(attributed))
        assert _close(totals.recomputed_s, math.fsum(recomputed))
        assert _close(totals.rejected_s, math.fsum(rejected))
        assert totals.num_drafts == sum(record.num_drafts for record in self.records)
        assert totals.num_drafts >= totals.num_accepted >= 0
        assert totals.num_drafts > totals.num_accepted or not any(rejected)
        assert _close(totals.busy_s, math.fsum(record.seconds for record in self.records))
        assert _close(totals.wall_s, wall_s)
        assert _close(totals.wall_s, totals.busy_s + totals.idle_s)
        assert totals.num_preemptions or not any(recomputed), "recomputed without a preemption"
        for record in self.records:
            assert record.decode_s > -1e-12
            charged_s = math.fsum(
                [record.decode_s, *(prefill.seconds for prefill in record.prefills)]
            )
            assert charged_s == 0.0 or _close(charged_s, record.seconds)
            tokens = sum(prefill.num_tokens for prefill in record.prefills)
            assert tokens == record.num_prefill_tokens
            assert len(record.prefills) == record.num_prefill_rows

    def _verify_tokens(self, one: Received) -> None:
        alone = run_alone(one.request, self.setup)[one.index]
        name = f"{one.request.request_id}#{one.index}"
        expected = alone.token_ids
        scores = alone.prompt_logprobs[: len(one.prompt_logprobs)]
        assert one.prompt_logprobs == scores, f"{name} got other prompt logprobs than alone"
        if one.reason in NATURAL_ENDS:
            assert one.gained == alone.gained, f"{name} got {one.gained}, alone {alone.gained}"
        else:
            start = expected[: len(one.token_ids)]
            assert one.token_ids == start, f"{name} got {one.token_ids}, alone {expected}"

    def _verify_timings(self, one: Received) -> None:
        timings = one.timings
        assert timings is not None, "an end without timings"
        busy_s = timings.queue_s + timings.prefill_s + timings.decode_s
        parts = busy_s + timings.preempted_s + timings.paused_s + timings.adapter_s
        parts += timings.restore_s
        total = timings.finished_s - timings.arrival_s
        assert math.isclose(parts, total, rel_tol=1e-9, abs_tol=1e-9), "the parts do not add up"
        spent = dict.fromkeys(Activity, 0.0)
        ends = [since_s for _, since_s in timings.activities[1:]] + [timings.finished_s]
        for (activity, since_s), end_s in zip(timings.activities, ends, strict=True):
            spent[activity] += end_s - since_s
        noted = (timings.queue_s, timings.prefill_s, timings.decode_s)
        noted += (timings.preempted_s, timings.paused_s, timings.adapter_s, timings.restore_s)
        for seconds, part_s in zip(spent.values(), noted, strict=True):
            assert math.isclose(seconds, part_s, abs_tol=1e-9), "activities and parts differ"
        assert timings.num_output_tokens == len(one.token_ids)
        assert timings.num_prompt_tokens == len(one.request.prompt_token_ids)
        num_known = timings.num_prompt_tokens + timings.num_resumed_tokens
        assert timings.num_cached_tokens <= min(timings.num_prompt_tokens, num_known - 1)

    def _take(self, outputs: tuple[SequenceOutput, ...], reason: FinishReason | None) -> None:
        self.scheduler.check()
        for output in outputs:
            one = self.received[f"{output.request_id}#{output.index}"]
            assert one.reason is None, "output after the end"
            says = output.token_ids or output.prompt_logprobs or output.finish_reason
            assert says, "an output that says nothing"
            one.prompt_logprobs += output.prompt_logprobs
            one.embedding = output.embedding
            wanted = one.request.sampling.prompt_logprobs is not None and one.index == 0
            num_prompt = len(one.request.prompt_token_ids) if wanted else 0
            assert len(one.prompt_logprobs) <= num_prompt, "more prompt logprobs than tokens"
            ahead = one.token_ids or output.token_ids
            assert not ahead or len(one.prompt_logprobs) == num_prompt, "a token before the prompt"
            assert reason is None or output.finish_reason is reason
            one.token_ids.extend(output.token_ids)
            one.reason = output.finish_reason
            one.timings = output.timings
            one.error = output.error
            assert (output.timings is not None) == (one.reason is not None)
            ended = output.finish_reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
            assert output.stop_token_id == (one.token_ids[-1] if ended else None)

    def _of(self, request_id: str, index: int | None) -> list[Received]:
        return [
            one
            for one in self.received.values()
            if one.request.request_id == request_id and index in (None, one.index)
        ]

    def _root_of(self, sequence_id: str) -> int:
        request = self.received[sequence_id].request
        text = f"{len(request.adapter_id)}:{request.adapter_id}{request.cache_salt}"
        return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little")


_ALONE: dict[str, Received] = {}


def run_alone(request: Request, setup: Setup) -> list[Received]:
    """What each sequence of a request gets in a scheduler that serves nothing else."""
    plain = structs.replace(request, request_id="alone", priority=0, timeout_s=None, resumed=())
    quiet = Setup(
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        max_num_batched_tokens=64,
        max_model_len=setup.max_model_len,
        prefix_caching=False,
    )
    return [_alone_at(plain, quiet, index) for index in range(request.sampling.n)]


def _alone_at(request: Request, setup: Setup, index: int) -> Received:
    key = f"{request!r} {setup!r} {index}"
    if key not in _ALONE:
        world = World(setup)
        world.add(request)
        for other in set(range(request.sampling.n)) - {index}:
            world.abort("alone", other)
        world.drain()
        _ALONE[key] = world.received[f"alone#{index}"]
    return _ALONE[key]


PROMPT = (0, 1, 1, 0, 1, 0, 0, 1)


def ask(
    request_id: str = "a",
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int | None = 4,
    n: int = 1,
    priority: int = 0,
    timeout_s: float | None = None,
) -> Request:
    """A request that only `max_tokens` or the context limit ends."""
    sampling = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    return Request(request_id, prompt, sampling, seed=5, priority=priority, timeout_s=timeout_s)


def finish(world: World) -> None:
    world.drain()
    world.verify()
