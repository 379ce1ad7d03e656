"""Reads what nvcc emits: the kernels of a PTX file as lists of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


class Instruction(NamedTuple):
    opcode: str  # "ld.global.v2.f32"
    operands: tuple[str, ...]  # "{%f1, %f2}", "[%rd1+8]"
    predicate: str | None
    is_negated: bool

    @property
    def parts(self) -> list[str]:
        return re.split(r"\.|::", self.opcode)

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Kernel:
    name: str
    parameter_offsets: dict[str, int]
    instructions: list[Instruction]
    labels: dict[str, int]  # of the next instruction


_SKIPPED = (".reg", ".loc", ".pragma", ".maxntid", ".minnctapersm", ".file", ".branchtargets")


def parse_ptx(text: str) -> dict[str, Kernel]:
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    kernels = {}
    for match in re.finditer(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", text, flags=re.DOTALL):
        end = _closing_brace(text, match.end())
        instructions, labels = _parse_body(text[match.end() : end])
        kernels[match[1]] = Kernel(match[1], _parameter_offsets(match[2]), instructions, labels)
    return kernels


def _closing_brace(text: str, begin: int) -> int:
    depth, at = 1, begin
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _parameter_offsets(declaration: str) -> dict[str, int]:
    offsets, end = {}, 0
    for match in re.finditer(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?", declaration):
        size = int(match[4]) if match[4] else int(match[2][1:]) // 8
        alignment = int(match[1] or size)
        offsets[match[3]] = -(-end // alignment) * alignment
        end = offsets[match[3]] + size
    return offsets


def _parse_body(body: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for raw in body.replace("\n", " ").split(";"):
        statement = raw.strip()
        while True:  # labels, and the braces of inline assembly's scopes
            if match := re.match(r"(\$?[\w$]+):\s*", statement):
                labels[match[1]] = len(instructions)
                statement = statement[match.end() :]
            elif match := re.match(r"[{}]\s*", statement):
                statement = statement[match.end() :]
            else:
                break
        if not statement or statement.startswith(_SKIPPED):
            continue
        predicate, is_negated = None, False
        if match := re.match(r"@(!?)(%\w+)\s+(.*)", statement):
            is_negated, predicate, statement = match[1] == "!", match[2], match[3]
        opcode, _, rest = statement.partition(" ")
        instructions.append(Instruction(opcode.strip(), tuple(_split_operands(rest)), predicate, is_negated))
    return instructions, labels


def _split_operands(text: str) -> list[str]:
    """At commas outside of braces and brackets."""
    operands, depth, current = [], 0, ""
    for character in text.strip():
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += character
    return [*operands, current.strip()] if current.strip() else operands
