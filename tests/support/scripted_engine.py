"""An engine without torch: the real scheduler and loop, and an executor that follows a script.

The "model" repeats its prompt: output token k is prompt token k modulo the prompt's length, so a
prompt says what the answer will be, end token included. Tokens are bytes.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.engine.engine import Engine
from quickstep.engine.loaded_model import LoadedModel
from quickstep.engine.records.step_log import StepLog
from quickstep.errors import EngineError
from quickstep.text.chat_template import ChatTemplate
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.tokenizer import Tokenizer, _byte_level_alphabet
from quickstep.types import RowOutput, StepResult, TokenLogprobs

END = "<|end|>"
END_ID = 256


def byte_tokenizer():
    vocab = {char: byte for char, byte in _byte_level_alphabet().items()}
    library = Library(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END, special=True)])
    return Tokenizer(library, eos_token_ids=[END_ID], special_tokens={"eos_token": END})


class ScriptedExecutor:
    """`gate` cleared holds steps; a step whose id is in `broken` raises, as do those behind it."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.broken: set[int] = set()
        self.error = EngineError
        self.is_closed = False
        self._has_failed = False
        self._slots = {}
        self._worker = ThreadPoolExecutor(max_workers=1)

    def submit(self, plan):
        return self._worker.submit(self._run, plan)

    def reset(self):
        self._worker.submit(self._forget_failure).result()

    def close(self):
        self.is_closed = True
        self._worker.shutdown(wait=True)

    def _forget_failure(self):
        self._has_failed = False

    def _run(self, plan):
        self.gate.wait()
        for slot in plan.released:
            del self._slots[slot]
        for admission in plan.admitted:
            self._slots[admission.slot] = (admission, list(admission.token_ids))
        if self._has_failed or plan.step_id in self.broken:
            self._has_failed = True
            raise self.error("the script says so")
        return StepResult(plan.step_id, tuple(map(self._row, plan.rows)), seconds=0.001)

    def _row(self, row):
        admission, tokens = self._slots[row.slot]
        if not row.emits:
            return RowOutput()
        token_id = admission.token_ids[row.output_position % admission.prompt_len]
        tokens.append(token_id)
        if admission.sampling.logprobs is None:
            return RowOutput((token_id,))
        top = ((token_id, -0.5), (1, -2.0))[: admission.sampling.logprobs]
        return RowOutput((token_id,), (TokenLogprobs(token_id, -0.5, 1, top),))


class ScriptedEngine:
    """An engine, its parts, and a check that nothing is left behind."""

    def __init__(
        self,
        num_blocks=64,
        step_log=None,
        template=None,
        seed=0,
        path=None,
        streams=None,
        **scheduler,
    ):
        config = SchedulerConfig(**{"max_model_len": 256, "max_num_seqs": 8, **scheduler})
        self.skipped_s = 0.0  # the engine's clock runs ahead by this
        self.pool = KVBlockPool(num_blocks, 4)
        self.executor = ScriptedExecutor()
        self.scheduler = Scheduler(config, self.pool, make_policy(config), LinearCostModel())
        tokenizer = byte_tokenizer()
        model = LoadedModel(
            name="script",
            fingerprint="00",
            max_model_len=config.max_model_len,
            vocab_size=257,
            tokenizer=tokenizer,
            grammars=GrammarCompiler(tokenizer, 257),
            open_template=template and (lambda: ChatTemplate({"default": template}, {}, now=None)),
            path=path,
        )
        self.engine = Engine(
            model,
            self.scheduler,
            self.executor,
            step_log=step_log or StepLog(),
            streams=streams,
            seeds=random.Random(seed),
            clock=lambda: time.monotonic() + self.skipped_s,
        )

    async def __aenter__(self):
        await self.engine.start()
        return self.engine

    async def __aexit__(self, *exc_info):
        self.executor.gate.set()
        await self.engine.stop()
        self.check_nothing_is_left()

    def check_nothing_is_left(self):
        self.scheduler.check()
        assert not self.scheduler.has_work()
        assert self.pool.num_free == self.pool.num_blocks


def run(test, **options):
    """Run `test(parts, engine)` against a fresh engine, which must end empty."""

    async def whole():
        parts = ScriptedEngine(**options)
        async with parts as engine:
            return await test(parts, engine)

    return asyncio.run(whole())


async def read(stream):
    """(text, token ids, last delta) per sequence index."""
    found = {}
    async for delta in stream:
        text, ids, _ = found.get(delta.index, ("", (), None))
        found[delta.index] = (text + delta.text, ids + delta.token_ids, delta)
    return found


async def answer(stream):
    """(text, finish reason) of a stream with one sequence."""
    text, _, last = (await read(stream))[0]
    return text, last.finish_reason
