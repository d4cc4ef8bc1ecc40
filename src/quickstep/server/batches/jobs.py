"""The batches of one server: their records, and one task per batch that processes its lines.

    create -> validating -> in_progress -> finalizing -> completed | failed | expired | cancelled

Lines have a lower priority than live requests (`BatchOptions.added_priority`), run through the
endpoints of their APIs, and wait while the engine restarts. The output of a batch that is
cancelled or expires is kept. Batches live as long as the server; their files may outlive it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from quickstep.core.shares import NoRoom, Shares
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.errors import QuickstepError, RequestError, text_for_clients
from quickstep.server.batches.file_store import (
    BATCH,
    BATCH_OUTPUT,
    USER_DATA,
    FileStore,
    FileWriter,
    StoredFile,
)
from quickstep.server.batches.lines import (
    BatchEndpoint,
    BatchLine,
    LineAnswer,
    LineFault,
    LineRunner,
    LineSlots,
    Submitter,
    expired_line,
    numbered_lines,
    read_line,
    run_lines,
)
from quickstep.server.batches.request_types import BatchRequest
from quickstep.server.batches.response_types import (
    BatchError,
    BatchErrors,
    BatchObject,
    BatchStatus,
    BatchUsage,
    InputTokensDetails,
    OutputTokensDetails,
    RequestCounts,
)
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.http.work_lanes import done_in_thread
from quickstep.server.options import BatchOptions, RequestLimits

_LOG = logging.getLogger("quickstep.server")
_MAX_ERRORS = 100
_CHUNK_LINES = 64
_CHUNK_BYTES = 256 * 1024
_LIMITS = RequestLimits()
_OVER = frozenset({"failed", "completed", "expired", "cancelled"})


class BatchRecord(msgspec.Struct):
    """A batch: its request, status and counts. `BatchJobs` changes it, the routes read it.

    Attributes:
        model: The model's name in the responses to lines that name none.
        entered_at: When it entered each status, in seconds since 1970.
    """

    owner: str
    request: BatchRequest
    model: str
    created_at: int
    window_s: int
    id: str = msgspec.field(default_factory=lambda: f"batch_{secrets.token_hex(16)}")
    status: BatchStatus = "validating"
    entered_at: dict[str, int] = msgspec.field(default_factory=dict)
    errors: list[BatchError] = msgspec.field(default_factory=list)
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the batch has ended."""
        return self.status in _OVER

    def enter(self, status: BatchStatus, now: int) -> None:
        """Change the status."""
        self.status = status
        self.entered_at[status] = now

    def count(self, answer: LineAnswer) -> None:
        """Add a line's answer to the counts."""
        if not answer.succeeded:
            self.num_failed += 1
            return
        self.num_completed += 1
        usage = answer.usage
        self.num_input_tokens += _number(usage, "prompt_tokens", "input_tokens")
        self.num_output_tokens += _number(usage, "completion_tokens", "output_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.num_cached_tokens += _number(details, "cached_tokens")
        details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.num_reasoning_tokens += _number(details, "reasoning_tokens")

    def to_object(self) -> BatchObject:
        """The batch as an object of OpenAI's API."""
        at = self.entered_at.get
        return BatchObject(
            id=self.id,
            endpoint=self.request.endpoint,
            input_file_id=self.request.input_file_id,
            completion_window=self.request.completion_window,
            status=self.status,
            created_at=self.created_at,
            expires_at=self.created_at + self.window_s,
            model=self.model,
            request_counts=RequestCounts(self.num_lines, self.num_completed, self.num_failed),
            usage=BatchUsage(
                self.num_input_tokens,
                InputTokensDetails(self.num_cached_tokens),
                self.num_output_tokens,
                OutputTokensDetails(self.num_reasoning_tokens),
                self.num_input_tokens + self.num_output_tokens,
            ),
            errors=BatchErrors(data=self.errors) if self.errors else None,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            in_progress_at=at("in_progress"),
            finalizing_at=at("finalizing"),
            completed_at=at("completed"),
            failed_at=at("failed"),
            expired_at=at("expired"),
            cancelling_at=at("cancelling"),
            cancelled_at=at("cancelled"),
            metadata=self.request.metadata,
        )


def _number(counts: Mapping[str, Any], *names: str) -> int:
    """The first of these counts that is present and not 0, else 0."""
    return next((int(counts[name]) for name in names if counts.get(name)), 0)


class _Job(msgspec.Struct):
    """A running batch and its files. `answered` are the custom ids of the lines with an answer."""

    batch: BatchRecord
    source: StoredFile
    output: FileWriter
    errors: FileWriter
    answered: set[str] = msgspec.field(default_factory=set)
    writing: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    async def write(self, answer: LineAnswer) -> None:
        """Write a line's answer to its file and count it."""
        async with self.writing:
            await done_in_thread(lambda: self._write(answer))

    def _write(self, answer: LineAnswer) -> None:
        (self.output if answer.succeeded else self.errors).write(answer.text())
        self.answered.add(answer.custom_id)
        self.batch.count(answer)

    def expire(self, lines: Iterator[BatchLine]) -> bool:
        """Write the next lines without an answer to the error file; False if there are no more."""
        chunk = _chunk_of(lines)
        for line in chunk:
            if line.custom_id not in self.answered:
                self.errors.write(expired_line(line.custom_id))
                self.batch.num_failed += 1
        return bool(chunk)

    def complete(self) -> None:
        """Nothing follows in either file."""
        for writer in (self.output, self.errors):
            if not writer.is_empty:
                writer.complete()


class BatchJobs:
    """All batches of one server. Everything runs in its event loop, except file access, which runs
    in threads, a chunk of lines at a time.
    """

    def __init__(
        self,
        store: FileStore,
        endpoints: Mapping[str, BatchEndpoint],
        options: BatchOptions,
        limits: RequestLimits = _LIMITS,
        weight_of: Callable[[str], float] = lambda owner: 1.0,
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._options = options
        self._limits = limits
        self._weight_of = weight_of
        self._slots = LineSlots(options.concurrency)
        self._shares = Shares(options.num_active)  # of batches that have not ended
        self._batches: dict[str, BatchRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owned = OwnedTasks(_LOG)

    @property
    def urls(self) -> tuple[str, ...]:
        """The endpoints that lines may call."""
        return tuple(self._endpoints)

    def create(self, batch: BatchRecord) -> BatchRecord:
        """Start a batch of a file of the same owner. Raises RequestError."""
        source = self._store.get(batch.owner, batch.request.input_file_id, "input_file_id")
        if source.purpose == USER_DATA:
            raise RequestError(
                f"input_file_id is a file with the purpose {USER_DATA}; upload it with {BATCH}",
                param="input_file_id",
            )
        self._take_place(batch.owner)
        try:
            job = self._open(batch, source)
        except BaseException:
            self._shares.give_back(batch.owner)
            raise
        self._forget_old()
        self._batches[batch.id] = batch
        task = self._owned.start(self._run(job), batch.id)
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._task_ended(job))
        return batch

    def _take_place(self, owner: str) -> None:
        """Count one more active batch of an owner. Raises RequestError."""
        num_own = self._shares.held(owner)
        if owner and num_own >= self._options.active_per_key:
            raise RequestError(
                f"{num_own} batches of your API key are active, which is the limit; wait for one",
                status=429,
            )
        try:
            self._shares.take(owner, weight=self._weight_of(owner))
        except NoRoom as refusal:
            whose = " of your API key" if refusal.owner else ""
            raise RequestError(
                f"{refusal.num_held} batches{whose} are active, {refusal.limit}; wait for one",
                status=429,
            ) from None

    def _open(self, batch: BatchRecord, source: StoredFile) -> _Job:
        """The batch with its new files."""
        expiry = batch.request.output_expires_after
        life_s = None if expiry is None else expiry.seconds
        name = f"{batch.id}_{{}}.jsonl".format
        output = self._store.new(batch.owner, name("output"), BATCH_OUTPUT, life_s)
        try:
            errors = self._store.new(batch.owner, name("error"), BATCH_OUTPUT, life_s)
        except BaseException:
            output.discard()
            raise
        return _Job(batch, source, output, errors)

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch of this owner. Raises RequestError 404."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise RouteNotFound(
                f"there is no batch {batch_id[:100]!r}", param="batch_id", code="batch_not_found"
            )
        return batch

    def batches(self, owner: str) -> list[BatchRecord]:
        """The batches of this owner, the newest first."""
        return [batch for batch in reversed(self._batches.values()) if batch.owner == owner]

    def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Cancel a batch; answers already written are kept. Raises RequestError if it has ended."""
        if batch.is_over:
            raise RequestError(f"the batch is {batch.status}; it cannot be cancelled")
        if batch.status != "cancelling":
            batch.enter("cancelling", self._store.now())
            self._tasks[batch.id].cancel()
        return batch

    async def stop(self) -> None:
        """Cancel all running batches and wait for their tasks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: _Job) -> None:
        batch = job.batch
        try:
            status = await self._process(job)
            await done_in_thread(job.complete)
        except asyncio.CancelledError:
            if batch.status != "cancelling":  # the server stops
                self._finish(job, "failed", _error("server_stopped", "the server was stopped"))
                raise
            self._finish(job, "cancelled")
        except QuickstepError as error:
            self._finish(job, "failed", _error("batch_failed", str(error)))
        except OSError as error:
            _LOG.exception("%s failed", batch.id)
            why = f"a file of the batch cannot be used: {error.strerror}"
            self._finish(job, "failed", _error("batch_failed", why))
        except Exception:  # the task's top
            _LOG.exception("%s failed", batch.id)
            self._finish(job, "failed", _error("internal_error", "the server's log says why"))
        else:
            self._finish(job, status)

    def _task_ended(self, job: _Job) -> None:
        """Finish the batch of a task that was cancelled before its first step and never ran."""
        del self._tasks[job.batch.id]
        if not job.batch.is_over:
            self._finish(job, "cancelled" if job.batch.status == "cancelling" else "failed")

    async def _process(self, job: _Job) -> BatchStatus:
        """Check the input, answer its lines, and return the final status."""
        batch = job.batch
        faults, batch.num_lines = await done_in_thread(lambda: self._faults(job))
        batch.errors.extend(faults)
        if faults:
            return "failed"
        batch.enter("in_progress", self._store.now())
        left_s = batch.created_at + batch.window_s - self._store.now()
        try:
            async with asyncio.timeout(left_s):
                async with aclosing(self._lines(job)) as lines:
                    concurrency = self._options.concurrency
                    await run_lines(lines, self._runner(job).answer, job.write, concurrency)
        except TimeoutError:
            await self._expire_rest(job)
            return "expired"
        batch.enter("finalizing", self._store.now())
        return "completed"

    def _runner(self, job: _Job) -> LineRunner:
        """The runner of a batch's lines; all batches share the slots, first come, first served."""
        options = self._options
        return LineRunner(
            self._endpoints,
            self._slots,
            Submitter(job.batch.owner, options.added_priority),
            options.num_tries,
            options.retry_s,
        )

    def _faults(self, job: _Job) -> tuple[list[BatchError], int]:
        """The faults of the input, and its number of lines."""
        faults: list[BatchError] = []
        ids: set[str] = set()
        num_lines = 0
        with self._store.path(job.source).open("rb") as file:
            for number, text in numbered_lines(file, self._limits):
                num_lines += 1
                fault = self._fault(job, number, text, ids)
                if fault is not None:
                    faults.append(fault)
                if len(faults) == _MAX_ERRORS or num_lines > self._options.num_lines:
                    break
        if num_lines == 0:
            faults.append(_error("empty_file", "the input file holds no request"))
        if num_lines > self._options.num_lines:
            limit = f"the input file has more than {self._options.num_lines} requests"
            faults.append(_error("too_many_requests", limit))
        return faults, num_lines

    def _fault(self, job: _Job, number: int, text: bytes, ids: set[str]) -> BatchError | None:
        try:
            line = read_line(number, text, (job.batch.request.endpoint,), self._limits)
        except LineFault as fault:
            return BatchError(
                code=fault.code or "invalid_request",
                message=str(fault),
                param=fault.param,
                line=number,
            )
        if line.custom_id in ids:
            message = f"line {number}: custom_id {line.custom_id[:100]!r} occurs twice"
            return BatchError(
                code="duplicate_custom_id", message=message, param="custom_id", line=number
            )
        ids.add(line.custom_id)
        return None

    def _read(self, job: _Job) -> Iterator[BatchLine]:
        with self._store.path(job.source).open("rb") as file:
            for number, text in numbered_lines(file, self._limits):
                yield read_line(number, text, self._endpoints, self._limits)

    async def _lines(self, job: _Job) -> AsyncGenerator[BatchLine, None]:
        lines = self._read(job)
        while chunk := await done_in_thread(partial(_chunk_of, lines)):
            for line in chunk:
                yield line

    async def _expire_rest(self, job: _Job) -> None:
        """Write the lines without an answer to the error file."""
        lines = self._read(job)
        while await done_in_thread(partial(job.expire, lines)):
            pass

    def _finish(self, job: _Job, status: BatchStatus, error: BatchError | None = None) -> None:
        """Commit the files, and enter the final status."""
        batch = job.batch
        if error is not None:
            batch.errors.append(error)
        try:
            batch.output_file_id = _committed_id(job.output)
            batch.error_file_id = _committed_id(job.errors)
        except (OSError, QuickstepError) as failure:  # whatever the disk does, the batch ends
            _LOG.error("the files of %s are not complete: %s", batch.id, failure)
            batch.errors.append(_error("batch_failed", text_for_clients(failure)))
            status = "failed"
        batch.enter(status, self._store.now())
        self._shares.give_back(batch.owner)  # now, as a client may know that it is over
        _LOG.info(
            "%s is %s: %d of %d lines answered, %d failed",
            batch.id,
            status,
            batch.num_completed + batch.num_failed,
            batch.num_lines,
            batch.num_failed,
        )

    def _forget_old(self) -> None:
        """Drop ended batches beyond the limit, first those of the owner that has most of them."""
        over = [batch for batch in self._batches.values() if batch.is_over]
        while over and len(self._batches) >= self._options.num_kept:
            ((owner, _),) = Counter(batch.owner for batch in over).most_common(1)
            first = next(batch for batch in over if batch.owner == owner)
            over.remove(first)
            del self._batches[first.id]


def _chunk_of(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """The next lines, no more than a thread reads in a moment; [] at the end."""
    chunk: list[BatchLine] = []
    num_bytes = 0
    for line in lines:
        chunk.append(line)
        num_bytes += len(line.body)
        if len(chunk) == _CHUNK_LINES or num_bytes >= _CHUNK_BYTES:
            break
    return chunk


def _committed_id(writer: FileWriter) -> str | None:
    """Commit a file and return its id; discard an empty one and return None."""
    if not writer.is_empty:
        return writer.commit().id
    writer.discard()
    return None


def _error(code: str, message: str) -> BatchError:
    return BatchError(code=code, message=message)
