"""`moegraph bench layer --precision mxfp8 --compile-only`: what the kernels of a block become on a chip that is not
here."""

from __future__ import annotations

from collections.abc import Mapping

from moegraph.benchmarks.shapes import Shape
from moegraph.cli.output import print_json, print_table, say
from moegraph.errors import UsageError


def compile_layer(shapes: Mapping[str, Shape], arch: str, *, as_json: bool) -> int:
    """Compiles every MXFP8 kernel of each shape for `arch` and prints what each takes; 1 if one spills or does not fit.

    Raises UsageError for a width that MX kernels do not take.
    """
    from moegraph.kernels.chips import card_for
    from moegraph.kernels.compiled import KernelReport, compile_launch
    from moegraph.kernels.mx_products import mx_layer_launches
    from moegraph.ops.mx_mm import mx_backend

    card = card_for(arch)
    found: dict[str, dict[str, KernelReport]] = {}
    for preset, shape in shapes.items():
        d, f = shape.d_model, shape.d_ff
        for n, k in ((f, d), (d, f), (d, 2 * f)):
            if mx_backend(n, k, card)[0] != "triton":
                raise UsageError(f"preset {preset}: {mx_backend(n, k, card)[1]}, so no MX kernel takes it")
        sizes = {"tokens": shape.tokens, "top_k": shape.top_k, "d_model": d, "d_ff": f, "num_experts": shape.experts}
        say(f"preset {preset}, {arch}")
        found[preset] = {name: compile_launch(launch, card.capability) for name, launch in mx_layer_launches(**sizes)}
    if as_json:
        data = {p: {name: report.to_json() for name, report in each.items()} for p, each in found.items()}
        print_json({"arch": arch, "presets": data})
    else:
        columns = ["kernel", "matrix instruction", ">registers", ">spilled bytes", ">shared KiB", "fits"]
        for preset, each in found.items():
            print(f"\n{preset}, {arch}")
            print_table(columns, [_row(name, report) for name, report in each.items()])
    return 0 if all(report.fits for each in found.values() for report in each.values()) else 1


def _row(name: str, report: object) -> list[str]:
    from moegraph.kernels.compiled import KernelReport

    assert isinstance(report, KernelReport)
    shared = f"{report.shared_bytes / 1024:.1f} of {report.shared_limit / 1024:.0f}"
    spilled, fits = str(report.spill_bytes), "yes" if report.fits else "NO"
    return [name, report.matrix_instruction, str(report.registers), spilled, shared, fits]
