"""The picture of a profile: boxes nested downwards, as wide as their time. SVG text, nothing else needed to show it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH, ROW, LETTER = 1200.0, 22, 6.7                     # of the picture, of a level, of a letter: in pixels
_KINDS = {"forward": "f", "backward": "b", "optimiser": "o", "other": "r", "profiler": "r"}
_STYLE = """
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #14213d }
.t { fill: #334155 } .n { fill: #64748b } .a { stroke: #94a3b8; stroke-width: 1 }
rect { stroke: #fff; stroke-width: 1; rx: 2 }
.f { fill: #bfdbfe } .fo { fill: #60a5fa } .b { fill: #fed7aa } .bo { fill: #fb923c } .o { fill: #bbf7d0 }
.r { fill: #e2e8f0 }
@media (prefers-color-scheme: dark) { .t { fill: #e2e8f0 } .n { fill: #94a3b8 } rect { stroke: #0f172a } }
"""


@dataclass
class _Box:
    name: str
    kind: str
    seconds: float = 0.0
    note: str = ""
    inner: dict[str, _Box] = field(default_factory=dict)

    def child(self, key: str, name: str, kind: str) -> _Box:
        return self.inner.setdefault(key, _Box(name, kind))


def flame(cells: dict[tuple[str, str, str], Any], total: float, title: str) -> str:
    """SVG of {(direction, module path, op): seconds, calls, flops, bytes}: the directions side by side, in each the
    modules (blocks.0 > mlp > up), in these the ops."""
    root = _Box("step", "r", total)
    for direction in _KINDS:
        for (of, path, op), cell in cells.items():
            if of != direction:
                continue
            box = root.child(direction, direction, _KINDS[direction])
            box.seconds += cell.seconds
            for part in re.split(r"\.(?!\d+(?:\.|$))", path) if path else ():    # a number belongs to its list
                box = box.child(part, part, _KINDS[direction])
                box.seconds += cell.seconds
            if op:
                box = box.child("op " + op, op, _KINDS[direction] + "o")
                box.seconds += cell.seconds
                box.note = f"\n{cell.calls:g} calls, {1e-9 * cell.flops:.4f} GFLOP, {1e-6 * cell.bytes:.2f} MB moved"
    boxes = list(_placed(root, 0.0, 0, total, ""))
    height = 34 + ROW * (1 + max(level for *_, level, _ in boxes)) + 40
    legend = WIDTH
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDTH + 20:.0f} {height}" role="img" '
             f'aria-label="{escape(title)}"><style>{_STYLE}</style>',
             f'<text x="0" y="20" class="t">{escape(title)}; modules, below them their ops (darker)</text>']
    for name, kind in (("other", "r"), ("optimiser", "o"), ("backward", "bo"), ("forward", "fo")):
        legend -= len(name) * LETTER + 28
        parts.append(f'<rect x="{legend:.0f}" y="10" width="11" height="11" class="{kind}"/><text '
                     f'x="{legend + 16:.0f}" y="20" class="t">{name}</text>')
    for box, x, width, level, path in boxes:
        hover = f"{path}\n{1e3 * box.seconds:.3f} ms, {100 * box.seconds / total:.1f} % of the step{box.note}"
        y, text = 34 + ROW * level, _fitting(box.name, f"{1e3 * box.seconds:.2f} ms", width)
        parts.append(f'<g><title>{escape(hover)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
                     f'height="{ROW - 1}" class="{box.kind}"/>'
                     + (f'<text x="{x + 5:.2f}" y="{y + 15}">{escape(text)}</text>' if text else "") + "</g>")
    bottom = height - 30
    tick = 10.0 ** math.floor(math.log10(1e3 * total))   # in ms: 1, 2 or 5 times a power of ten, 4 to 10 of them
    tick = next(tick * part for part in (0.5, 0.2, 0.1) if 1e3 * total / (tick * part) >= 4)
    for i in range(int(1e3 * total / tick) + 1):
        x, anchor = WIDTH * tick * i / (1e3 * total), "middle" if i else "start"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}" class="a"/><text x="{x:.1f}" '
                     f'y="{bottom + 20}" text-anchor="{anchor}" class="n">{tick * i:g} ms</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _placed(box: _Box, x: float, level: int, total: float, above: str) -> Iterator[tuple[_Box, float, float, int, str]]:
    """Each box that is wide enough to be seen, with its place."""
    width = WIDTH * box.seconds / total
    if width < 0.3:
        return
    path = f"{above} > {box.name}" if above else box.name
    yield box, x, width, level, path
    for inner in box.inner.values():
        yield from _placed(inner, x, level + 1, total, path)
        x += WIDTH * inner.seconds / total


def _fitting(name: str, time: str, width: float) -> str:
    """As much of the text as the box has room for."""
    room = int((width - 10) / LETTER)
    if len(name) + len(time) + 2 <= room:
        return f"{name}  {time}"
    return name if len(name) <= room else f"{name[:room - 1]}…" if room >= 3 else ""
