"""How the rows of a step are sampled on the device: `SamplingRecords`, and reading a row's logits.

`runtime.sampling.device_records` makes the records, `ops.triton.sampling.sample` and
`ops.triton.sampling.filters` read them.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import triton
import triton.language as tl
from torch import Tensor


class Field(IntEnum):
    """The numbers of a row in `SamplingRecords.rows`; fp64 as their bits. A place is an index into
    what only some rows have, -1 for a row that has none.
    """

    LOGITS_ROW = 0  # the row of the logits
    KEY_B = 1  # of the noise at its output position, as in `runtime.sampling.noise.row_keys`
    KEY_C = 2
    TEMPERATURE = 3  # fp64; 0 for argmax
    CHANGED = 4  # place among the rows with penalties or edits
    COUNTS = 5  # row of `counts`
    REPETITION = 6  # fp64, as are the next two
    PRESENCE = 7
    FREQUENCY = 8
    MASK = 9  # place among the rows with a mask
    BANNED = 10  # place among the rows with bans
    FIRST_YIELDS = 11  # 1: its first list of bans has no effect if no other token is left
    SECOND_YIELDS = 12
    FILTERED = 13  # place among the rows with a filter other than min-p
    TOP_K = 14  # 0 for all
    TYPICAL_P = 15  # fp64, as are the next two; 1 for all
    TOP_P = 16
    LOG_MIN_P = 17  # -inf for all
    APPLIES_XTC = 18  # 1: XTC removes tokens
    XTC_THRESHOLD = 19  # fp64


NUM_FIELDS = len(Field)

FIELDS = tl.constexpr(NUM_FIELDS)
LOGITS_ROW = tl.constexpr(int(Field.LOGITS_ROW))
KEY_B = tl.constexpr(int(Field.KEY_B))
KEY_C = tl.constexpr(int(Field.KEY_C))
TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
CHANGED = tl.constexpr(int(Field.CHANGED))
COUNTS = tl.constexpr(int(Field.COUNTS))
REPETITION = tl.constexpr(int(Field.REPETITION))
PRESENCE = tl.constexpr(int(Field.PRESENCE))
FREQUENCY = tl.constexpr(int(Field.FREQUENCY))
MASK = tl.constexpr(int(Field.MASK))
BANNED = tl.constexpr(int(Field.BANNED))
FIRST_YIELDS = tl.constexpr(int(Field.FIRST_YIELDS))
SECOND_YIELDS = tl.constexpr(int(Field.SECOND_YIELDS))
FILTERED = tl.constexpr(int(Field.FILTERED))
TOP_K = tl.constexpr(int(Field.TOP_K))
TYPICAL_P = tl.constexpr(int(Field.TYPICAL_P))
TOP_P = tl.constexpr(int(Field.TOP_P))
LOG_MIN_P = tl.constexpr(int(Field.LOG_MIN_P))
APPLIES_XTC = tl.constexpr(int(Field.APPLIES_XTC))
XTC_THRESHOLD = tl.constexpr(int(Field.XTC_THRESHOLD))


class Edits(msgspec.Struct, frozen=True):
    """Logits to change, each at most once.

    Attributes:
        places: [n] int64, CHANGED * V + token id.
        values: [n] fp64.
    """

    places: Tensor
    values: Tensor


class SamplingRecords(msgspec.Struct, frozen=True):
    """How E rows are sampled, on the device of the logits.

    The changes of a row's logits are applied in this order: penalties by `counts`, `set_edits`,
    `added_edits` one after the other, `masks`, bans.

    Attributes:
        rows: [E, NUM_FIELDS] int64, see `Field`.
        num_changed, num_banned, num_filtered: How many rows have a place in CHANGED, BANNED,
            FILTERED.
        counts: [C, V] int32: 2 x how often the sequence generated the token, + 1 if its prompt has
            it and `repetition_penalty` applies to that. None if no row has penalties.
        masks: [M, V / 64 rounded up] int64: bit i % 64 of element i / 64 is 1 if token i may be
            sampled. None if no row has one.
        ban_places: [n] int64, BANNED * V + token id; a token once in each list.
        ban_lists: [n] int8, 1 for the first list of the row, 2 for the second.
        set_edits: Logits that are replaced.
        added_edits: Amounts that are added.
    """

    rows: Tensor
    num_changed: int = 0
    num_banned: int = 0
    num_filtered: int = 0
    counts: Tensor | None = None
    masks: Tensor | None = None
    ban_places: Tensor | None = None
    ban_lists: Tensor | None = None
    set_edits: Edits | None = None
    added_edits: tuple[Edits, ...] = ()


@triton.jit
def fp64_field(fields, FIELD: tl.constexpr):
    """A number of a row that is fp64."""
    return tl.load(fields + FIELD).to(tl.float64, bitcast=True)


@triton.jit
def raw_logits(logits, fields, ids, inside, logits_stride):
    """The raw logits of a row in fp64."""
    source = logits + tl.load(fields + LOGITS_ROW) * logits_stride
    return tl.load(source + ids, mask=inside, other=-float("inf")).to(tl.float64)


@triton.jit
def changed_logits(logits, changed, masks, fields, ids, inside, vocab_size, logits_stride):
    """The logits of a row in fp64 after penalties, edits and mask; bans are not applied."""
    x = raw_logits(logits, fields, ids, inside, logits_stride)
    place = tl.load(fields + CHANGED)
    has_changes = inside & (place >= 0)
    after = tl.load(changed + place * vocab_size + ids, mask=has_changes, other=0.0)
    x = tl.where(has_changes, after, x)
    place = tl.load(fields + MASK)
    num_elements = (vocab_size + 63) // 64
    source = masks + place * num_elements + (ids >> 6)
    element = tl.load(source, mask=inside & (place >= 0), other=-1)
    return tl.where(((element >> (ids & 63)) & 1) == 1, x, -float("inf"))


@triton.jit
def ban_lists_of(bans, fields, ids, inside, vocab_size):
    """The lists of bans that tokens of a row are in: 1, 2, their sum or 0."""
    place = tl.load(fields + BANNED)
    has_bans = inside & (place >= 0)
    return tl.load(bans + place * vocab_size + ids, mask=has_bans, other=0).to(tl.int64)


@triton.jit
def allowed_logits(
    logits, changed, masks, bans, states, fields, row, ids, inside, vocab_size, logits_stride
):
    """As `changed_logits`, -inf for the tokens in the lists of bans that `states` names."""
    x = changed_logits(logits, changed, masks, fields, ids, inside, vocab_size, logits_stride)
    lists = ban_lists_of(bans, fields, ids, inside, vocab_size)
    return tl.where((lists & tl.load(states + row * 2 + 1)) == 0, x, -float("inf"))
