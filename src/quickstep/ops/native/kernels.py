"""The ops of the table on libquickstep: tensors in, raw pointers through ctypes, tensors out.

`ops.native.backend` makes one `NativeOps`, whose methods are the `OpTable`. Each op
allocates its result and makes one call. Element types that have no native kernel go to the
reference, op by op, which keeps both kinds of op exact. Arguments are checked by assertions of our
own invariants; a request's own errors were found long before.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from quickstep.ops.native.attention import NativeAttention, heads_in_place
from quickstep.ops.native.experts import NativeExperts
from quickstep.ops.native.latent import NativeLatent
from quickstep.ops.native.library import ACTIVATIONS, UNGATED, raise_for_status
from quickstep.ops.native.lora import NativeLoRA
from quickstep.ops.native.packed import (
    NativeLoading,
    NativeQuantized,
    PackedQuantized,
    PackedWeight,
    kernel_dtype,
)
from quickstep.ops.native.packed_files import NativePackedFiles
from quickstep.ops.native.states import NativeStates
from quickstep.ops.native.streams import NativeStreams
from quickstep.ops.table import LoRAMapping, OpTable
from quickstep.ops.tensors import (
    FLOAT32,
    INT64,
    AnyTensor,
    DType,
    HostTensor,
    TensorT,
    host_dtype,
    new_empty,
    to_dtype,
    to_torch,
    torch_dtype,
)
from quickstep.ops.weights import LinearWeight, QuantizedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Results of ops that are alive together at a layer's widest point, per element of it.
_SCRATCH_BYTES = 8


class NativeOps:
    """One `qs_context` (kernel table and threads) and the ops that run on it.

    Calls from several threads are safe; loops of one context run one after another.
    """

    def __init__(
        self, library: ctypes.CDLL, context: int, reference: Callable[[], OpTable]
    ) -> None:
        self._context = context
        self._library = library
        self._reference = reference
        self._quantized = NativeQuantized(library, context)
        self._linear_run = library.qs_linear_run
        self._embedding = library.qs_embedding
        self._rms_norm = library.qs_rms_norm
        self._add_rms_norm = library.qs_add_rms_norm
        self._rotary = library.qs_rotary
        self._gated_activation = library.qs_gated_activation
        self._activation_of = library.qs_activation_of
        self._layer_norm = library.qs_layer_norm
        self._finish_logits = library.qs_finish_logits
        self._attention = NativeAttention(library, context, reference)
        self._lora = NativeLoRA(library, context, reference)
        self._states = NativeStates(library, context)
        self._streams = NativeStreams(library, context)
        owner = weakref.ref(self)  # a cycle would keep the context and its threads

        def pack_linear(weight: AnyTensor, bias: None) -> LinearWeight:
            native = owner()
            assert native is not None, "a weight is packed by it"
            return native.pack_linear(weight, bias)

        self._latent = NativeLatent(library, context, pack_linear, reference)

        def ops() -> OpTable:
            native = owner()
            assert native is not None, "an op of the table is being computed"
            return native.table("")

        self._experts = NativeExperts(library, context, ops)
        finalizer = weakref.finalize(self, library.qs_context_destroy, context)
        finalizer.atexit = False

    def table(self, name: str) -> OpTable:
        """The op table of these methods, under the kernel set's name."""
        return OpTable(
            name=name,
            pack_linear=self.pack_linear,
            pack_quantized=self.pack_quantized,
            quantize=self.quantize,
            linear=self.linear,
            pack_lora=self._lora.pack_lora,
            add_lora_=self._lora.add_lora_,
            embedding=self.embedding,
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            rotary=self.rotary,
            write_kv=self._attention.write_kv,
            paged_attention=self._attention.paged_attention,
            gated_activation=self.gated_activation,
            layer_norm=self.layer_norm,
            add_layer_norm=self.add_layer_norm,
            activation=self.activation,
            logits=self.logits,
            scratch_bytes=_SCRATCH_BYTES,
            kernel_s=self.kernel_s,
            load_linear=NativeLoading(self._library, self._context).load_linear,
            packed_files=NativePackedFiles.of(self._library, self._context),
            move_kv=self._attention.move_kv,
            kv_in_pairs=True,
            pack_experts=self._experts.pack,
            route=self._experts.route,
            experts=self._experts.experts,
            latent=self._latent.ops(),
            text_attention=self._attention.text_attention,
            gate=self._states.gate,
            short_conv=self._states.short_conv,
            gated_delta=self._states.gated_delta,
            mamba=self._states.mamba,
            streams=self._streams.ops(),
        )

    def kernel_s(self) -> float:
        """`OpTable.kernel_s`."""
        return int(self._library.qs_context_loop_ns(self._context)) / 1e9

    def pack_linear(self, weight: AnyTensor, bias: AnyTensor | None) -> LinearWeight:
        """Copy weight [N, C] and bias into the kernel's layout, in memory of the library's own."""
        dtype, kind = kernel_dtype(weight.dtype), host_dtype(weight.dtype)
        if dtype is None or kind is None or weight.numel() == 0:
            return self._reference().pack_linear(weight, bias)
        weight = _rows(weight)
        if bias is not None:
            bias = to_dtype(bias, kind).contiguous()
        outputs, inputs = weight.shape
        handle = ctypes.c_void_p()
        status = self._library.qs_linear_create(
            self._context,
            dtype,
            weight.data_ptr(),
            outputs,
            inputs,
            weight.stride(0) if outputs > 1 else inputs,
            None if bias is None else bias.data_ptr(),
            ctypes.byref(handle),
        )
        raise_for_status(status, f"packing a {outputs} x {inputs} weight")
        assert handle.value is not None
        packed = PackedWeight(self._library, handle.value, kind)
        return LinearWeight(packed, None, outputs, inputs, packed.nbytes)

    def pack_quantized(self, weight: QuantizedWeight, bias: AnyTensor | None) -> LinearWeight:
        """`OpTable.pack_quantized`; weights in e4m3 have no native kernel."""
        if weight.is_float8:
            return self._reference().pack_quantized(weight, bias)
        return self._quantized.pack(weight, bias)

    def quantize(
        self,
        weight: Tensor,
        bits: int,
        group_size: int | None,
        has_zeros: bool,
        has_sub_scales: bool = False,
    ) -> QuantizedWeight:
        """`OpTable.quantize`."""
        form = (bits, group_size, has_zeros, has_sub_scales)
        return self._quantized.quantize(_rows(weight), *form)

    def linear(self, x: TensorT, weight: LinearWeight) -> TensorT:
        """`OpTable.linear`."""
        packed = weight.data
        if isinstance(packed, PackedQuantized):
            assert x.shape[1] == weight.num_inputs
            return self._quantized.linear(_rows(x), weight, packed)
        if not isinstance(packed, PackedWeight):
            assert not isinstance(x, HostTensor), "without torch, every weight has a native kernel"
            return self._reference().linear(x, weight)
        assert host_dtype(x.dtype) == packed.dtype and x.shape[1] == weight.num_inputs
        x = _rows(x)
        num_tokens = x.shape[0]
        out = x.new_empty((num_tokens, weight.num_outputs))
        status = self._linear_run(
            self._context, packed.handle, x.data_ptr(), x.stride(0), num_tokens, out.data_ptr()
        )
        if status:
            raise_for_status(status, "linear")
        return out

    def embedding(
        self, token_ids: Tensor, weight: AnyTensor | LinearWeight, dtype: DType | torch.dtype
    ) -> Tensor:
        """`OpTable.embedding`; a token id outside the table raises EngineError."""
        assert host_dtype(token_ids.dtype) == INT64
        token_ids = token_ids.contiguous()
        if isinstance(weight, LinearWeight):
            return self._packed_rows(token_ids, weight, dtype)
        assert weight.is_contiguous() and weight.dtype == dtype
        num_rows, size = weight.shape
        num_tokens = token_ids.numel()
        out = _new_rows(token_ids, (num_tokens, size), dtype)
        status = self._embedding(
            self._context,
            token_ids.data_ptr(),
            num_tokens,
            weight.data_ptr(),
            num_rows,
            size * weight.element_size(),
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "embedding")
        return out

    def _packed_rows(
        self, token_ids: Tensor, weight: LinearWeight, dtype: DType | torch.dtype
    ) -> Tensor:
        packed = weight.data
        shape = (token_ids.numel(), weight.num_inputs)
        out = _new_rows(token_ids, shape, dtype)
        if isinstance(packed, PackedQuantized):
            self._quantized.rows(token_ids, weight, out)
            return out
        if not isinstance(packed, PackedWeight):
            return self._reference().embedding(token_ids, weight, dtype)
        assert packed.dtype == host_dtype(dtype)
        status = self._library.qs_linear_rows(
            self._context,
            packed.handle,
            token_ids.data_ptr(),
            token_ids.numel(),
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "embedding")
        return out

    def rms_norm(self, x: Tensor, weight: AnyTensor, eps: float, offset: float) -> Tensor:
        """`OpTable.rms_norm` over the last dimension of [T, C] or [T, H, D]."""
        dtype = kernel_dtype(x.dtype)
        if dtype is None or weight.dtype != x.dtype:
            return self._reference().rms_norm(x, weight, eps, offset)
        if x.stride(-1) != 1:
            x = x.contiguous()
        size = x.shape[-1]
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        assert weight.is_contiguous() and weight.numel() == size and x.dim() in (2, 3)
        out = x.new_empty(x.shape)
        status = self._rms_norm(
            self._context,
            dtype,
            x.data_ptr(),
            x.shape[0],
            inner,
            size,
            x.stride(0),
            inner_stride,
            weight.data_ptr(),
            eps,
            offset,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "rms_norm")
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: AnyTensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """`OpTable.add_rms_norm` on [T, C]."""
        dtype = kernel_dtype(x.dtype)
        if dtype is None or weight.dtype != x.dtype or residual.dtype != x.dtype:
            return self._reference().add_rms_norm(x, residual, weight, eps, offset)
        x, residual = x.contiguous(), residual.contiguous()
        size = x.shape[-1]
        assert weight.is_contiguous() and weight.numel() == size and x.shape == residual.shape
        out, total = x.new_empty(x.shape), x.new_empty(x.shape)
        status = self._add_rms_norm(
            self._context,
            dtype,
            x.data_ptr(),
            residual.data_ptr(),
            x.shape[0],
            size,
            weight.data_ptr(),
            eps,
            offset,
            out.data_ptr(),
            total.data_ptr(),
        )
        if status:
            raise_for_status(status, "add_rms_norm")
        return out, total

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """`OpTable.rotary` on [T, H, D]; the rows of x may be slices of a wider tensor."""
        dtype = kernel_dtype(x.dtype)
        if dtype is None:
            return self._reference().rotary(x, cos, sin, interleaved)
        x = heads_in_place(x)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        num_tokens, num_heads, head_size = x.shape
        assert cos.shape == sin.shape and cos.shape[0] == num_tokens
        out = x.new_empty(x.shape)
        status = self._rotary(
            self._context,
            dtype,
            x.data_ptr(),
            num_tokens,
            num_heads,
            head_size,
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            interleaved,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "rotary")
        return out

    def gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        """`OpTable.gated_activation`."""
        dtype = kernel_dtype(gate_up.dtype)
        if dtype is None or kind not in ACTIVATIONS:
            return self._reference().gated_activation(gate_up, kind)
        gate_up = gate_up.contiguous()
        num_tokens, width = gate_up.shape
        out = gate_up.new_empty((num_tokens, width // 2))
        status = self._gated_activation(
            self._context,
            dtype,
            ACTIVATIONS[kind],
            gate_up.data_ptr(),
            num_tokens,
            width // 2,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "gated_activation")
        return out

    def activation(self, x: Tensor, factor: Tensor | None, kind: str) -> Tensor:
        """`OpTable.activation`; rows may be slices of wider tensors."""
        dtype = kernel_dtype(x.dtype)
        if dtype is None or kind not in UNGATED:
            from quickstep.ops.reference.elementary import activation

            return activation(x, factor, kind)
        x = _rows(x)
        factor = None if factor is None else _rows(factor)
        out = x.new_empty(x.shape)
        status = self._activation_of(
            self._context,
            dtype,
            UNGATED[kind],
            x.data_ptr(),
            x.stride(0),
            None if factor is None else factor.data_ptr(),
            0 if factor is None else factor.stride(0),
            *x.shape,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "activation")
        return out

    def layer_norm(
        self, x: Tensor, weight: AnyTensor, bias: AnyTensor | None, eps: float, offset: float
    ) -> Tensor:
        """`OpTable.layer_norm` over the last dimension of [T, C] or [T, H, D]."""
        return self._layer_norm_of(x, None, weight, bias, eps, offset)[0]

    def add_layer_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: AnyTensor,
        bias: AnyTensor | None,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        """`OpTable.add_layer_norm` on [T, C]."""
        return self._layer_norm_of(x.contiguous(), residual.contiguous(), weight, bias, eps, offset)

    def _layer_norm_of(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: AnyTensor,
        bias: AnyTensor | None,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        """The norm, and the sum of x and the residual."""
        dtype = kernel_dtype(x.dtype)
        others = [tensor for tensor in (weight, bias, residual) if tensor is not None]
        if dtype is None or any(tensor.dtype != x.dtype for tensor in others):
            from quickstep.ops.reference.elementary import add_layer_norm, layer_norm

            if residual is not None:
                return add_layer_norm(x, residual, weight, bias, eps, offset)
            return layer_norm(x, weight, bias, eps, offset), x
        x = x if x.stride(-1) == 1 else x.contiguous()
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        assert weight.is_contiguous() and weight.numel() == inner * x.shape[-1]
        out = x.new_empty(x.shape)
        total = x if residual is None else x.new_empty(x.shape)
        status = self._layer_norm(
            self._context,
            dtype,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            x.shape[0],
            inner,
            x.shape[-1],
            x.stride(0),
            inner_stride,
            weight.data_ptr(),
            x.shape[-1],
            None if bias is None else bias.data_ptr(),
            eps,
            offset,
            out.data_ptr(),
            None if residual is None else total.data_ptr(),
        )
        if status:
            raise_for_status(status, "layer_norm")
        return out, total

    def logits(
        self,
        hidden: AnyTensor,
        weight: LinearWeight,
        divisor: float,
        softcap: float | None,
        lora: tuple[int, LoRAMapping] | None,
    ) -> AnyTensor:
        """`OpTable.logits`."""
        product = self.linear(hidden, weight)
        if lora is not None:
            self._lora.add_lora_(product, _rows(hidden), *lora)
        dtype = kernel_dtype(product.dtype)
        if dtype is None:
            from quickstep.ops.reference.logits import finished_logits

            return finished_logits(to_torch(product), divisor, softcap)
        out = new_empty(product, product.shape, FLOAT32)
        status = self._finish_logits(
            self._context,
            dtype,
            product.data_ptr(),
            product.numel(),
            divisor,
            softcap or 0.0,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "logits")
        return out


def _new_rows(ids: TensorT, shape: tuple[int, int], dtype: DType | torch.dtype) -> TensorT:
    """A new tensor of the class of `ids`; not initialized."""
    kind = host_dtype(dtype)
    if isinstance(ids, HostTensor):
        assert kind is not None
        return ids.new_empty(shape, kind)
    return ids.new_empty(shape, dtype=torch_dtype(dtype))


def _rows(x: TensorT) -> TensorT:
    """[T, C] with contiguous rows: itself, or a copy."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()
