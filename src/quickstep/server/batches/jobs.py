"""Batches that run in the server: one task each, all of them through a few slots of the engine.

    create -> validating -> in_progress -> finalizing -> completed | failed | expired | cancelled

Lines come behind live requests (`BatchOptions.added_priority`), are answered by the APIs' own
routes, and wait patiently while the engine restarts. What is written when a batch is cancelled or
runs out of time is kept. Batches live as long as the server; their files may outlive it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial

import msgspec

from quickstep.errors import QuickstepError, RequestError
from quickstep.server.batches.file_options import BatchOptions
from quickstep.server.batches.file_store import FileStore, FileWriter, StoredFile
from quickstep.server.batches.lines import (
    BatchLine,
    Endpoint,
    LineAnswer,
    LineFault,
    Submitter,
    expired_line,
    numbered_lines,
    read_line,
)
from quickstep.server.batches.record import Batch
from quickstep.server.batches.response_types import BatchError, BatchStatus
from quickstep.server.batches.run import LineRunner, LineSlots, run_lines
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.http.work_lanes import done_in_thread
from quickstep.server.options import RequestLimits

__all__ = ["BatchJobs"]

_LOG = logging.getLogger("quickstep.server")
_OUTPUT = "batch_output"
_MAX_ERRORS = 100
_PIECE_LINES = 64
_PIECE_BYTES = 256 * 1024
_LIMITS = RequestLimits()


class _Job(msgspec.Struct):
    """A batch at work. `answered` are the custom ids that are done."""

    batch: Batch
    source: StoredFile
    output: FileWriter
    errors: FileWriter
    answered: set[str] = msgspec.field(default_factory=set)
    writing: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    async def write(self, answer: LineAnswer) -> None:
        """A line's answer goes into its file and is counted."""
        async with self.writing:
            await done_in_thread(lambda: self._write(answer))

    def _write(self, answer: LineAnswer) -> None:
        (self.output if answer.succeeded else self.errors).write(answer.text())
        self.answered.add(answer.custom_id)
        self.batch.count(answer)

    def expire(self, lines: Iterator[BatchLine]) -> bool:
        """A piece of the lines goes into the error file, but for those that were answered; False
        when there are no more.
        """
        piece = _piece(lines)
        for line in piece:
            if line.custom_id not in self.answered:
                self.errors.write(expired_line(line.custom_id))
                self.batch.num_failed += 1
        return bool(piece)


