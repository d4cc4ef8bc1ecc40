"""libquickstep through ctypes: its types and functions, its location, and its status codes.

The structures and signatures repeat `csrc/quickstep.h` field by field. The library is plain C, so
one file serves every Python version; a call costs about a microsecond and releases the interpreter
lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from types import MappingProxyType

from quickstep.errors import ConfigError, EngineError

ABI_VERSION = 28

# qs_activation
ACTIVATIONS: Mapping[str, int] = MappingProxyType(
    {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
)
# those that need no gate
UNGATED: Mapping[str, int] = MappingProxyType(
    {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 4, "relu2": 5}
)

# those of experts, of which the last two have no gate (`ops.table.WITHOUT_GATE`)
EXPERT_ACTIVATIONS: Mapping[str, int] = MappingProxyType({**ACTIVATIONS, "relu": 4, "relu2": 5})

_OK, _INVALID, _OUT_OF_MEMORY, _UNSUPPORTED_ISA, _OUT_OF_RANGE, _UNREADABLE, _PEER_LOST = range(7)
UNSUPPORTED_PIECES = 7


class AttentionCall(ctypes.Structure):
    """`qs_attention`."""

    _fields_ = (
        ("dtype", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("kv_dtype", c_int32),
        ("value_size", c_int32),
        ("q_stride", c_int64),
        ("num_rows", c_int64),
        ("block_size", c_int64),
        ("max_blocks", c_int64),
        ("num_blocks", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("q", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("row_offsets", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("tail_offsets", c_void_p),
        ("tail_slots", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("scratch", c_void_p),
    )


class TextAttentionCall(ctypes.Structure):
    """`qs_text_attention_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("num_heads", c_int32),
        ("head_size", c_int32),
        ("scale", c_float),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("num_texts", c_int64),
        ("window", c_int64),
        ("offsets", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
    )


class KVMoveCall(ctypes.Structure):
    """`qs_kv_move`."""

    _fields_ = (
        ("part", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int64),
        ("block_size", c_int64),
        ("num_caches", c_int64),
        ("slot_bytes", c_int64),
        ("num_slots", c_int64),
        ("num_moves", c_int64),
        ("caches", c_void_p),
        ("moves", c_void_p),
    )


class KVWriteCall(ctypes.Structure):
    """`qs_kv_write`."""

    _fields_ = (
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("num_tokens", c_int64),
        ("num_slots", c_int64),
        ("block_size", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("k", c_void_p),
        ("v", c_void_p),
        ("slots", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
    )


class QuantizedWeightCall(ctypes.Structure):
    """`qs_quantized_weight`."""

    _fields_ = (
        ("bits", c_int32),
        ("has_minimums", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("group_size", c_int64),
        ("quants", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("sub_scales", c_void_p),
    )


class QuantizeCall(ctypes.Structure):
    """`qs_quantize_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("bits", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("row_stride", c_int64),
        ("group_size", c_int64),
        ("weight", c_void_p),
        ("quants", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("sub_scales", c_void_p),
    )


class LoRAPartCall(ctypes.Structure):
    """`qs_lora_part`."""

    _fields_ = (
        ("module", c_int64),
        ("rank", c_int64),
        ("k", c_int64),
        ("n", c_int64),
        ("first_output", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("scale", c_double),
        ("rank_scales", c_void_p),
        ("bias", c_void_p),
    )


class LoRAGroupCall(ctypes.Structure):
    """`qs_lora_group`."""

    _fields_ = (("adapter", c_void_p), ("num_tokens", c_int64))


class LoRAAddCall(ctypes.Structure):
    """`qs_lora_add_call`."""

    _fields_ = (
        ("module", c_int64),
        ("k", c_int64),
        ("n", c_int64),
        ("x_stride", c_int64),
        ("num_groups", c_int64),
        ("groups", c_void_p),
        ("tokens", c_void_p),
        ("x", c_void_p),
        ("ids", c_void_p),
        ("y", c_void_p),
        ("scratch", c_void_p),
    )


class OpKind:
    """`qs_op_kind`."""

    LINEAR, GATHER, RMS_NORM, ADD_NORM, ROTARY, GATED = range(6)
    WRITE_KV, ATTENTION, ADD, SCALE, LOGITS = range(6, 11)
    QUANTIZED, LINEAR_ROWS, QUANTIZED_ROWS, TAKE, LORA, RANKS, LOCAL_IDS = range(11, 18)
    ROUTE, EXPERTS, GATE, SHORT_CONV, DELTA, MAMBA, HEAD_LINEAR, LATENT_KEYS = range(18, 26)
    ACTIVATION, LAYER_NORM, STREAMS, MATCH, CUT = range(30, 35)


class StreamsKind:
    """`qs_streams_kind`."""

    MIX, CORRECT, ADD, SPREAD = range(4)


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
        ("inputs", c_void_p * 5),
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
    """`qs_step_row` with its `qs_state_row`: ten 64-bit words, which `runtime.steps.divided` writes
    as integers.
    """

    _fields_ = (
        ("start", c_int64),
        ("num_tokens", c_int64),
        ("block_ids", c_void_p),
        ("num_blocks", c_int64),
        ("parents", c_void_p),
        ("num_parents", c_int64),
        ("state_source", c_int64),
        ("state_target", c_int64),
        ("num_replayed", c_int64),
        ("num_drafts", c_int64),
    )


class StepCall(ctypes.Structure):
    """`qs_step`."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_emitting", c_int64),
        ("rows", c_void_p),
        ("token_ids", c_void_p),
        ("emitting", c_void_p),
        ("adapters", c_void_p),
        ("saves", c_void_p),
        ("num_saves", c_int64),
    )


class StateRowsCall(ctypes.Structure):
    """`qs_state_rows`."""

    _fields_ = (
        ("num_rows", c_int64),
        ("row_offsets", c_void_p),
        ("rows", c_void_p),
        ("saves", c_void_p),
        ("num_saves", c_int64),
        ("states", c_void_p),
        ("num_slots", c_int64),
        ("slot_floats", c_int64),
    )


class ShortConvCall(ctypes.Structure):
    """`qs_short_conv_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("width", c_int32),
        ("num_channels", c_int64),
        ("x_stride", c_int64),
        ("x", c_void_p),
        ("taps", c_void_p),
        ("bias", c_void_p),
        ("rows", StateRowsCall),
        ("out", c_void_p),
    )


class DeltaCall(ctypes.Structure):
    """`qs_delta_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("width", c_int32),
        ("num_key_heads", c_int64),
        ("num_value_heads", c_int64),
        ("key_size", c_int64),
        ("value_size", c_int64),
        ("x_stride", c_int64),
        ("shared_stride", c_int64),
        ("eps", c_float),
        ("x", c_void_p),
        ("taps", c_void_p),
        ("rates", c_void_p),
        ("biases", c_void_p),
        ("norm", c_void_p),
        ("rows", StateRowsCall),
        ("out", c_void_p),
    )


class MambaCall(ctypes.Structure):
    """`qs_mamba_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("width", c_int32),
        ("num_heads", c_int64),
        ("num_groups", c_int64),
        ("head_size", c_int64),
        ("state_size", c_int64),
        ("x_stride", c_int64),
        ("eps", c_float),
        ("least_step", c_float),
        ("most_step", c_float),
        ("gate_factor", c_float),
        ("step_factor", c_float),
        ("norms_first", c_int32),
        ("x", c_void_p),
        ("taps", c_void_p),
        ("conv_bias", c_void_p),
        ("rates", c_void_p),
        ("biases", c_void_p),
        ("skips", c_void_p),
        ("norm", c_void_p),
        ("rows", StateRowsCall),
        ("out", c_void_p),
    )


class GatherCall(ctypes.Structure):
    """`qs_gather`."""

    _fields_ = (
        ("group", c_void_p),
        ("x", c_void_p),
        ("stride_bytes", c_int64),
        ("rows", c_int64),
        ("own_bytes", c_int64),
        ("first_byte", c_int64),
        ("row_bytes", c_int64),
        ("ids", c_void_p),
        ("first_id", c_int64),
        ("num_ids", c_int64),
        ("for_first", c_int64),
        ("out", c_void_p),
    )


class MessageCall(ctypes.Structure):
    """`qs_message`."""

    _fields_ = (
        ("kind", c_int64),
        ("numbers", c_int64 * 4),
        ("step", StepCall),
        ("num_tokens", c_int64),
        ("adapters", c_void_p),
        ("data", c_void_p),
        ("num_bytes", c_int64),
    )


class SampleCall(ctypes.Structure):
    """`qs_sample`."""

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
        ("applies_xtc", c_int32),
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
        ("total_probability", c_int64),
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
        ("total_probabilities", c_void_p),
        ("peaks", c_void_p),
        ("chosen", c_void_p),
        ("top_ids", c_void_p),
        ("top_logits", c_void_p),
    )


class SuffixCall(ctypes.Structure):
    """`qs_suffix_call`."""

    _fields_ = (
        ("num_tasks", c_int64),
        ("tasks", c_void_p),
        ("new_token_ids", c_void_p),
        ("max_match", c_int64),
        ("max_indexed", c_int64),
        ("max_spec_factor", c_double),
        ("min_prob", c_double),
        ("num_found", c_void_p),
        ("draft_ids", c_void_p),
    )


class PiecesCall(ctypes.Structure):
    """`qs_pieces_call`."""

    _fields_ = (
        ("texts", c_char_p),
        ("num_bytes", c_int64),
        ("num_tokens", c_int64),
        ("scores", c_void_p),
        ("kinds", c_void_p),
        ("adds_space", c_int64),
    )


_P, _I, _L, _F, _D = c_void_p, c_int, c_int64, c_float, c_double

# name -> (result, arguments), in the order of csrc/quickstep.h
_SIGNATURES: tuple[tuple[str, object, tuple[object, ...]], ...] = (
    ("qs_abi_version", _I, ()),
    ("qs_isa_levels", c_char_p, ()),
    ("qs_context_create", _I, (c_char_p, _I, POINTER(_P))),
    ("qs_context_destroy", None, (_P,)),
    ("qs_context_isa", c_char_p, (_P,)),
    ("qs_linear_create", _I, (_P, _I, _P, _L, _L, _L, _P, POINTER(_P))),
    ("qs_linear_destroy", None, (_P,)),
    ("qs_linear_bytes", _L, (_P,)),
    ("qs_linear_run", _I, (_P, _P, _P, _L, _L, _P)),
    ("qs_linear_rows", _I, (_P, _P, _P, _L, _P)),
    ("qs_quantize", _I, (_P, POINTER(QuantizeCall))),
    ("qs_quantized_create", _I, (_P, POINTER(QuantizedWeightCall), POINTER(_P))),
    ("qs_quantized_stack", _I, (POINTER(_P), _L, POINTER(_P))),
    ("qs_quantized_destroy", None, (_P,)),
    ("qs_quantized_bytes", _L, (_P,)),
    ("qs_quantized_scratch_bytes", _L, (_P, _L)),
    ("qs_quantized_run", _I, (_P, _P, _I, _P, _L, _L, _P, _P)),
    ("qs_quantized_rows", _I, (_P, _P, _I, _P, _L, _P)),
    ("qs_linear_load", _I, (_P, _P, _P, POINTER(_P))),
    ("qs_quantized_load", _I, (_P, _P, _P, POINTER(_P))),
    ("qs_linear_parts", None, (_P, _P, _P)),
    ("qs_quantized_parts", None, (_P, _P, _P)),
    ("qs_linear_map", _I, (_P, _P, _I, _L, POINTER(_P))),
    ("qs_quantized_map", _I, (_P, _P, _I, _L, POINTER(_P))),
    ("qs_parts_checksum", c_uint64, (_P, _P)),
    ("qs_embedding", _I, (_P, _P, _L, _P, _L, _L, _P)),
    ("qs_rms_norm", _I, (_P, _I, _P, _L, _L, _L, _L, _L, _P, _F, _F, _P)),
    ("qs_add_rms_norm", _I, (_P, _I, _P, _P, _L, _L, _P, _F, _F, _P, _P)),
    ("qs_rotary", _I, (_P, _I, _P, _L, _L, _L, _L, _P, _P, _L, _I, _P)),
    ("qs_gated_activation", _I, (_P, _I, _I, _P, _L, _L, _P)),
    ("qs_activation_of", _I, (_P, _I, _I, _P, _L, _P, _L, _L, _L, _P)),
    ("qs_layer_norm", _I, (_P, _I, _P, _P, *(_L,) * 5, _P, _L, _P, _F, _F, _P, _P)),
    ("qs_write_kv", _I, (_P, POINTER(KVWriteCall))),
    ("qs_move_kv", _I, (POINTER(KVMoveCall),)),
    ("qs_attention_scratch_bytes", _L, (_P, POINTER(AttentionCall))),
    ("qs_paged_attention", _I, (_P, POINTER(AttentionCall))),
    ("qs_text_attention", _I, (_P, POINTER(TextAttentionCall))),
    ("qs_lora_create", _I, (_I, POINTER(LoRAPartCall), _L, _L, POINTER(_P))),
    ("qs_lora_destroy", None, (_P,)),
    ("qs_lora_bytes", _L, (_P,)),
    ("qs_lora_scratch_bytes", _L, (POINTER(LoRAAddCall),)),
    ("qs_lora_add", _I, (_P, _I, POINTER(LoRAAddCall))),
    ("qs_experts_create", _I, (_P, _L, POINTER(_P))),
    ("qs_experts_destroy", None, (_P,)),
    ("qs_route", _I, (_P, _P)),
    ("qs_experts_scratch_bytes", _L, (_P, _P)),
    ("qs_experts_run", _I, (_P, _P, _P)),
    ("qs_gate", _I, (_P, _I, _P, _P, _L, _L, _L, _L, _P)),
    ("qs_streams", _I, (_P, _P)),
    ("qs_match_magnitude", _I, (_P, _P)),
    ("qs_cut_gates", _I, (_P, _I, _P, _L, _L, _F, _P)),
    ("qs_short_conv", _I, (_P, POINTER(ShortConvCall))),
    ("qs_delta", _I, (_P, POINTER(DeltaCall))),
    ("qs_mamba", _I, (_P, POINTER(MambaCall))),
    ("qs_head_linear_run", _I, (_P, _P, _P)),
    ("qs_latent_keys", _I, (_P, _P)),
    ("qs_probe_create", _I, (_P, _L, POINTER(_P))),
    ("qs_probe_destroy", None, (_P,)),
    ("qs_probe_bytes", _L, (_P,)),
    ("qs_probe_read", _I, (_P, _P, POINTER(c_uint32))),
    ("qs_probe_multiply", _I, (_P, _I, _L, POINTER(_L))),
    ("qs_probe_multiply_int8", _I, (_P, _L, POINTER(_L))),
    ("qs_context_loop_ns", _L, (_P,)),
    ("qs_context_place", _I, (_P, POINTER(c_int32), _L, c_uint64)),
    ("qs_add", _I, (_P, _I, _P, _P, _L, _P)),
    ("qs_scale", _I, (_P, _I, _P, _L, _F, _P)),
    ("qs_finish_logits", _I, (_P, _I, _P, _L, _D, _D, _P)),
    ("qs_program_create", _I, (_P, POINTER(OpCall), _L, POINTER(ProgramInputs), POINTER(_P))),
    ("qs_program_destroy", None, (_P,)),
    ("qs_program_run", _I, (_P, _P)),
    ("qs_group_bytes", _L, (_L, _L)),
    ("qs_group_open", _I, (_P, _L, _L, _I, _I, POINTER(_P))),
    ("qs_group_close", None, (_P,)),
    ("qs_group_break", None, (_P,)),
    ("qs_group_waited_ns", _L, (_P,)),
    ("qs_group_gather", _I, (_P, POINTER(GatherCall))),
    ("qs_local_ids", _I, (_P, _L, _L, _L, _L, _P)),
    ("qs_group_post", _I, (_P, POINTER(MessageCall))),
    ("qs_group_take", _I, (_P, POINTER(MessageCall))),
    ("qs_group_finish", None, (_P,)),
    ("qs_sample_scratch_bytes", _L, (_P, _L, _L)),
    ("qs_sample_rows", _I, (_P, _P, _L, _L, _P)),
    ("qs_score_tokens", _I, (_P, _P, _P)),
    ("qs_text_create", _I, (POINTER(_P),)),
    ("qs_text_destroy", None, (_P,)),
    ("qs_text_size", _L, (_P,)),
    ("qs_text_append", _I, (_P, _P, _L)),
    ("qs_text_append_end", _I, (_P, _P, _L)),
    ("qs_suffix_propose", _I, (POINTER(SuffixCall),)),
    ("qs_skip_texts", _L, (c_char_p, _L, _L, POINTER(_L))),
    ("qs_join_texts", _L, (c_char_p, _L, _L, c_char_p)),
    ("qs_pieces_create", _I, (POINTER(PiecesCall), POINTER(_P))),
    ("qs_pieces_destroy", None, (_P,)),
    ("qs_pieces_texts", _P, (_P, POINTER(_P))),
    ("qs_pieces_find", c_int32, (_P, c_char_p, _L)),
    ("qs_pieces_encode", _I, (_P, c_char_p, _L, _P, _L, POINTER(_L))),
)


def library_path() -> Path:
    """Where the build puts the library, whether it is there or not."""
    return Path(__file__).resolve().parents[2] / "_native" / "libquickstep.so"


@functools.cache
def open_library(path: Path) -> ctypes.CDLL:
    """Load the library and declare its functions, once. Raises OSError when it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    try:
        for name, result, arguments in _SIGNATURES:
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except AttributeError as error:
        raise OSError(f"{path} is from another version of quickstep: {error}") from error
    version = library.qs_abi_version()
    if version != ABI_VERSION:
        raise OSError(f"{path} has ABI {version}, this quickstep needs {ABI_VERSION}; rebuild it")
    return library


def raise_for_status(status: int, what: str) -> None:
    """Turn a status other than QS_OK into the exception that names it."""
    if status == _OK:
        return
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"{what}: the machine has no memory left")
    if status == _UNSUPPORTED_ISA:
        raise ConfigError(f"{what}: this machine has no such CPU kernels")
    if status == _OUT_OF_RANGE:
        raise EngineError(f"{what}: an index lies outside its table")
    if status == _PEER_LOST:
        raise EngineError(f"{what}: another rank of the model is lost")
    raise EngineError(f"{what}: invalid arguments for the native kernel (status {status})")
