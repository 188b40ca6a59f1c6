"""Load per layer and expert, drawn in the terminal from the records of a run.

    load per expert, step 300/300: mean ▄, twice the mean or more █, no token ·
                        max/mean  min/mean  dead  entropy  max/mean over time
    layers.1  ▄▅▄▃▄▄▅▃      1.24      0.71     0    0.930  2.52 █▄▃▃▂▂▂▂▂▂▂▂ 1.24

A character is one expert, or the busiest of several neighbours where a layer has more experts than fit; the head line
says so. "Over time" is the load max/mean from the first record to the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegraph.errors import UsageError

_BLOCKS, _ASCII = "·▁▂▃▄▅▆▇█", "_.:-=+*%@"
_LEVELS = 8
_TREND = 12  # characters of the curve over time
_MIN_CELLS = 8

Records = Sequence[Mapping[str, Any]]


def router_json(records: Records) -> dict[str, Any]:
    """The routing of the last record that has any, per layer: its metrics, `load` [E] (count over mean count), and the
    load max/mean of every record. Raises `UsageError` for a run without experts."""
    routed = [record for record in records if record.get("router")]
    if not routed:
        raise UsageError("this run has no routing to show: its model has no experts, or it wrote no record yet")
    last = routed[-1]
    layers = {}
    for name, layer in last["router"].items():
        mean = sum(layer["counts"]) / len(layer["counts"])
        load = [count / mean if mean else 0.0 for count in layer["counts"]]
        over_time = [record["router"][name]["load_max"] for record in routed if name in record["router"]]
        over_time = [value for value in over_time if value is not None]
        layers[name] = {**layer, "load": load, "load_max_over_time": over_time}
    return {"step": last["step"], "first_step": routed[0]["step"], "layers": layers}


def router_text(records: Records, width: int = 100, *, unicode: bool = True) -> str:
    """The drawing, in lines of at most `width` characters where the numbers beside the drawing leave room for it.
    `unicode=False` draws with ASCII only. Raises `UsageError` for a run without experts."""
    view = router_json(records)
    symbols = _BLOCKS if unicode else _ASCII
    names = list(view["layers"])
    columns = _columns(list(view["layers"].values()), symbols)
    label = max(map(len, names))
    room = max(width - label - sum(len(column[0]) + 2 for column in columns) - 2, _MIN_CELLS)
    experts = max(len(layer["load"]) for layer in view["layers"].values())
    per_cell = -(-experts // room)
    cells = max(-(-experts // per_cell), _MIN_CELLS)
    lines = [
        f"load per expert, step {view['step']}: mean {symbols[4]}, twice the mean or more {symbols[8]}, "
        f"no token {symbols[0]}" + (f"; a character is the busiest of {per_cell} experts" if per_cell > 1 else ""),
        "  ".join([" " * label, " " * cells, *(column[0] for column in columns)]).rstrip(),
    ]
    for row, (name, layer) in enumerate(view["layers"].items(), start=1):
        drawn = _draw(layer["load"], per_cell, symbols)
        cells_of_row = [f"{name:<{label}}", f"{drawn:<{cells}}", *(column[row] for column in columns)]
        lines.append("  ".join(cells_of_row).rstrip())
    return "\n".join(lines)


def _columns(layers: Sequence[Mapping[str, Any]], symbols: str) -> list[list[str]]:
    """The numbers beside the drawing: for each column its head and a cell per layer, padded to one width."""
    columns = [
        ["max/mean", *(f"{layer['load_max']:.2f}" for layer in layers)],
        ["min/mean", *(f"{layer['load_min']:.2f}" for layer in layers)],
        ["dead", *(f"{layer['dead_experts']}" for layer in layers)],
        ["entropy", *("not finite" if layer["entropy"] is None else f"{layer['entropy']:.3f}" for layer in layers)],
    ]
    columns = [[f"{cell:>{max(map(len, column))}}" for cell in column] for column in columns]
    curves = [layer["load_max_over_time"] for layer in layers]
    if any(len(curve) > 1 for curve in curves):
        column = ["max/mean over time"]
        column += [f"{curve[0]:.2f} {_trend(curve, symbols)} {curve[-1]:.2f}" if curve else "" for curve in curves]
        columns.append([f"{cell:<{max(map(len, column))}}" for cell in column])
    return columns


def _draw(load: Sequence[float], per_cell: int, symbols: str) -> str:
    groups = [load[i : i + per_cell] for i in range(0, len(load), per_cell)]
    return "".join(_symbol(max(group) / 2.0, symbols) for group in groups)


def _symbol(share: float, symbols: str) -> str:
    """The symbol of a value within 0 to 1; only 0 itself gets the symbol for nothing."""
    return symbols[0] if share <= 0 else symbols[min(max(round(share * _LEVELS), 1), _LEVELS)]


def _trend(values: Sequence[float], symbols: str) -> str:
    """A curve from 1 (perfect balance) to its highest value: the mean of each stretch of records."""
    count = min(_TREND, len(values))
    stretches = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    top = max(max(means) - 1.0, 1e-9)
    return "".join(_symbol(max((mean - 1.0) / top, 1e-9), symbols) for mean in means)
