"""Compiles a grammar in a separate process first, which the grammar may crash.

llguidance has limits of its own, but it is native code: a grammar can exhaust its stack or the
machine's memory, which no caller can catch. So each new grammar is compiled in a worker first
(`trial_worker`), with a limit of processor time, of memory and with half of the stack that this
process has. The search for the shortest text runs there as well: it is Python, and would delay
steps here. If the worker dies, the grammar is refused and the next one gets another worker. The
last used verdicts are cached.

The worker starts with the first grammar and ends with its owner: its standard input closes.
"""

from __future__ import annotations

import signal
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from quickstep.errors import EngineError
from quickstep.text.grammar.matcher import GrammarVocabulary, Refusal
from quickstep.text.grammar.source import GrammarLimits, GrammarSource
from quickstep.text.worker_process import WorkerDied, WorkerProcess

_MODULE = "quickstep.text.grammar.trial_worker"


class TrialLimits(msgspec.Struct, frozen=True):
    """Bounds on one trial.

    Attributes:
        cpu_s: Processor time.
        wall_s: Elapsed time, for a worker that hangs without computing, or a busy machine.
        start_s: Elapsed time for a new worker, which reads the vocabulary.
        memory_bytes: Address space beyond that of a worker that has compiled nothing yet.
        kept: Verdicts that are cached.
    """

    cpu_s: float = 2.0
    wall_s: float = 20.0
    start_s: float = 60.0
    memory_bytes: int = 1024**3
    kept: int = 512


class TrialOpening(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a worker."""

    vocabulary: GrammarVocabulary
    grammar_limits: GrammarLimits
    cpu_s: float
    memory_bytes: int


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer.

    Attributes:
        refusal: Why the grammar is refused, "" if it is not.
        ending: The path of a text that completes it (`runtime.sampling.closing_search.Ending`),
            as its characters' codes; None if none was found.
    """

    refusal: str
    ending: list[int] | None = None


class GrammarTrial:
    """The worker and its verdicts. Any thread may call `check`; trials run one at a time.

    `vocabulary` is called when a worker starts.
    """

    def __init__(
        self,
        vocabulary: Callable[[], GrammarVocabulary],
        grammar_limits: GrammarLimits,
        limits: TrialLimits,
    ) -> None:
        self._vocabulary = vocabulary
        self._grammar_limits = grammar_limits
        self._limits = limits
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._verdicts: OrderedDict[GrammarSource, Verdict] = OrderedDict()
        self._num_started = 0

    @property
    def num_started(self) -> int:
        """Workers started so far: one, and another after each grammar that crashed one."""
        return self._num_started

    @property
    def process_id(self) -> int | None:
        """The operating system's id of the worker; None while there is none."""
        worker = self._worker
        return None if worker is None else worker.process_id

    def check(self, source: GrammarSource) -> str | None:
        """Check that a grammar compiles. Returns the path of a text that completes it, if found.

        Raises:
            Refusal: It does not compile, or the worker died of it.
            EngineError: No worker can be started, or it had no processor time for too long. The
                grammar may be fine and can be tried again.
        """
        with self._lock:
            verdict = self._verdicts.pop(source, None)
            if verdict is None:
                verdict = self._try(source)
            self._verdicts[source] = verdict
            while len(self._verdicts) > self._limits.kept:
                self._verdicts.popitem(last=False)
        if verdict.refusal:
            raise Refusal(verdict.refusal)
        return None if verdict.ending is None else "".join(map(chr, verdict.ending))

    def _try(self, source: GrammarSource) -> Verdict:
        if self._worker is not None and not self._worker.is_alive:  # of no grammar of ours
            self._worker.end()
            self._worker = None
        if self._worker is None:
            self._worker = self._start()
        try:
            answer = self._worker.exchange(msgspec.msgpack.encode(source), self._limits.wall_s)
            return msgspec.msgpack.decode(answer, type=Verdict)
        except WorkerDied as death:
            self._worker = None
            if death.code == -signal.SIGKILL:
                raise EngineError(
                    f"the grammar was not compiled within {self._limits.wall_s:g} s, as the machine"
                    " is busy or was paused; send the request again"
                ) from None
            return Verdict(_refusal_of(death.code, self._limits))
        except BaseException:
            self._worker.end()
            self._worker = None
            raise

    def _start(self) -> WorkerProcess:
        opening = TrialOpening(
            vocabulary=self._vocabulary(),
            grammar_limits=self._grammar_limits,
            cpu_s=self._limits.cpu_s,
            memory_bytes=self._limits.memory_bytes,
        )
        worker = WorkerProcess(_MODULE)
        self._num_started += 1
        try:
            worker.exchange(msgspec.msgpack.encode(opening), self._limits.start_s)
        except WorkerDied as death:
            raise EngineError(
                f"the process that tries out grammars ended with code {death.code} at its start"
            ) from None
        return worker


def _refusal_of(code: int, limits: TrialLimits) -> str:
    if code == -signal.SIGPROF:
        return f"takes more than {limits.cpu_s:g} s to compile"
    return "exhausts the compiler: it needs too much memory or is nested too deeply"
