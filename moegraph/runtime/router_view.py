"""Load per layer and expert, drawn in the terminal from the records of a run.

    load per expert, step 300/300: mean ▄, twice the mean or more █, no token ·
    layer 1  ▄▅▄▃▄▄▅▃  max 1.24  min 0.71  dead 0  entropy 0.93  max over time 2.1 ▇▅▃▂▂▁▁▁ 1.24

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
    tails = {name: _tail(layer, symbols) for name, layer in view["layers"].items()}
    label = max(map(len, view["layers"]))
    room = max(width - label - max(map(len, tails.values())) - 4, _MIN_CELLS)
    experts = max(len(layer["load"]) for layer in view["layers"].values())
    per_cell = -(-experts // room)
    legend = f"mean {symbols[4]}, twice the mean or more {symbols[8]}, no token {symbols[0]}"
    lines = [f"load per expert, step {view['step']}: {legend}"]
    if per_cell > 1:
        lines[0] += f"; a character is the busiest of {per_cell} experts"
    cells = -(-experts // per_cell)
    for name, layer in view["layers"].items():
        drawn = _draw(layer["load"], per_cell, symbols)
        lines.append(f"{name:<{label}}  {drawn:<{cells}}  {tails[name]}")
    return "\n".join(lines)


def _draw(load: Sequence[float], per_cell: int, symbols: str) -> str:
    groups = [load[i : i + per_cell] for i in range(0, len(load), per_cell)]
    return "".join(_symbol(max(group) / 2.0, symbols) for group in groups)


def _symbol(share: float, symbols: str) -> str:
    """The symbol of a value within 0 to 1; only 0 itself gets the symbol for nothing."""
    return symbols[0] if share <= 0 else symbols[min(max(round(share * _LEVELS), 1), _LEVELS)]


def _tail(layer: Mapping[str, Any], symbols: str) -> str:
    """The numbers beside the drawing."""
    curve = layer["load_max_over_time"]
    parts = [
        f"max/mean {layer['load_max']:.2f}",
        f"min/mean {layer['load_min']:.2f}",
        f"dead {layer['dead_experts']}",
        "entropy " + ("not finite" if layer["entropy"] is None else f"{layer['entropy']:.3f}"),
    ]
    if len(curve) > 1:
        parts.append(f"max/mean over time {curve[0]:.2f} {_trend(curve, symbols)} {curve[-1]:.2f}")
    return "  ".join(parts)


def _trend(values: Sequence[float], symbols: str) -> str:
    """A curve from 1 (perfect balance) to its highest value: the mean of each stretch of records."""
    count = min(_TREND, len(values))
    stretches = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    top = max(max(means) - 1.0, 1e-9)
    return "".join(_symbol(max((mean - 1.0) / top, 1e-9), symbols) for mean in means)
