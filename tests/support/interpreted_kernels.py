"""Triton's interpreter without what it repeats: the results of kernels are the same, in half of
the time. Every value that a kernel computes is an object of Python with a type and a shape, and
most of the time makes those.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def shorten_interpretation() -> None:
    """For all launches of this process from now on."""
    _keep_interpreted_functions()
    _keep_numpy_types()
    _keep_shapes()
    _compare_objects_first()
    # With this on, each sum of integers is computed again in 64 bits, and compared with the bounds
    # of its type for an assertion that the interpreter ignores.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_interpreted_functions() -> None:
    """Every launch replaces the functions of `triton.language` by interpreted ones, which it looks
    up among all members of the modules, and restores them at its end. Here they stay replaced.
    """
    for language in (interpreter.tl, interpreter.tl.core):  # what the functions of kernels see
        interpreter._patch_lang(SimpleNamespace(__globals__={"language": language}))
    nothing_to_restore = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda _: nothing_to_restore


def _keep_numpy_types() -> None:
    """The NumPy type of every value is looked up in a table that is built for it."""
    find_type = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def type_of(triton_type: Any) -> Any:
        name = triton_type.scalar.name  # a block has the type of its elements
        if name not in types:
            types[name] = find_type(triton_type)
        return types[name]

    interpreter._get_np_dtype = type_of


def _keep_shapes() -> None:
    """Every value has the shape of its type as a tuple of constants, and every block the same of
    numbers, checked, made of new objects. Here values of one shape have the same.
    """
    scalar_shape, one = tl.tuple([]), tl.constexpr(1)
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    of_blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    init_new_block = tl.block_type.__init__
    unwrap_any = tl.core._unwrap_if_constexpr

    def unwrap(value: Any) -> Any:
        if type(value) is tl.constexpr:
            return value.value
        return unwrap_any(value) if isinstance(value, list | tuple | tl.tuple) else value

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar_shape, one
            return
        sizes = tuple(type.shape.values)
        if sizes not in of_tensors:
            shape = tl.tuple([tl.constexpr(size) for size in sizes])
            of_tensors[sizes] = (shape, tl.constexpr(math.prod(sizes)))
        self.shape, self.numel = of_tensors[sizes]

    def init_block(self: Any, element_type: Any, shape: Any) -> None:
        sizes = tuple(map(unwrap, shape))
        if sizes not in of_blocks:
            init_new_block(self, element_type, shape)
            of_blocks[sizes] = (self.shape, self.numel, str(self.shape))
        self.element_ty = element_type
        self.shape, self.numel, text = of_blocks[sizes]
        self.name = f"<{text}, {element_type}>"

    tl.core._unwrap_if_constexpr = unwrap
    tl.tensor.__init__ = init_tensor
    tl.block_type.__init__ = init_block


def _compare_objects_first() -> None:
    """Most operands have the same types and, since these are kept, the same shape."""
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
    are_equal = tl.dtype.__eq__

    def broadcast_unless_same(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast_unless_same
    tl.dtype.__eq__ = lambda self, other: self is other or are_equal(self, other)
