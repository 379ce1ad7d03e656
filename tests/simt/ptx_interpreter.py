"""Runs the PTX that nvcc really emitted, inline assembly included: one numpy lane a thread, the whole grid at once.

The second line of defence behind the emulator, which runs the same sources but neither the operands and constraints of
the inline assembly, nor what the optimizer made of addresses and predicates. Threads at the lowest instruction run
first, so that branches come together again. cp.async copies at once: whether somebody waits is the emulator's to check.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simt.emulator import CapturedLaunch, TensorTraffic
from tests.simt.ptx_memory import GlobalMemory, PtxError, SharedMemory
from tests.simt.ptx_operations import TYPES, Array, make_operation, narrow_to_bf16, widen_bf16
from tests.simt.ptx_parser import Instruction, Kernel

Lanes = NDArray[np.int64]
Step = Callable[[Lanes], None]
REGISTER_TYPES = {
    "p": np.bool_,
    "rs": np.uint16,
    "h": np.uint16,
    "r": np.uint32,
    "f": np.float32,
    "rd": np.uint64,
    "fd": np.float64,
}
AT_BARRIER = 1 << 40  # added to the position of a thread that waits
EXITED = 1 << 41


def run_launch(kernel: Kernel, launch: CapturedLaunch, tensors: dict[str, TensorTraffic]) -> None:
    machine = Machine(kernel, launch, tensors)
    with np.errstate(all="ignore"):
        machine.run()


class Machine:
    def __init__(self, kernel: Kernel, launch: CapturedLaunch, tensors: dict[str, TensorTraffic]) -> None:
        self.kernel = kernel
        grid, self.block_threads = launch.grid, launch.block[0]
        self.num_blocks = grid[0] * grid[1] * grid[2]
        self.num_threads = self.num_blocks * self.block_threads
        thread = np.arange(self.num_threads)
        self.block_of = thread // self.block_threads
        self.globals = GlobalMemory(tensors)
        self.shared = SharedMemory(self.num_blocks, launch.shared_bytes)
        self.params = np.frombuffer(launch.params, np.uint8)
        block = self.block_of
        special = {
            "%tid.x": thread % self.block_threads, "%ctaid.x": block % grid[0], "%ctaid.y": block // grid[0] % grid[1],
            "%ctaid.z": block // (grid[0] * grid[1]), "%ntid.x": np.full_like(thread, self.block_threads),
            "%nctaid.x": np.full_like(thread, grid[0]), "%nctaid.y": np.full_like(thread, grid[1]),
        }  # fmt: skip
        self.registers: dict[str, Array] = {name: values.astype(np.uint32) for name, values in special.items()}
        self.steps = [self.compile(instruction) for instruction in kernel.instructions]

    # ---- operands

    def register(self, name: str) -> Array:
        if name not in self.registers:
            match = re.match(r"%([a-z]+)\d+$", name)
            if match is None or match[1] not in REGISTER_TYPES:
                raise PtxError(f"unknown register {name}")
            self.registers[name] = np.zeros(self.num_threads, REGISTER_TYPES[match[1]])
        return self.registers[name]

    def source(self, operand: str, dtype: Any) -> Callable[[Lanes], Array]:
        """Reads a register, constant or symbol as the type."""
        wanted = np.dtype(dtype)
        if operand.startswith("%"):
            values = self.register(operand)
            if values.dtype != wanted and values.dtype.itemsize == wanted.itemsize and wanted != np.bool_:
                values = values.view(wanted)
            return lambda lanes: values[lanes]
        if operand.startswith("0f"):
            constant: Any = np.array(int(operand[2:], 16), np.uint32).view(np.float32)[()]
        elif operand.startswith("0d"):
            constant = np.array(int(operand[2:], 16), np.uint64).view(np.float64)[()]
        elif re.match(r"-?(\d|0x)", operand):
            number = int(operand.rstrip("U"), 0)
            if wanted == np.bool_ or wanted.kind == "f":
                constant = wanted.type(number)
            else:
                bits = number & ((1 << 8 * wanted.itemsize) - 1)
                constant = np.array(bits, f"u{wanted.itemsize}").view(wanted)[()]
        elif operand in self.kernel.parameter_offsets:
            constant = np.uint64(self.kernel.parameter_offsets[operand])
        else:
            constant = wanted.type(0)  # the symbol of dynamic shared memory, the only one that kernels have
        return lambda lanes: np.full(len(lanes), constant)

    def target(self, operand: str) -> Callable[[Lanes, Array], None]:
        if operand == "_":
            return lambda lanes, values: None
        register = self.register(operand)

        def write(lanes: Lanes, values: Array) -> None:
            if values.dtype != register.dtype:
                same_size = values.dtype.itemsize == register.dtype.itemsize and register.dtype != np.bool_
                values = (
                    np.ascontiguousarray(values).view(register.dtype) if same_size else values.astype(register.dtype)
                )
            register[lanes] = values

        return write

    def targets(self, operand: str) -> list[Callable[[Lanes, Array], None]]:
        return [self.target(name) for name in _names(operand)]

    def address(self, operand: str, dtype: Any) -> Callable[[Lanes], Array]:
        match = re.match(r"\[\s*([^+\]]+?)\s*(?:\+\s*(-?\d+))?\s*\]$", operand)
        if match is None:
            raise PtxError(f"unknown address {operand}")
        base, offset = self.source(match[1], dtype), np.dtype(dtype).type(int(match[2] or 0) % 2**32)
        if int(match[2] or 0) < 0:
            offset = np.array(int(match[2]), np.int64).astype(dtype)[()]
        return lambda lanes: base(lanes) + offset

    def warps(self, lanes: Lanes, at: str) -> Lanes:
        """The threads as [warps, 32]; raises where a warp is not complete."""
        if len(lanes) % 32 == 0:
            warps = lanes.reshape(-1, 32)
            if (warps[:, 0] % 32 == 0).all() and (warps == warps[:, :1] + np.arange(32)).all():
                return warps
        raise PtxError(f"a warp is divergent at {at}")

    # ---- instructions

    def compile(self, i: Instruction) -> tuple[str, Any]:
        """(kind, step or branch target)"""
        family = i.parts[0]
        if family == "bra":
            return "branch", self.kernel.labels[i.operands[0]]
        if family in ("ret", "exit"):
            return "exit", None
        if family in ("bar", "barrier"):
            return ("step", lambda lanes: None) if "warp" in i.parts else ("barrier", None)
        special = {
            "ld": self.compile_load, "st": self.compile_store, "cp": self.compile_copy, "mma": self.compile_mma,
            "ldmatrix": self.compile_ldmatrix, "shfl": self.compile_shuffle, "vote": self.compile_vote,
            "atom": self.compile_atomic, "mov": self.compile_move, "cvta": self.compile_move,
        }  # fmt: skip
        if family in special:
            return "step", special[family](i)
        if family == "cvt" and i.parts[-2] in ("bf16x2", "f16x2"):
            return "step", self.compile_pack(i)
        types, operation = make_operation(i)
        sources = [self.source(name, t) for name, t in zip(i.operands[1:], types, strict=True)]
        write = self.target(i.operands[0])
        return "step", lambda lanes: write(lanes, operation(*(source(lanes) for source in sources)))

    def compile_load(self, i: Instruction) -> Step:
        dtype, count = TYPES[i.parts[-1]], _vector_size(i)
        size, at, writes = np.dtype(dtype).itemsize * count, str(i), self.targets(i.operands[0])
        if "param" in i.parts:
            offset = self.address(i.operands[1], np.uint64)  # a thread may choose among parameters

            def load_params(lanes: Lanes) -> None:
                raw = self.params[offset(lanes).astype(np.int64)[:, None] + np.arange(size)]
                for column, write in enumerate(writes):
                    write(lanes, np.ascontiguousarray(raw.view(dtype)[:, column]))

            return load_params
        is_shared = "shared" in i.parts
        address = self.address(i.operands[1], np.uint32 if is_shared else np.uint64)

        def load(lanes: Lanes) -> None:
            where = address(lanes)
            raw = (
                self.shared.load(self.block_of[lanes], where, size, at)
                if is_shared
                else self.globals.load(where, size, at)
            )
            values = raw.view(dtype)
            for column, write in enumerate(writes):
                write(lanes, np.ascontiguousarray(values[:, column]))

        return load

    def compile_store(self, i: Instruction) -> Step:
        dtype, at = TYPES[i.parts[-1]], str(i)
        sources = [self.source(name, dtype) for name in _names(i.operands[1])]
        is_shared = "shared" in i.parts
        address = self.address(i.operands[0], np.uint32 if is_shared else np.uint64)

        def store(lanes: Lanes) -> None:
            raw = np.stack([source(lanes) for source in sources], 1).astype(dtype).view(np.uint8)
            if is_shared:
                self.shared.store(self.block_of[lanes], address(lanes), raw, at)
            else:
                self.globals.store(address(lanes), raw, at)

        return store

    def compile_copy(self, i: Instruction) -> Step:
        if "commit_group" in i.parts or "wait_group" in i.parts:
            return lambda lanes: None
        target, source = self.address(i.operands[0], np.uint32), self.address(i.operands[1], np.uint64)
        size, at = int(i.operands[2]), str(i)
        num_bytes = self.source(i.operands[3] if len(i.operands) > 3 else i.operands[2], np.uint32)

        def copy(lanes: Lanes) -> None:
            valid = num_bytes(lanes)
            if ((valid != 0) & (valid != size)).any():
                raise PtxError(f"a partial copy at {at}")
            raw = np.zeros((len(lanes), size), np.uint8)
            read = np.flatnonzero(valid)
            raw[read] = self.globals.load(source(lanes)[read], size, at)
            self.shared.store(self.block_of[lanes], target(lanes), raw, at)

        return copy

    def compile_ldmatrix(self, i: Instruction) -> Step:
        is_transposed, at = "trans" in i.parts, str(i)
        writes, address = self.targets(i.operands[0]), self.address(i.operands[1], np.uint32)
        lane = np.arange(32)

        def load(lanes: Lanes) -> None:
            warps = self.warps(lanes, at)
            raw = self.shared.load(self.block_of[lanes], address(lanes), 16, at)
            matrices = raw.view(np.uint16).reshape(len(warps), 4, 8, 8)
            if is_transposed:
                matrices = matrices.transpose(0, 1, 3, 2)
            pairs = [matrices[:, :, lane // 4, 2 * (lane % 4) + e].astype(np.uint32) for e in (0, 1)]  # [warps, 4, 32]
            for j, write in enumerate(writes):
                write(lanes, (pairs[0][:, j] | pairs[1][:, j] << np.uint32(16)).ravel())

        return load

    def compile_mma(self, i: Instruction) -> Step:
        if "m16n8k16" not in i.parts:
            raise PtxError(f"unknown shape at {i}")
        at, is_bf16 = str(i), "bf16" in i.parts
        writes = self.targets(i.operands[0])
        a, b = ([self.source(name, np.uint32) for name in _names(operand)] for operand in i.operands[1:3])
        c = [self.source(name, np.float32) for name in _names(i.operands[3])]
        lane = np.arange(32)
        g, t = lane // 4, lane % 4

        def widen(bits: Array) -> Array:
            bits = bits.astype(np.uint16)
            return widen_bf16(bits) if is_bf16 else bits.view(np.float16).astype(np.float32)

        def multiply_add(lanes: Lanes) -> None:
            num_warps = len(self.warps(lanes, at))
            matrix_a, matrix_b = np.empty((num_warps, 16, 16), np.float32), np.empty((num_warps, 16, 8), np.float32)
            matrix_c = np.empty((num_warps, 16, 8), np.float32)
            for e in (0, 1):
                for r in range(4):
                    values = widen(a[r](lanes) >> np.uint32(16 * e)).reshape(num_warps, 32)
                    matrix_a[:, g + (r & 1) * 8, 2 * t + (r >> 1) * 8 + e] = values
                for r in range(2):
                    matrix_b[:, 2 * t + 8 * r + e, g] = widen(b[r](lanes) >> np.uint32(16 * e)).reshape(num_warps, 32)
            for r in range(4):
                matrix_c[:, g + (r >> 1) * 8, 2 * t + (r & 1)] = c[r](lanes).reshape(num_warps, 32)
            result = matrix_c + matrix_a @ matrix_b
            for r, write in enumerate(writes):
                write(lanes, np.ascontiguousarray(result[:, g + (r >> 1) * 8, 2 * t + (r & 1)]).ravel())

        return multiply_add

    def compile_shuffle(self, i: Instruction) -> Step:
        mode, at = i.parts[2], str(i)
        write = self.target(i.operands[0].split("|")[0])
        value, operand, control = (self.source(name, np.uint32) for name in i.operands[1:4])
        lane = np.arange(32)

        def shuffle(lanes: Lanes) -> None:
            shape = self.warps(lanes, at).shape
            b, c = (source(lanes).reshape(shape).astype(np.int64) for source in (operand, control))
            segment, clamp = c >> 8 & 31, c & 31
            first, last = lane & segment, (lane & segment) | (clamp & ~segment)
            source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[mode]
            is_inside = source >= last if mode == "up" else source <= last
            values = np.take_along_axis(value(lanes).reshape(shape), np.where(is_inside, source, lane), 1)
            write(lanes, values.ravel())

        return shuffle

    def compile_vote(self, i: Instruction) -> Step:
        at, write = str(i), self.target(i.operands[0])
        predicate = self.source(i.operands[1], np.bool_)
        is_ballot = "ballot" in i.parts

        def vote(lanes: Lanes) -> None:
            votes = predicate(lanes).reshape(self.warps(lanes, at).shape)
            if is_ballot:
                result = (votes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
            else:
                result = votes.any(1)
            write(lanes, np.repeat(result, 32))

        return vote

    def compile_atomic(self, i: Instruction) -> Step:
        if i.parts[1:3] != ["shared", "add"]:
            raise PtxError(f"unknown atomic {i}")
        dtype, at = TYPES[i.parts[-1]], str(i)
        size = np.dtype(dtype).itemsize
        write, address = self.target(i.operands[0]), self.address(i.operands[1], np.uint32)
        value = self.source(i.operands[2], dtype)

        def add(lanes: Lanes) -> None:
            where = self.shared.where(self.block_of[lanes], address(lanes), size, at) // size
            words = self.shared.flat.view(dtype)
            old = np.empty(len(lanes), dtype)
            for index, (word, addend) in enumerate(zip(where, value(lanes), strict=True)):
                old[index] = words[word]
                words[word] += addend
            write(lanes, old)

        return add

    def compile_move(self, i: Instruction) -> Step:
        dtype = TYPES[i.parts[-1]]
        size = np.dtype(dtype).itemsize
        target, source = i.operands
        if target.startswith("{") or source.startswith("{"):
            names = _names(target if target.startswith("{") else source)
            part = np.dtype(f"u{size // len(names)}")
            if target.startswith("{"):
                whole, writes = self.source(source, f"u{size}"), [self.target(name) for name in names]

                def split(lanes: Lanes) -> None:
                    parts = np.ascontiguousarray(whole(lanes)).view(part).reshape(-1, len(names))
                    for column, write in enumerate(writes):
                        write(lanes, np.ascontiguousarray(parts[:, column]))

                return split
            pieces, write_whole = [self.source(name, part) for name in names], self.target(target)
            return lambda lanes: write_whole(lanes, np.stack([p(lanes) for p in pieces], 1).view(f"u{size}").ravel())
        value, write = self.source(source, dtype), self.target(target)
        return lambda lanes: write(lanes, value(lanes))

    def compile_pack(self, i: Instruction) -> Step:
        high, low = (self.source(name, np.float32) for name in i.operands[1:3])
        write = self.target(i.operands[0])
        is_bf16 = "bf16x2" in i.parts

        def narrow(values: Array) -> Array:
            bits = narrow_to_bf16(values) if is_bf16 else values.astype(np.float16).view(np.uint16)
            return bits.astype(np.uint32)

        return lambda lanes: write(lanes, narrow(low(lanes)) | narrow(high(lanes)) << np.uint32(16))

    # ---- control flow

    def run(self) -> None:
        position = np.zeros(self.num_threads, np.int64)
        while True:
            lowest = int(position.min())
            if lowest >= EXITED:
                return
            if lowest >= AT_BARRIER:
                self.release_barriers(position)
                continue
            lanes = np.flatnonzero(position == lowest)
            others = position[position > lowest]
            self.run_straight(position, lanes, lowest, int(others.min()) if len(others) else AT_BARRIER)

    def run_straight(self, position: Lanes, lanes: Lanes, at: int, stop: int) -> None:
        """Runs lanes that stand at one instruction up to a jump, or to where other threads stand."""
        while at < stop:
            instruction, (kind, what) = self.kernel.instructions[at], self.steps[at]
            chosen = lanes
            if instruction.predicate is not None:
                chosen = lanes[self.register(instruction.predicate)[lanes] ^ instruction.is_negated]
            at += 1
            if kind == "step":
                if len(chosen):
                    what(chosen)
                continue
            position[lanes] = at
            if kind == "branch":
                position[chosen] = what
            elif kind == "exit":
                position[chosen] = EXITED
            else:
                position[lanes] = at + AT_BARRIER
            return
        position[lanes] = at

    def release_barriers(self, position: Lanes) -> None:
        by_block = position.reshape(self.num_blocks, -1)
        is_ready = (by_block >= AT_BARRIER).all(1) & (by_block < EXITED).any(1)
        is_incomplete = is_ready & (by_block >= EXITED).any(1)
        if not is_ready.any() or is_incomplete.any():
            raise PtxError("threads wait at a barrier that others never reach")
        by_block[is_ready] -= AT_BARRIER


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _vector_size(i: Instruction) -> int:
    return next((int(part[1]) for part in i.parts if re.fullmatch(r"v[24]", part)), 1)
