"""A draft model against the target's own outputs: drafts, KV that is kept, blocks, vocabularies."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_hash_model import PagedHashModel
from tiny_checkpoint import write_checkpoint

from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.assembly import load_weights
from quickstep.engine.speculation import find_draft, load_draft
from quickstep.errors import ConfigError
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.runner import ModelRunner
from quickstep.runtime.speculation.draft_model import DraftModelProposer
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.runtime.speculation.vocabulary import map_vocabulary
from quickstep.types import Admission, Phase, SamplingParams, StepPlan, StepRow

BLOCK = 4
VOCAB = 64
PROMPT = (5, 9, 2, 7, 7, 1, 30, 12, 40)
NUM_PROMPT = len(PROMPT)
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_p=0.9)
HOT = SamplingParams(temperature=8.0)


def kv_of(model, num_blocks):
    return allocate_kv(model.kv_layout, num_blocks, BLOCK, model.device)


def proposer_of(model=None, num_blocks=64, **options):
    model = model or PagedHashModel()
    return DraftModelProposer(model, kv_of(model, num_blocks), BLOCK, VOCAB, **options)


def admission(token_ids=PROMPT, sampling=WARM, seed=3, prompt_len=NUM_PROMPT):
    return Admission(0, "r#0", tuple(token_ids), prompt_len, sampling, seed)


def continuation(sampling, count=8, model=None, seed=3):
    """The target's outputs after PROMPT."""
    model = model or PagedHashModel()
    runner = ModelRunner(model, kv_of(model, 16), BLOCK, 1, lambda: 0.0)
    blocks = tuple(range((len(PROMPT) + count) // BLOCK + 1))
    row = StepRow(0, 0, len(PROMPT), PROMPT, blocks, Phase.PREFILL, True, 0)
    plan = StepPlan(0, (row,), (admission(PROMPT, sampling, seed),))
    outputs = [*runner.run(plan).outputs[0].token_ids]
    for index in range(1, count):
        row = StepRow(0, len(PROMPT) + index - 1, 1, (), (), Phase.DECODE, True, index)
        outputs += runner.run(StepPlan(index, (row,))).outputs[0].token_ids
    return tuple(outputs)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, HOT])
def test_a_draft_model_that_is_the_target_proposes_its_outputs(sampling):
    outputs = continuation(sampling)
    proposer = proposer_of()
    proposer.admit(0, admission(PROMPT, sampling))
    [draft] = proposer.propose([DraftTask(0, 3, outputs[:1])])
    assert draft == outputs[1:4]
    [draft] = proposer.propose([DraftTask(0, 4, outputs[1:4])])
    assert draft == outputs[4:8]


def test_noise_is_that_of_the_seed_and_the_output_position():
    drafts = set()
    for seed in (1, 2):
        for num_prompt in (len(PROMPT), len(PROMPT) - 1):
            proposer = proposer_of()
            proposer.admit(0, admission(PROMPT, HOT, seed, num_prompt))
            drafts.add(proposer.propose([DraftTask(0, 6, ())])[0])
    assert len(drafts) == 4


class CountingModel(PagedHashModel):
    """Counts the tokens that it computes."""

    num_tokens = 0

    def forward(self, batch, kv):
        self.num_tokens += batch.token_ids.shape[0]
        return super().forward(batch, kv)


def test_kv_of_accepted_drafts_is_not_computed_again():
    model = CountingModel()
    proposer = proposer_of(model)
    proposer.admit(0, admission())
    [draft] = proposer.propose([DraftTask(0, 4, ())])
    assert model.num_tokens == len(PROMPT) + 3
    proposer.propose([DraftTask(0, 1, (*draft, 11))])
    assert model.num_tokens == len(PROMPT) + 3 + 2
    proposer.propose([DraftTask(0, 1, (12,))])
    assert model.num_tokens == len(PROMPT) + 3 + 2 + 1


steps = st.lists(
    st.tuples(
        st.sampled_from((0, 1, 2)),  # slot
        st.booleans(),  # propose or observe
        st.integers(0, 4),  # drafts that are accepted
        st.lists(st.integers(0, VOCAB - 1), max_size=3),  # further tokens
    ),
    max_size=12,
)


@settings(max_examples=20, deadline=None)
@given(steps)
def test_drafts_do_not_depend_on_how_tokens_came(steps):
    proposer = proposer_of()
    tokens = {slot: [*PROMPT[slot:]] for slot in range(3)}
    drafts = {slot: () for slot in range(3)}
    for slot in range(3):
        proposer.admit(slot, admission(tokens[slot], prompt_len=len(tokens[slot]), seed=slot))
    for slot, wants_drafts, num_accepted, others in steps:
        new = (*drafts[slot][:num_accepted], *others)
        tokens[slot] += new
        drafts[slot] = ()
        if wants_drafts:
            [drafts[slot]] = proposer.propose([DraftTask(slot, 3, new)])
        else:
            proposer.observe(slot, new)
    found = proposer.propose([DraftTask(slot, 4, ()) for slot in range(3)])
    for slot in range(3):
        fresh = proposer_of()
        num_prompt = len(PROMPT) - slot
        fresh.admit(0, admission(tokens[slot], seed=slot, prompt_len=num_prompt))
        assert fresh.propose([DraftTask(0, 4, ())]) == [found[slot]]


