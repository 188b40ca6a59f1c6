"""The tables of `moegraph bench layer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moegraph.cli.output import print_table

if TYPE_CHECKING:
    from moegraph.benchmarks.results import LayerReport, Row, Timing

GIB = 2**30


def print_report(name: str, report: LayerReport) -> None:
    """One shape: its figures and ceilings, then times, then memory and errors of every row; failures last."""
    shape = report.shape
    how = "compiled" if report.compiled else "eager"
    print(f"\n{name}: {shape.tokens} tokens, d_model {shape.d_model}, d_ff {shape.d_ff}, ", end="")
    print(f"{shape.experts} experts, top-{shape.top_k}, skew {shape.skew:g}; {report.dtype}, {how}")
    print(f"{report.device}, torch {report.torch}")
    before, after = report.dense_rate_before / 1e12, report.dense_rate_after / 1e12
    print(f"{report.dense}: {_rate(before)} TFLOP/s before, {_rate(after)} after; ", end="")
    print(f"copy {report.copy_bytes_per_second / 1e12:.2f} TB/s")
    floors = (f"{pass_.replace('_', ' + ')} {size / GIB:.3g} GiB" for pass_, size in report.floor_bytes.items())
    print(f"byte floor: {', '.join(floors)}\n")
    _print_times(report)
    _print_values(report)
    _print_low_precision(report)
    for row, failure in report.failed.items():
        print(f"{row} failed: {failure['reason']}")


def _print_times(report: LayerReport) -> None:
    columns = ["", ">ms", ">least", ">TFLOP/s", ">of dense", ">of floor"]
    both = any(row.forward_backward for row in report.rows.values())
    if both:
        columns += [">fwd+bwd ms", ">least", ">TFLOP/s", ">of dense", ">of floor"]
    print_table(
        ["forward", *columns[1:]],
        [
            [row.name, *_timing(row.forward), *(_timing(row.forward_backward) if both else [])]
            for row in report.rows.values()
        ],
    )


def _timing(timing: Timing | None) -> list[str]:
    if timing is None:
        return ["-"] * 5
    return [
        f"{timing.milliseconds:.3f}",
        f"{timing.least_milliseconds:.3f}",
        "-" if timing.tflops is None else _rate(timing.tflops),
        _share(timing.share_of_dense),
        _share(timing.share_of_floor),
    ]


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _print_values(report: LayerReport) -> None:
    rows = [
        row for row in report.rows.values() if row.error or row.saved_bytes is not None or row.agreement is not None
    ]
    if not rows:
        return
    values = list(dict.fromkeys(name for row in rows for name in row.error or {}))
    agree = any(row.agreement is not None for row in rows)
    columns = ["", ">saved GiB", ">peak GiB", *(f">{name}" for name in values)]
    columns += [">worst tile"] if values else []
    columns += [">from moegraph's"] if agree else []
    if values:
        at = "" if report.error_tokens == report.shape.tokens else f", at {report.error_tokens} tokens: all do not fit"
        print(f"\nbytes kept for backward, peak, and relative error against float64{at}")
    else:
        print("\nbytes kept for backward, and peak")
    print_table(columns, [_values(row, values, agree) for row in rows])


def _print_low_precision(report: LayerReport) -> None:
    if not any(row.low_precision for row in report.rows.values()):
        return
    rows = [row for row in report.rows.values() if row.low_precision or row.error]
    values = list(dict.fromkeys(name for row in rows for name in row.sqnr))
    what = "casts that are kernels of their own, timed alone, of the whole pass"
    print(f"\n{what}{'; SQNR in dB against float64' * bool(values)}")
    columns = ["", ">fwd casts ms", ">of fwd", ">fwd+bwd casts ms", ">of fwd+bwd", *(f">{name}" for name in values)]
    print_table(columns, [_low_precision(row, values) for row in rows])


def _low_precision(row: Row, values: list[str]) -> list[str]:
    cells = [row.name]
    for which, cast in (("forward", row.forward_cast), ("forward_backward", row.forward_backward_cast)):
        cells += ["-" if cast is None else f"{cast.milliseconds:.3f}", _share(row.cast_share(which))]
    return cells + [f"{row.sqnr[name]:.1f}" if name in row.sqnr else "-" for name in values]


def _values(row: Row, values: list[str], agree: bool) -> list[str]:
    error = row.error or {}
    cells = [row.name, *("-" if size is None else f"{size / GIB:.2f}" for size in (row.saved_bytes, row.peak_bytes))]
    cells += [f"{error[name]:.1e}" if name in error else "-" for name in values]
    if values:
        cells.append(_worst(row.worst_tile))
    if agree:
        cells.append("-" if row.agreement is None else f"{row.agreement:.1e}")
    return cells


def _worst(tiles: dict[str, float] | None) -> str:
    if not tiles:
        return "-"
    name, value = max(tiles.items(), key=lambda item: (item[1] != item[1], item[1]))
    return f"{value:.1e} ({name})"
