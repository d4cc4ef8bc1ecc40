"""The exchange of ranks by `torch.distributed`: NCCL between GPUs, gloo between CPUs.

`CollectiveRanks` is `ops.table.Ranks` where the ops are torch's: every part goes to every rank, as
bytes. On CPUs with the native kernels ranks meet in shared memory instead (`ops.native.ranks`),
which is a hundred times faster than gloo; what rank 0 posts comes through there in all cases.
Tests run it with gloo only: it has not run over NCCL yet, so ranks check it when they meet.
Importing this imports neither torch nor `torch.distributed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

from quickstep.errors import EngineError
from quickstep.ops.tensors import (
    Device,
    HostTensor,
    TensorT,
    integers_on,
    to_numpy,
    torch_device,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quickstep.ops.native.ranks import NativeRanks

_JOIN_TIMEOUT = timedelta(minutes=5)
_JOIN_POLL_S = 0.01
_TIMEOUT = timedelta(minutes=30)  # of an exchange: a stopped rank delays a step


class Group(Protocol):
    """What is needed of a `torch.distributed.ProcessGroup`."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Any:
        """Every rank's tensor to every rank; returns what `wait` is called of."""

    def abort(self) -> None:
        """End every exchange, in this rank and in those that wait for it."""


def has_nccl() -> bool:
    """Whether this build of torch can exchange between GPUs."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()


def open_ranks(
    store_path: str,
    messages: NativeRanks,
    device: torch.device | Device,
    check_others: Callable[[], None] = lambda: None,
) -> CollectiveRanks:
    """Join the ranks that share the file `store_path`, with the device of this one; waits for all
    of them, and meanwhile raises what `check_others` raises. Raises EngineError when one does not
    come, or what they exchange does not arrive.
    """
    place = torch_device(device)
    group = _open_group(store_path, messages, place, check_others)
    ranks = CollectiveRanks(group, messages, place)
    ranks.check()
    return ranks


def _open_group(
    store_path: str, messages: NativeRanks, device: torch.device, check_others: Callable[[], None]
) -> Group:
    import torch.distributed as dist

    rank, size = messages.rank, messages.size
    try:
        store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
        store.set_timeout(_JOIN_TIMEOUT)
        num_joined, end_s = store.add("joined", 1), time.monotonic() + _JOIN_TIMEOUT.total_seconds()
        while num_joined < size:
            check_others()
            if time.monotonic() > end_s:
                raise EngineError(f"{num_joined} of {size} ranks have met after {_JOIN_TIMEOUT}")
            time.sleep(_JOIN_POLL_S)
            num_joined = store.add("joined", 0)
        if device.type == "cuda":
            of_nccl = dist.ProcessGroupNCCL.Options()
            of_nccl._timeout = _TIMEOUT
            return cast("Group", dist.ProcessGroupNCCL(store, rank, size, of_nccl))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # by itself it listens where the host's name leads, without any authentication
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        return cast("Group", dist.ProcessGroupGloo(store, rank, size, options))
    except RuntimeError as error:
        raise EngineError(f"the {size} ranks do not meet: {error}") from error


class CollectiveRanks:
    """One rank's end of a group of torch's, with tensors on `device`. Used by one thread at a time,
    but `break_`.
    """

    def __init__(self, group: Group, messages: NativeRanks, device: torch.device) -> None:
        self.messages = messages
        self._group = group
        self._device = device
        self._size = messages.size
        self._spans: dict[tuple[range, int], tuple[range, ...]] = {}  # of all ranks, by our own
        self._waited_s = 0.0
        self._is_broken = False

    @property
    def waited_s(self) -> float:
        """Seconds in which this process has waited for parts; on a GPU, for their launch only."""
        return self._waited_s

    def check(self) -> None:
        """Exchange the numbers of the ranks; all of them call it. Raises EngineError if others than
        these arrive.
        """
        found, expected = self._integers(self.messages.rank), [[rank] for rank in range(self._size)]
        if found != expected:
            raise EngineError(
                f"{self._size} ranks exchange their numbers and rank {self.messages.rank} gets "
                f"{found}: parts of steps would be as wrong; leave --tensor-parallel-size out"
            )

    def least(self, count: int) -> int:
        """The least of the ranks' counts; all of them call it. Raises EngineError."""
        return min(other for (other,) in self._integers(count))

    def break_(self) -> None:
        """Another rank is lost, or this one fails: every call that waits raises EngineError, in all
        ranks. Any thread may call it.
        """
        self._is_broken = True  # first: what waits for parts on a GPU reads it afterwards
        self.messages.break_()
        self._group.abort()

    def wait(self) -> None:
        """Wait until the parts of a step are there: a GPU continues with anything after `break_`.
        Raises EngineError if they may not be.
        """
        if self._device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._device).synchronize()
        if self._is_broken:
            raise EngineError("a rank is lost")

    def gather(self, x: TensorT, own: range, num_columns: int) -> TensorT:
        """`Ranks.gather`. Raises EngineError."""
        if isinstance(x, HostTensor):
            gathered = self._gathered(x.to_torch().to(self._device), own, num_columns)
            return HostTensor(to_numpy(gathered), x.dtype)
        return self._gathered(x, own, num_columns)

    def gather_logits(self, x: TensorT, own: range, vocab_size: int) -> TensorT:
        """`Ranks.gather_logits`. Raises EngineError."""
        return self.gather(x, own, vocab_size)

    def local_ids(self, token_ids: Tensor, own: range, vocab_size: int) -> Tensor:
        """`Ranks.local_ids`."""
        local = token_ids - own.start
        return local.masked_fill((local < 0) | (local >= len(own)), 0)

    def gather_rows(self, x: Tensor, token_ids: Tensor, own: range) -> Tensor:
        """`Ranks.gather_rows`. Raises EngineError."""
        out = x.new_empty(x.shape)
        # the number of rows of an embedding is the same in all calls: it may be any key
        spans = self._spans_of(own, 0)
        for span, part in zip(spans, self._parts(x, x.shape[1]), strict=True):
            is_theirs = (token_ids >= span.start) & (token_ids < span.stop)
            out = out.where(~is_theirs.unsqueeze(1), part)
        return out

    def _gathered(self, x: Tensor, own: range, num_columns: int) -> Tensor:
        spans = self._spans_of(own, num_columns)
        out = x.new_empty((x.shape[0], num_columns))
        for span, part in zip(spans, self._parts(x, max(map(len, spans))), strict=True):
            out[:, span.start : span.stop] = part[:, : len(span)]
        return out

    def _spans_of(self, own: range, num_columns: int) -> tuple[range, ...]:
        """Which part each rank has where ours is `own`: exchanged once for each."""
        found = self._spans.get((own, num_columns))
        if found is None:
            pairs = self._integers(own.start, own.stop)
            found = self._spans[own, num_columns] = tuple(range(*pair) for pair in pairs)
        return found

    def _integers(self, *own: int) -> list[list[int]]:
        """What each rank has passed, as many as the others."""
        import torch

        sent = integers_on(self._device, own, torch.int64)[None]
        return [part.tolist()[0] for part in self._parts(sent, len(own))]

    def _parts(self, x: Tensor, width: int) -> list[Tensor]:
        """x [T, n <= width] of every rank, [T, width] each; what is added has any value."""
        import torch

        padded = x.new_zeros((x.shape[0], width))
        if not x.shape[0]:
            return [padded] * self._size
        padded[:, : x.shape[1]] = x
        sent = padded.view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self._size)]
        started_s = time.perf_counter()
        try:
            self._group.allgather([parts], [sent]).wait()
        except RuntimeError as error:
            raise EngineError(f"the exchange between ranks failed: {error}") from error
        self._waited_s += time.perf_counter() - started_s
        return [part.view(x.dtype) for part in parts]
