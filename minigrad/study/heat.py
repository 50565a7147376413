"""A picture of numbers that layers have at steps: a row per layer, a column per step, the number as a colour."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.io import write_whole


def heatmaps(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]],
             panels: dict[tuple[str, str], tuple[str, tuple[float, float] | None]]) -> None:
    """Write a PNG of one panel for each (key of a row, kind): its title, and the usual range of its numbers or None.
    rows: dicts with step, layer, kind and the keys. Needs matplotlib."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError("[watch] matplotlib is missing; in the clone of minigrad: "
                          "python -m pip install -e '.[train]'") from None
    tables = [_table([row for row in rows if row["kind"] == kind], key) for key, kind in panels]
    tall = max(len(layers) for layers, _, _ in tables)
    figure = figures.Figure(figsize=(13, min(2.2 + 0.16 * tall, 40)), dpi=120, layout="constrained")
    for axes, (title, usual), table in zip(figure.subplots(1, len(panels)), panels.values(), tables):
        _panel(figure, axes, title, usual, *table)
    with write_whole(path, "wb") as file:
        figure.savefig(file, format="png")


def _table(rows: Sequence[dict[str, Any]], key: str) -> tuple[list, list, np.ndarray]:
    """Layers, steps, and the numbers (layers, steps), NaN where there is none above 0."""
    layers, steps = ({name: i for i, name in enumerate(dict.fromkeys(row[of] for row in rows))}
                     for of in ("layer", "step"))
    values = np.full((len(layers), len(steps)), np.nan)
    for row in rows:
        if row[key] and np.isfinite(row[key]):
            values[layers[row["layer"]], steps[row["step"]]] = row[key]
    return list(layers), list(steps), values


def _panel(figure: Any, axes: Any, title: str, usual: tuple[float, float] | None, layers: list, steps: list,
           values: np.ndarray) -> None:
    """With a usual range the colours run from blue (below it) to red (above), else from dark to light."""
    axes.set(title=title, xlabel="step", facecolor="#d1d5db")
    if not np.isfinite(values).any():
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center")
        return
    low, high = (usual[0] / 10, usual[1] * 10) if usual else (np.nanmin(values), np.nanmax(values))
    if high < 10 * low:                                  # a scale has some width
        low, high = low / 3, high * 3
    half = (steps[-1] - steps[0]) / (2 * max(1, len(steps) - 1)) or 0.5
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", norm="log",
                        cmap="coolwarm" if usual else "viridis", clim=(low, high),
                        extent=(steps[0] - half, steps[-1] + half, len(layers) - 0.5, -0.5))
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    axes.tick_params(axis="y", length=0)
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=30, pad=0.02)
    for bound in usual or ():
        bar.ax.axvline(bound, color="black", linewidth=1)