def test_a_sequence_that_is_far_behind_catches_up_over_several_calls():
    proposer = proposer_of(max_new_tokens=4)
    proposer.admit(0, admission())
    drafts = [proposer.propose([DraftTask(0, 2, ())])[0] for _ in range(3)]
    whole = proposer_of()
    whole.admit(0, admission())
    assert drafts == [(), (), whole.propose([DraftTask(0, 2, ())])[0]]


def test_blocks_return_and_a_sequence_without_blocks_has_no_drafts():
    proposer = proposer_of(num_blocks=4)
    proposer.admit(0, admission())
    proposer.admit(1, admission())
    first, second = proposer.propose([DraftTask(0, 4, ()), DraftTask(1, 4, ())])
    assert len(first) == 4
    assert second == ()
    proposer.release(0)
    proposer.release(0)
    assert proposer.propose([DraftTask(1, 4, ())]) == [first]
    proposer.admit(1, admission())
    assert proposer.num_free_blocks == 4


def test_drafts_end_at_the_last_position_of_the_draft_model():
    proposer = proposer_of(PagedHashModel(max_model_len=len(PROMPT) + 1))
    proposer.admit(0, admission())
    [draft] = proposer.propose([DraftTask(0, 5, ())])
    assert len(draft) == 2
    assert proposer.propose([DraftTask(0, 5, (1,))]) != [()]
    assert proposer.propose([DraftTask(0, 5, (1,))]) == [()]


def test_tokens_that_only_one_model_has_end_the_drafts():
    proposer = proposer_of(PagedHashModel(vocab_size=32))
    proposer.admit(0, admission((5, 40)))
    assert proposer.propose([DraftTask(0, 5, ())]) == [()]
    larger = PagedHashModel(vocab_size=4 * VOCAB)
    proposer = proposer_of(larger)
    proposer.admit(0, admission(PROMPT, WARM))
    [draft] = proposer.propose([DraftTask(0, 8, ())])
    assert all(token_id < VOCAB for token_id in draft)


class PermutedModel(PagedHashModel):
    """The model of the tests with its token ids in another order, `order[new] = old`."""

    def __init__(self, order):
        super().__init__()
        self._embedding = self._embedding[order]
        self._unembedding = self._unembedding[order]


@pytest.mark.parametrize("sampling", [GREEDY, WARM, HOT])
def test_a_draft_model_with_other_token_ids_proposes_the_targets_tokens(sampling):
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    texts = [f"token {index}" for index in range(VOCAB)]
    vocabulary = map_vocabulary(texts, [texts[old] for old in order.tolist()])
    proposer = proposer_of(PermutedModel(order), vocabulary=vocabulary)
    proposer.admit(0, admission(PROMPT, sampling))
    [draft] = proposer.propose([DraftTask(0, 6, ())])
    assert draft == continuation(sampling, 6)


def test_a_vocabulary_is_translated_where_strings_agree():
    assert map_vocabulary(["a", "b", None], ["a", "b", "c"]) is None
    assert map_vocabulary(["a", "b", None], ["a", "b"]) is None
    vocabulary = map_vocabulary(["a", "b", "c", None], ["c", "a"], fallback_id=1)
    assert vocabulary.of_draft((0, 1, 2, 3)) == (1, 1, 0, 1)
    logits = vocabulary.logits_of_target(torch.tensor([[1.0, 2.0]]))
    assert logits.numpy().tolist() == [[2.0, -np.inf, 1.0, -np.inf]]


def test_a_foreign_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="1 of the model's 3 tokens; use a draft model with"):
        map_vocabulary(["a", "b", "c"], ["d", "c"])


@pytest.fixture(scope="module")
def demo():
    return load_weights(EngineConfig(load=LoadConfig("demo"), max_model_len=256), None)


def loaded_draft(target, name, enforce_eager=False):
    ops = target.model.ops
    found = find_draft(LoadConfig(name), ops.scratch_bytes)
    path = target.checkpoint.path
    return load_draft(found, target.model, path, ops, target.plan, 16, enforce_eager)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_demo_model_proposes_its_own_outputs(demo, sampling, enforce_eager):
    proposer = loaded_draft(demo, "demo", enforce_eager)
    outputs = continuation(sampling, 8, demo.model)
    proposer.admit(0, admission(PROMPT, sampling))
    assert proposer.propose([DraftTask(0, 3, outputs[:1])]) == [outputs[1:4]]
    assert proposer.propose([DraftTask(0, 4, outputs[1:4])]) == [outputs[4:]]


def test_a_draft_model_with_another_tokenizer_is_refused(demo, tmp_path):
    path = write_checkpoint(tmp_path / "bytes")
    with pytest.raises(ConfigError, match="the same tokenizer"):
        loaded_draft(demo, str(path))


def test_a_draft_model_that_is_missing_is_refused(demo, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        loaded_draft(demo, str(tmp_path / "nowhere"))


def test_a_prompt_is_computed_in_chunks_after_the_sequences_that_are_less_behind():
    outputs = continuation(GREEDY)
    proposer = proposer_of(max_new_tokens=4)
    proposer.admit(1, admission(PROMPT, GREEDY))
    for _ in range(len(PROMPT)):
        [draft] = proposer.propose([DraftTask(1, 2, ())])
    assert draft == outputs[:2]
    proposer.admit(0, admission(PROMPT, GREEDY))
    late, draft = proposer.propose([DraftTask(0, 2, ()), DraftTask(1, 2, outputs[:1])])
    assert (late, draft) == ((), outputs[1:3])
