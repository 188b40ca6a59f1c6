"""`moegraph inspect SPEC --predict MACHINE`: how long a step would take, and on what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moegraph.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from moegraph.graph.program import Program


def print_prediction(program: Program, machine: str, *, as_json: bool) -> None:
    """Prints milliseconds by kind of block, graph and class of kernel, and of the whole step."""
    from moegraph.graph.kernel_cost import CLASSES
    from moegraph.graph.step_cost import predict_step
    from moegraph.runtime.accounting import flops_per_token

    found = predict_step(program, machine)
    rate = found.tokens_per_second * flops_per_token(program.spec, program) / 1e12
    if as_json:
        print_json({**found.to_json(), "tflops_per_device": rate})
        return
    columns = ["block", ">blocks", "graph", *(f">{each}" for each in CLASSES), ">ms"]
    rows = [
        [kind, str(found.counts[kind]), graph, *(_ms(part[each]) for each in CLASSES), _ms(sum(part.values()))]
        for (kind, graph), part in found.blocks.items()
    ]
    print_table(columns, rows)
    say(
        f"{machine}, predicted and not measured: a step {1e3 * found.seconds:.1f} ms, of which the optimizer "
        f"{1e3 * found.optimizer:.1f}; {found.tokens_per_second:,.0f} tokens/s and {rate:.0f} TFLOP/s per device"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds else "-"
