"""The C types of captured steps, of draws and of scores: `csrc/quickstep.h`, field by field.

Declared by `ops.native.library`; used by `ops.native.program`, `ops.native.sampling` and
`ops.native.scores`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p

__all__ = [
    "STEP_SIGNATURES",
    "DrawCall",
    "OpCall",
    "OpKind",
    "ProgramInputs",
    "RowsOf",
    "ScoresCall",
    "StepCall",
    "StepRowCall",
]


class OpKind:
    """`qs_op_kind`."""

    LINEAR, GATHER, RMS_NORM, ADD_NORM, ROTARY, GATED = range(6)
    WRITE_KV, ATTENTION, ADD, SCALE, LOGITS = range(6, 11)
    QUANTIZED, LINEAR_ROWS, QUANTIZED_ROWS, TAKE = range(11, 15)


class RowsOf:
    """`qs_op_rows`: which of a step's counts an op runs over."""

    TOKENS, EMITTING = range(2)


class OpCall(ctypes.Structure):
    """`qs_op`."""

    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_int32),
        ("rows", c_int32),
        ("option", c_int32),
        ("size", c_int64 * 5),
        ("stride", c_int64 * 2),
        ("scalar", c_double * 2),
        ("inputs", c_void_p * 4),
        ("outputs", c_void_p * 2),
    )


class ProgramInputs(ctypes.Structure):
    """`qs_program_inputs`."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("emitting", c_void_p),
        ("capacity_tokens", c_int64),
        ("capacity_emitting", c_int64),
        ("block_size", c_int64),
    )


class StepRowCall(ctypes.Structure):
    """`qs_step_row`: four 64-bit words, which `runtime.step_rows` writes as integers."""

    _fields_ = (
        ("start", c_int64),
        ("num_tokens", c_int64),
        ("block_ids", c_void_p),
        ("num_blocks", c_int64),
    )


class StepCall(ctypes.Structure):
    """`qs_step`."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_emitting", c_int64),
        ("rows", c_void_p),
        ("token_ids", c_void_p),
        ("emitting_rows", c_void_p),
    )


class DrawCall(ctypes.Structure):
    """`qs_draw`."""

    _fields_ = (
        ("logits", c_void_p),
        ("edit_ids", c_void_p),
        ("edit_values", c_void_p),
        ("num_edits", c_int64),
        ("num_set", c_int64),
        ("allowed", c_void_p),
        # the arrays of two, element by element
        ("first_bans", c_void_p),
        ("second_bans", c_void_p),
        ("num_first_bans", c_int64),
        ("num_second_bans", c_int64),
        ("first_yields", c_int32),
        ("second_yields", c_int32),
        ("num_top", c_int32),
        ("strikes_top", c_int32),
        ("top_k", c_int64),
        ("temperature", c_double),
        ("top_p", c_double),
        ("typical_p", c_double),
        ("log_min_p", c_double),
        ("xtc_threshold", c_double),
        ("key_b", c_uint64),
        ("key_c", c_uint64),
        ("token_id", c_int64),
        ("rank", c_int64),
        ("mass", c_int64),
        ("peak", c_float),
        ("chosen", c_float),
        ("top_ids", c_void_p),
        ("top_logits", c_void_p),
    )


class ScoresCall(ctypes.Structure):
    """`qs_scores`."""

    _fields_ = (
        ("logits", c_void_p),
        ("token_ids", c_void_p),
        ("num_positions", c_int64),
        ("vocab_size", c_int64),
        ("num_top", c_int64),
        ("ranks", c_void_p),
        ("masses", c_void_p),
        ("peaks", c_void_p),
        ("chosen", c_void_p),
        ("top_ids", c_void_p),
        ("top_logits", c_void_p),
    )


_P, _I, _L, _F, _D = c_void_p, c_int, c_int64, c_float, c_double

# name -> (result, arguments), as in `ops.native.library`
STEP_SIGNATURES: tuple[tuple[str, object, tuple[object, ...]], ...] = (
    ("qs_add", _I, (_P, _I, _P, _P, _L, _P)),
    ("qs_scale", _I, (_P, _I, _P, _L, _F, _P)),
    ("qs_finish_logits", _I, (_P, _I, _P, _L, _D, _D, _P)),
    ("qs_program_create", _I, (_P, POINTER(OpCall), _L, POINTER(ProgramInputs), POINTER(_P))),
    ("qs_program_destroy", None, (_P,)),
    ("qs_program_run", _I, (_P, _P)),
    ("qs_draw_scratch_bytes", _L, (_P, _L, _L)),
    ("qs_draw_rows", _I, (_P, _P, _L, _L, _P)),
    ("qs_score_tokens", _I, (_P, _P, _P)),
)