class BatchJobs:
    """All batches of one server. Everything runs in its event loop, but for work on files, which
    goes into threads a piece at a time.
    """

    def __init__(
        self,
        store: FileStore,
        endpoints: Mapping[str, Endpoint],
        options: BatchOptions,
        limits: RequestLimits = _LIMITS,
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._options = options
        self._limits = limits
        self._slots = LineSlots(options.concurrency)
        self._batches: dict[str, Batch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        """What lines may call."""
        return tuple(self._endpoints)

    def create(self, batch: Batch) -> Batch:
        """Begin a batch of a file of the same owner. Raises RequestError."""
        source = self._store.get(batch.owner, batch.request.input_file_id, "input_file_id")
        if len(self._tasks) >= self._options.num_active:
            raise RequestError(
                f"{len(self._tasks)} batches are not over, which is the limit; wait for one",
                status=429,
            )
        num_own = sum(self._batches[batch_id].owner == batch.owner for batch_id in self._tasks)
        if batch.owner and num_own >= self._options.active_per_key:
            raise RequestError(
                f"{num_own} batches of your API key are not over, which is the limit; wait for one",
                status=429,
            )
        expiry = batch.request.output_expires_after
        life_s = None if expiry is None else expiry.seconds
        name = f"{batch.id}_{{}}.jsonl".format
        output = self._store.new(batch.owner, name("output"), _OUTPUT, life_s)
        try:
            errors = self._store.new(batch.owner, name("error"), _OUTPUT, life_s)
        except RequestError:
            output.discard()
            raise
        self._forget_old()
        self._batches[batch.id] = batch
        job = _Job(batch, source, output, errors)
        task = asyncio.create_task(self._run(job))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._ended(job))
        return batch

    def get(self, owner: str, batch_id: str) -> Batch:
        """A batch of this owner. Raises RequestError 404."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise RouteNotFound(
                f"there is no batch {batch_id[:100]!r}", param="batch_id", code="batch_not_found"
            )
        return batch

    def batches(self, owner: str) -> list[Batch]:
        """The batches of this owner, the newest first."""
        return [batch for batch in reversed(self._batches.values()) if batch.owner == owner]

    def cancel(self, batch: Batch) -> Batch:
        """End a batch; its written answers are kept. Raises RequestError if it is over."""
        if batch.is_over:
            raise RequestError(f"the batch is {batch.status}; it cannot be cancelled")
        if batch.status != "cancelling":
            batch.enter("cancelling", self._store.now())
            self._tasks[batch.id].cancel()
        return batch

    async def stop(self) -> None:
        """End everything that runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: _Job) -> None:
        batch = job.batch
        try:
            status = await self._answered(job)
        except asyncio.CancelledError:
            if batch.status != "cancelling":  # the server stops
                self._finish(job, "failed", _error("server_stopped", "the server was stopped"))
                raise
            self._finish(job, "cancelled")
        except QuickstepError as error:
            self._finish(job, "failed", _error("batch_failed", str(error)))
        except Exception:  # the task's top
            _LOG.exception("%s failed", batch.id)
            self._finish(job, "failed", _error("internal_error", "the server's log says why"))
        else:
            self._finish(job, status)

    def _ended(self, job: _Job) -> None:
        """Whatever became of the task: one that was cancelled before its first turn never ran."""
        del self._tasks[job.batch.id]
        if not job.batch.is_over:
            self._finish(job, "cancelled" if job.batch.status == "cancelling" else "failed")

    async def _answered(self, job: _Job) -> BatchStatus:
        """Check the input, answer its lines; says how the batch ends."""
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
                    await run_lines(lines, self._answering(job), job.write, concurrency)
        except TimeoutError:
            await self._expire_rest(job)
            return "expired"
        batch.enter("finalizing", self._store.now())
        return "completed"

    def _answering(self, job: _Job) -> Callable[[BatchLine], Awaitable[LineAnswer]]:
        """Through the slots that all batches share, first come, first served."""
        options = self._options
        asked_by = Submitter(job.batch.owner, options.added_priority)
        runner = LineRunner(
            self._endpoints, self._slots, asked_by, options.num_tries, options.retry_s
        )
        return runner.answer

    def _faults(self, job: _Job) -> tuple[list[BatchError], int]:
        """What is wrong with the input, and its number of lines."""
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
            message = f"line {number}: custom_id {line.custom_id[:100]!r} stands above already"
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
        while piece := await done_in_thread(partial(_piece, lines)):
            for line in piece:
                yield line

    async def _expire_rest(self, job: _Job) -> None:
        """The lines that were not answered go into the error file."""
        lines = self._read(job)
        while await done_in_thread(partial(job.expire, lines)):
            pass

    def _finish(self, job: _Job, status: BatchStatus, error: BatchError | None = None) -> None:
        """Let the files be found, and end."""
        batch = job.batch
        if error is not None:
            batch.errors.append(error)
        batch.output_file_id = _kept(job.output)
        batch.error_file_id = _kept(job.errors)
        batch.enter(status, self._store.now())
        _LOG.info(
            "%s is %s: %d of %d lines answered, %d failed",
            batch.id,
            status,
            batch.num_completed + batch.num_failed,
            batch.num_lines,
            batch.num_failed,
        )

    def _forget_old(self) -> None:
        """One key's batches push out no other's that has fewer."""
        over = [batch for batch in self._batches.values() if batch.is_over]
        while over and len(self._batches) >= self._options.num_kept:
            ((owner, _),) = Counter(batch.owner for batch in over).most_common(1)
            first = next(batch for batch in over if batch.owner == owner)
            over.remove(first)
            del self._batches[first.id]


def _piece(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """The next lines, no more than a thread reads in a moment; [] at the end."""
    piece: list[BatchLine] = []
    num_bytes = 0
    for line in lines:
        piece.append(line)
        num_bytes += len(line.body)
        if len(piece) == _PIECE_LINES or num_bytes >= _PIECE_BYTES:
            break
    return piece


def _kept(writer: FileWriter) -> str | None:
    """The id of a file that has something in it."""
    if not writer.is_empty:
        try:
            return writer.commit().id
        except OSError:
            _LOG.exception("an output file of a batch is lost")
    writer.discard()
    return None


def _error(code: str, message: str) -> BatchError:
    return BatchError(code=code, message=message)
