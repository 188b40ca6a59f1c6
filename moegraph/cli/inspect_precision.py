"""`moegraph inspect SPEC --precision`: the format of each product that could be cast and of the rows that travel to
experts, the predicted times, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moegraph.cli.output import print_json, print_table

if TYPE_CHECKING:
    from moegraph.compiled import Compiled
    from moegraph.graph.program import Program
    from moegraph.passes.cast_dispatch import CastDispatch
    from moegraph.passes.cast_fp8 import CastFp8
    from moegraph.passes.cast_mxfp8 import CastMxfp8

MIB = 2**20


def print_precision(compiled: Compiled, *, as_json: bool) -> None:
    """Prints the decisions of the spec's casts; where it asks for none, those that `auto` would make everywhere."""
    from moegraph.passes.cast_dispatch import CastDispatch
    from moegraph.passes.cast_fp8 import CastFp8
    from moegraph.passes.cast_mxfp8 import CastMxfp8
    from moegraph.passes.operand_casts import Folding
    from moegraph.passes.pipeline import TRACE

    asked = CastMxfp8.from_spec(compiled.spec) or CastFp8.from_spec(compiled.spec)
    made_by = asked or CastMxfp8("auto", "auto", "auto", folding=Folding.from_spec(compiled.spec))
    products = _products(compiled.record(TRACE).program, made_by)
    asked_to_send = CastDispatch.from_spec(compiled.spec)
    sender = asked_to_send or CastDispatch("auto", compiled.spec.layout.ep)
    trips = _trips(_before(compiled, sender.name), sender)
    if as_json:
        dispatch = {"pass": sender.name, "asked_for": asked_to_send is not None, "trips": trips}
        print_json({"pass": made_by.name, "asked_for": asked is not None, "products": products, "dispatch": dispatch})
        return
    if not products:
        print("no product of this model can be cast")
        return
    print(
        made_by.name if asked else f"the spec casts nothing; with precision.mxfp8 auto throughout {made_by.name} would:"
    )
    columns = [
        "kind",
        "node",
        "product",
        ">n",
        ">k",
        "format",
        ">bf16 ms",
        ">8 bit ms",
        ">casts ms",
        "quantised",
        "why",
    ]
    print_table(columns, [_product_row(row, made_by.name.removeprefix("cast-")) for row in products])
    _print_trips(trips, sender.name, asked_to_send is not None)


def _products(program: Program, made_by: CastMxfp8 | CastFp8) -> list[dict[str, Any]]:
    from moegraph.graph.names import display_name

    return [
        {
            "kind": kind,
            "node": display_name(product.node),
            "part": product.part,
            **found.to_json(),
            "quantised": ", ".join(map(str, found.casts)),
        }
        for kind, unit in program.units.items()
        for product, found in made_by.decisions(unit.graphs["joint"])
    ]


def _trips(program: Program, sender: CastDispatch) -> list[dict[str, Any]]:
    from moegraph.graph.names import display_name
    from moegraph.passes.cast_dispatch import trips_of

    return [
        {"kind": kind, "node": display_name(trip.exchange), "what": trip.kind, **sender.decide(trip).to_json()}
        for kind, unit in program.units.items()
        for trip in trips_of(unit.graphs["joint"].graph)
    ]


def _before(compiled: Compiled, name: str) -> Program:
    """The program as `cast-dispatch` finds it, or would: after tracing and the casts of products."""
    names = [record.name for record in compiled.records]
    if name in names:
        return compiled.records[names.index(name) - 1].program
    last = next(each for each in ("cast-fp8", "cast-mxfp8", "trace") if each in names)
    return compiled.record(last).program


def _product_row(row: dict[str, Any], name: str) -> list[str]:
    what, n, k, _, _ = row["shape"]
    shape = [row["kind"], row["node"], what, str(n), str(k)]
    casts = [f"{row['cast_milliseconds']:.3f}", row["quantised"]]
    return [*shape, name if row["low"] else "bf16", *_times(row), *casts, row["reason"]]


def _print_trips(trips: list[dict[str, Any]], name: str, asked: bool) -> None:
    if not trips:
        print("\nno row travels: layout.ep is 1")
        return
    print(f"\n{name}" if asked else f"\nrows travel uncast; with precision.mxfp8.dispatch=auto {name} would:")
    sizes = [">bf16 MiB", ">mxfp8 MiB"]  # to other ranks, per micro-batch
    columns = ["kind", "node", "sent", "format", *sizes, ">bf16 ms", ">8 bit ms", "why"]
    print_table(columns, [_trip_row(row) for row in trips])
    print("MiB: what a rank sends to others per block and micro-batch")


def _trip_row(row: dict[str, Any]) -> list[str]:
    sizes = [f"{row[name] / MIB:.3f}" for name in ("bf16_bytes", "low_bytes")]
    name = "mxfp8" if row["low"] else "bf16"
    return [row["kind"], row["node"], row["what"], name, *sizes, *_times(row), row["reason"]]


def _times(row: dict[str, Any]) -> list[str]:
    return [f"{row['bf16_milliseconds']:.3f}", f"{row['low_milliseconds']:.3f}"]
