"""The arithmetic of PTX on numpy arrays: everything that reads registers and writes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simt.ptx_memory import PtxError
from tests.simt.ptx_parser import Instruction

Array = NDArray[Any]
TYPES: dict[str, Any] = {
    "pred": np.bool_, "u8": np.uint8, "b8": np.uint8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b), "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "copysign": lambda sign, magnitude: np.copysign(magnitude, sign),
}  # fmt: skip
UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "sqrt": np.sqrt,
    "rcp": lambda x: np.float32(1) / x, "rsqrt": lambda x: np.float32(1) / np.sqrt(x), "popc": np.bitwise_count,
}  # fmt: skip
PREDICATES: dict[str, Callable[..., Any]] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
}  # fmt: skip


def widen_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_to_bf16(values: Array) -> Array:
    """Round to nearest even."""
    u = np.ascontiguousarray(values).view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def make_operation(i: Instruction) -> tuple[list[Any], Callable[..., Array]]:
    """The types of the sources, and the function of them."""
    family, last = i.parts[0], i.parts[-1]
    if family == "cvt":
        return _conversion(i)
    if last not in TYPES:
        raise PtxError(f"unknown instruction {i}")
    dtype = TYPES[last]
    num_sources = len(i.operands) - 1
    if last == "pred":
        return [np.bool_] * num_sources, PREDICATES[family]
    if family == "setp":
        return _comparison(i, dtype)
    if family == "selp":
        return [dtype, dtype, np.bool_], lambda a, b, p: np.where(p, a, b)
    if family in ("shl", "shr"):
        return [dtype, np.uint32], _shift(family, dtype)
    if family == "bfi":
        return [dtype, dtype, np.uint32, np.uint32], _bit_field_insert
    if family == "not":
        return [dtype], np.invert
    if family in ("mul", "mad", "fma"):
        return _multiplication(i, dtype)
    if family in ("div", "rem"):
        return [dtype, dtype], _division(family, dtype)
    if family in ("min", "max"):
        of_floats, of_integers = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[family]
        return [dtype, dtype], of_floats if np.dtype(dtype).kind == "f" else of_integers
    table = UNARY if family in UNARY else BINARY
    if family not in table:
        raise PtxError(f"unknown instruction {i}")
    return [dtype] * num_sources, table[family]


def _comparison(i: Instruction, dtype: Any) -> tuple[list[Any], Callable[..., Array]]:
    compare = COMPARISONS[i.parts[1]]
    if len(i.operands) == 3:
        return [dtype, dtype], compare
    join = PREDICATES[i.parts[2]]
    return [dtype, dtype, np.bool_], lambda a, b, p: join(compare(a, b), p)


def _shift(family: str, dtype: Any) -> Callable[..., Array]:
    bits = 8 * np.dtype(dtype).itemsize
    is_signed = np.dtype(dtype).kind == "i"

    def shift(a: Array, by: Array) -> Array:
        amount = np.minimum(by, bits - 1).astype(dtype)
        shifted = a << amount if family == "shl" else a >> amount
        return shifted if is_signed and family == "shr" else np.where(by >= bits, np.zeros_like(a), shifted)

    return shift


def _bit_field_insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    one, at = a.dtype.type(1), position.astype(a.dtype)
    mask = ((one << length.astype(a.dtype)) - one) << at
    return (b & ~mask) | (a << at & mask)


def _multiplication(i: Instruction, dtype: Any) -> tuple[list[Any], Callable[..., Array]]:
    family, num_sources = i.parts[0], len(i.operands) - 1
    if np.dtype(dtype).kind == "f":
        if family == "mul":
            return [dtype, dtype], np.multiply
        if dtype is not np.float32:
            raise PtxError(f"unknown instruction {i}")
        return [dtype] * 3, _fma_down if "rm" in i.parts else _fma
    if "wide" in i.parts:
        wide = np.int64 if np.dtype(dtype).kind == "i" else np.uint64
        if family == "mad":
            return [dtype, dtype, wide], lambda a, b, c: a.astype(wide) * b.astype(wide) + c
        return [dtype, dtype], lambda a, b: a.astype(wide) * b.astype(wide)
    if "hi" in i.parts:
        if family != "mul" or num_sources != 2:
            raise PtxError(f"unknown instruction {i}")
        if np.dtype(dtype).itemsize == 8:
            return [dtype, dtype], lambda a, b: np.array(
                [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], dtype
            )
        wide = np.int64 if np.dtype(dtype).kind == "i" else np.uint64
        return [dtype, dtype], lambda a, b: (a.astype(wide) * b.astype(wide) >> wide(32)).astype(dtype)
    if family == "mul":
        return [dtype, dtype], np.multiply
    return [dtype] * 3, lambda a, b, c: a * b + c


def _fma(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(np.float32)  # the product of two floats is exact in a double


def _fma_down(a: Array, b: Array, c: Array) -> Array:
    exact = a.astype(np.float64) * b + c
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _division(family: str, dtype: Any) -> Callable[..., Array]:
    if np.dtype(dtype).kind == "f":
        return np.divide
    if np.dtype(dtype).kind == "u":
        return np.floor_divide if family == "div" else np.remainder

    def truncating(a: Array, b: Array) -> Array:
        quotient = np.trunc(a.astype(np.float64) / b).astype(dtype)
        return quotient if family == "div" else a - quotient * b

    return truncating


def _conversion(i: Instruction) -> tuple[list[Any], Callable[..., Array]]:
    target_name, source_name = i.parts[-2], i.parts[-1]
    target, source = TYPES[target_name], TYPES[source_name]
    if target_name == "bf16":
        return [np.float32], narrow_to_bf16
    if source_name == "bf16":
        return [np.uint16], widen_bf16
    rounding = next((part for part in i.parts if part in ("rzi", "rmi", "rpi", "rni")), None)
    round_ = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint, None: lambda x: x}[rounding]
    is_saturating = "sat" in i.parts

    def convert(x: Array) -> Array:
        if np.dtype(source).kind == "f":
            x = round_(x)
        if is_saturating:
            x = np.clip(np.nan_to_num(x, nan=0.0), 0, 1)
        return x.astype(target)

    return [source], convert
