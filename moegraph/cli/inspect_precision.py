"""`moegraph inspect SPEC --precision`: the format of each product that could be cast, the predicted times, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moegraph.cli.output import print_json, print_table

if TYPE_CHECKING:
    from moegraph.compiled import Compiled


def print_precision(compiled: Compiled, *, as_json: bool) -> None:
    """Prints the decisions of the spec's cast; where it asks for none, those that `auto` would make everywhere."""
    from moegraph.graph.names import display_name
    from moegraph.passes.cast_fp8 import CastFp8
    from moegraph.passes.cast_mxfp8 import CastMxfp8
    from moegraph.passes.pipeline import TRACE

    asked = CastMxfp8.from_spec(compiled.spec) or CastFp8.from_spec(compiled.spec)
    made_by = asked or CastMxfp8("auto", "auto", "auto")
    rows: list[dict[str, Any]] = []
    for kind, unit in compiled.record(TRACE).program.units.items():
        for product, found in made_by.decisions(unit.graphs["joint"]):
            row = {"kind": kind, "node": display_name(product.node), "part": product.part}
            rows.append({**row, **found.to_json()})
    if as_json:
        print_json({"pass": made_by.name, "asked_for": asked is not None, "products": rows})
        return
    if not rows:
        print("no product of this model can be cast")
        return
    print(
        made_by.name if asked else f"the spec casts nothing; with precision.mxfp8 auto throughout {made_by.name} would:"
    )
    columns = ["kind", "node", "product", ">n", ">k", "format", ">bf16 ms", ">8 bit ms", "why"]
    print_table(columns, [_row(row, made_by.name.removeprefix("cast-")) for row in rows])


def _row(row: dict[str, Any], name: str) -> list[str]:
    what, n, k, _, _ = row["shape"]
    times = [f"{row['bf16_milliseconds']:.3f}", f"{row['low_milliseconds']:.3f}"]
    return [row["kind"], row["node"], what, str(n), str(k), name if row["low"] else "bf16", *times, row["reason"]]
