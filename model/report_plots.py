"""The report's two plots as geometry: points, ticks and labels on a logarithmic scale. The template draws them as inline SVG.

Every plot is made for two widths, because text in a scaled drawing is too small on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDE, NARROW = 860, 340
HEIGHT = 300
STRIP = 92  # height of a plot whose errors are all 0
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 26, 34
ZERO_BAND = 22  # pixels below the lowest decade, for errors of exactly 0
MAX_BARS = {WIDE: 400, NARROW: 120}
ROOM = {WIDE: 34, NARROW: 30}  # of a label under the axis


@dataclass(frozen=True)
class Mark:
    """A point, or the top of a bar. `bad`: above what is allowed."""

    x: float
    y: float
    label: str
    bad: bool


@dataclass(frozen=True)
class Tick:
    """A place on an axis and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Scale:
    """Decades 10^low .. 10^high above a band for 0; what is larger or infinite is drawn at the top. No decades: a strip for 0 alone."""

    low: int
    high: int
    height: int = HEIGHT

    @classmethod
    def around(cls, values: Sequence[float]) -> Scale:
        """Whole decades that hold every positive value, at least three."""
        finite = [math.log10(value) for value in values if 0 < value < math.inf]
        if not any(values):
            return cls(0, 0, STRIP)
        low, high = (math.floor(min(finite)), math.ceil(max(finite))) if finite else (-6, 0)
        return cls(min(low, high - 3), high)

    @property
    def zero(self) -> float:
        return self.height - BOTTOM

    def y(self, value: float) -> float:
        if value <= 0 or self.low == self.high:
            return self.zero
        share = (math.log10(value) - self.low) / (self.high - self.low) if value < math.inf else 1.0
        lowest = self.zero - ZERO_BAND
        return round(lowest - min(max(share, 0.0), 1.0) * (lowest - TOP), 1)

    def ticks(self) -> tuple[Tick, ...]:
        if self.low == self.high:
            return (Tick(self.zero, "0"),)
        step = max(1, math.ceil((self.high - self.low) / 6))
        decades = range(self.high, self.low - 1, -step)
        return (*(Tick(self.y(10.0**decade), _power(decade)) for decade in decades), Tick(self.zero, "0"))


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(decade: int) -> str:
    return "1" if decade == 0 else f"10{str(decade).translate(SUPERSCRIPTS)}"


@dataclass(frozen=True)
class LayerPlot:
    """Relative error of each state in the order of computation (`line`), and that of its worst token (`worst`)."""

    width: int
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    limit: float
    line: tuple[Mark, ...]
    worst: tuple[Mark, ...]
    first: Mark | None
    first_name: str

    @property
    def path(self) -> str:
        return " ".join(f"{mark.x},{mark.y}" for mark in self.line)


@dataclass(frozen=True)
class TensorPlot:
    """A bar for each parameter, or for the worst of a few neighbouring ones; `step` is the room of a bar."""

    width: int
    height: int
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    bars: tuple[Mark, ...]
    step: float
    zero: float
    together: int


def layer_plots(forward: dict[str, Any]) -> list[LayerPlot]:
    """Both widths."""
    return [_layer_plot(forward, width) for width in (WIDE, NARROW)]


def _layer_plot(forward: dict[str, Any], width: int) -> LayerPlot:
    states, limit = forward["states"], forward["threshold"]["relative_error"]
    errors = [float(state["relative_error"]) for state in states]
    worst = [float(state["worst_token"]) for state in states]
    scale = Scale.around([*errors, *worst, limit])
    places = [_place(index, len(states), width) for index in range(len(states))]
    line, dots = [], []
    for x, state, error, token in zip(places, states, errors, worst, strict=True):
        label = f"{state['name']}: relative error {error:.2e}, worst token {token:.2e} (probe {state['probe']})"
        line.append(Mark(x, scale.y(error), label, error > limit))
        dots.append(Mark(x, scale.y(token), label, token > forward["threshold"]["worst_token"]))
    first = forward["first_divergence"]
    names = [state["name"] for state in states]
    mark = line[names.index(first["name"])] if first is not None else None
    ticks = _state_ticks(names, places, width)
    return LayerPlot(width, scale.ticks(), ticks, scale.y(limit), tuple(line), tuple(dots), mark, first["name"] if first else "")


