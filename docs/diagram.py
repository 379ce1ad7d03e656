"""Draws a .diagram file, whose form its own comment tells, as an SVG: python docs/diagram.py [FILE.diagram].

Nothing but the standard library, and the same bytes for the same text everywhere, so a test compares what is committed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH, MARGIN, GAP = 1120, 20, 92  # of the picture, around it, between the boxes of a lane
LANE_HEIGHT, LANE_GAP, BOX_TOP, BOX_HEIGHT = 104, 44, 32, 54
ARROW = re.compile(r"(\w+) (<?->) (\w+)(?: : (.+))?")
STYLE = """
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1c2430; text-anchor: middle }
.lane { fill: #f4f6f9; stroke: #d5dbe3 } .lane-name { text-anchor: end; font-size: 12px; fill: #5a6675 }
.box { fill: #ffffff; stroke: #3c5a86; stroke-width: 1.5 }
.name { font-weight: 600 } .files { font-size: 11px; fill: #5a6675 }
.arrow { stroke: #3c5a86; stroke-width: 1.5; fill: none } .label { font-size: 11px; fill: #3c5a86 }
"""


@dataclass
class Box:
    name: str
    files: str
    lane: int
    x: float = 0
    y: float = 0
    width: float = 0

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + BOX_HEIGHT / 2


@dataclass
class Diagram:
    lanes: list[str] = field(default_factory=list)
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[tuple[str, str, str, str]] = field(default_factory=list)  # from, kind, to, label


def parse(text: str) -> Diagram:
    diagram = Diagram()
    for number, line in enumerate(text.splitlines(), start=1):
        kind, _, rest = line.strip().partition(" ")
        if kind == "lane":
            diagram.lanes.append(rest)
        elif kind == "box":
            key, name, files = (part.strip() for part in rest.split("|"))
            diagram.boxes[key] = Box(name, files, len(diagram.lanes) - 1)
        elif kind == "arrow" and (match := ARROW.fullmatch(rest)):
            diagram.arrows.append((match[1], match[2], match[3], match[4] or ""))
        elif line.strip() and not line.startswith("#"):
            raise SystemExit(f"line {number} is no lane, box or arrow: {line!r}")
    return diagram


def place(diagram: Diagram) -> None:
    for lane in range(len(diagram.lanes)):
        boxes = [box for box in diagram.boxes.values() if box.lane == lane]
        width = (WIDTH - 4 * MARGIN - GAP * (len(boxes) - 1)) / len(boxes)
        for index, box in enumerate(boxes):
            box.x, box.width = 2 * MARGIN + index * (width + GAP), width
            box.y = MARGIN + lane * (LANE_HEIGHT + LANE_GAP) + BOX_TOP


def ends(one: Box, other: Box) -> tuple[float, float, float, float]:
    """From border to border: straight across a lane, straight down where the boxes overlap, else slanted."""
    if one.lane == other.lane:
        y = one.middle[1]
        return (one.x + one.width, y, other.x, y) if one.x < other.x else (one.x, y, other.x + other.width, y)
    y1, y2 = (one.y + BOX_HEIGHT, other.y) if one.lane < other.lane else (one.y, other.y + BOX_HEIGHT)
    left, right = max(one.x, other.x), min(one.x + one.width, other.x + other.width)
    if left + 40 < right:
        x = (left + right) / 2
        return x, y1, x, y2
    return one.middle[0], y1, other.middle[0], y2


def draw(diagram: Diagram) -> str:
    place(diagram)
    height = 2 * MARGIN + len(diagram.lanes) * (LANE_HEIGHT + LANE_GAP) - LANE_GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="#3c5a86"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for lane, name in enumerate(diagram.lanes):
        y = MARGIN + lane * (LANE_HEIGHT + LANE_GAP)
        lines.append(
            f'<rect class="lane" x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{LANE_HEIGHT}" rx="8"/>'
            f'<text class="lane-name" x="{WIDTH - MARGIN - 12}" y="{y + 20}">{escape(name)}</text>'
        )
    for box in diagram.boxes.values():
        x, y = box.middle
        lines.append(
            f'<rect class="box" x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{BOX_HEIGHT}" rx="6"/>'
            f'<text class="name" x="{x:.0f}" y="{y - 3:.0f}">{escape(box.name)}</text>'
            f'<text class="files" x="{x:.0f}" y="{y + 15:.0f}">{escape(box.files)}</text>'
        )
    for source, kind, target, label in diagram.arrows:
        x1, y1, x2, y2 = ends(diagram.boxes[source], diagram.boxes[target])
        start = ' marker-start="url(#head)"' if kind == "<->" else ""
        lines.append(f'<path class="arrow" d="M{x1:.0f},{y1:.0f} L{x2:.0f},{y2:.0f}"{start} marker-end="url(#head)"/>')
        is_level = y1 == y2
        x, y = (x1 + x2) / 2 + (0 if is_level else 10), y1 - 8 if is_level else (y1 + y2) / 2 + 4
        style = "" if is_level else ' style="text-anchor: start"'
        lines.append(f'<text class="label" x="{x:.0f}" y="{y:.0f}"{style}>{escape(label)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("architecture.diagram")
    file.with_suffix(".svg").write_text(draw(parse(file.read_text(encoding="utf-8"))), encoding="utf-8")