def _place(index: int, count: int, width: int) -> float:
    inner = width - LEFT - RIGHT
    return round(LEFT + inner * (index + 0.5) / count, 1)


SHORT = {"embedding": "emb", "final_norm": "norm", "nsp_logits": "nsp", "sentence_vectors": "sent"}


def _state_ticks(names: Sequence[str], places: Sequence[float], width: int) -> tuple[Tick, ...]:
    """The names that fit beside each other: the last one first, then from the left."""
    texts = [SHORT.get(name, name.removeprefix("layers.")) for name in names]
    chosen: dict[int, Tick] = {}
    for index in [len(names) - 1, *range(len(names) - 1)]:
        if all(abs(places[index] - tick.at) >= ROOM[width] for tick in chosen.values()):
            chosen[index] = Tick(places[index], texts[index])
    return tuple(chosen[index] for index in sorted(chosen))


def tensor_errors(weights: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(parameter, largest relative error of its slices, what is wrong), layer by layer; missing counts as infinite."""
    worst: dict[str, tuple[float, str]] = {}
    for item in weights["differences"]:
        error = math.inf if item["max_relative_error"] is None else float(item["max_relative_error"])
        if item["name"] not in worst or error > worst[item["name"]][0]:
            worst[item["name"]] = (error, item["what"])
    known = [holding["name"] for holding in weights["holdings"]]
    strangers = [name for name in worst if name not in set(known)]
    return [(name, *worst.get(name, (0.0, "identical"))) for name in (*by_layer(known), *strangers)]


def layer_of(name: str) -> int | None:
    """The number between dots in a parameter's name; None outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def by_layer(names: Sequence[str]) -> list[str]:
    """Parameters in the order of the model: what stands before the layers, each layer with all its parameters, what stands behind."""
    first = next((place for place, name in enumerate(names) if layer_of(name) is not None), len(names))

    def key(place: int) -> tuple[int, int]:
        layer = layer_of(names[place])
        return (0, 0) if place < first else (1, layer) if layer is not None else (2, 0)

    return [names[place] for place in sorted(range(len(names)), key=key)]


def tensor_plots(weights: dict[str, Any]) -> list[TensorPlot]:
    """Both widths."""
    errors = tensor_errors(weights)
    scale = Scale.around([error for _, error, _ in errors])
    return [_tensor_plot(errors, scale, width) for width in (WIDE, NARROW)]


def _layer_ticks(layers: Sequence[int | None], places: Sequence[float], width: int) -> tuple[Tick, ...]:
    """The number of a layer under its first bar, as far as there is room; "layer" before the first."""
    ticks: list[Tick] = []
    for before, layer, x in zip([None, *layers], layers, places, strict=False):
        if layer is not None and layer != before and (not ticks or x - ticks[-1].at >= ROOM[width]):
            ticks.append(Tick(x, f"layer {layer}" if not ticks else str(layer)))
    return tuple(ticks)


def _tensor_plot(errors: Sequence[tuple[str, float, str]], scale: Scale, width: int) -> TensorPlot:
    together = max(1, math.ceil(len(errors) / MAX_BARS[width]))
    groups = [errors[start : start + together] for start in range(0, len(errors), together)]
    bars = []
    for index, group in enumerate(groups):
        name, error, what = max(group, key=lambda item: item[1])
        told = what if error in (0.0, math.inf) else f"relative error up to {error:.2e}"
        others = f" (worst of {len(group)})" if len(group) > 1 else ""
        bars.append(Mark(_place(index, len(groups), width), scale.y(error), f"{name}: {told}{others}", error > 0))
    step = (width - LEFT - RIGHT) / max(len(groups), 1)
    ticks = _layer_ticks([layer_of(group[0][0]) for group in groups], [bar.x for bar in bars], width)
    return TensorPlot(width, scale.height, scale.ticks(), ticks, tuple(bars), round(step, 2), scale.zero, together)
