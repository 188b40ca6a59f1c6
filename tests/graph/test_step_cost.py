"""The predicted time of a step: operations are those that are counted elsewhere, bytes are those that have to move."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from moegraph.compiled import Compiled
from moegraph.errors import UsageError
from moegraph.graph.cost import forward_flops
from moegraph.graph.kernel_cost import Kernel, Rows, kernels_of
from moegraph.graph.machine import LINK, MACHINES, MEMORY
from moegraph.graph.program import Program
from moegraph.graph.step_cost import predict_step
from tests.small_models import compile_once, small_spec

B300 = MACHINES["B300"]


def program_of(*overrides: str) -> Program:
    compiled: Compiled = compile_once(small_spec("precision.compute=bf16", *overrides))
    return compiled.program


def rows_of(program: Program) -> Rows:
    spec = program.spec
    top_k = spec.model.moe.top_k if spec.model.moe else 0
    return Rows(spec.sequences_per_microbatch * spec.data.seq_len * top_k, spec.layout.ep)


def kernels(program: Program, kind: str, graph: str) -> list[Kernel]:
    return kernels_of(program.units[kind].graphs[graph], B300, rows_of(program))


@pytest.mark.parametrize("extra", [(), ("passes.fuse-experts.enabled=true",)])
def test_forward_operations_are_those_that_utilisation_counts_and_backward_twice(extra: tuple[str, ...]) -> None:
    program = program_of(*extra)
    for kind in program.units:
        forward = {k.kind: 0.0 for k in kernels(program, kind, "forward")}
        backward = dict(forward)
        for graph, found in (("forward", forward), ("backward", backward)):
            for kernel in kernels(program, kind, graph):
                found[kernel.kind] = found.get(kernel.kind, 0.0) + kernel.operations
        assert sum(forward.values()) == forward_flops(program, kind)
        for name in ("experts", "dense products"):
            assert backward.get(name, 0.0) == 2 * forward.get(name, 0.0), (kind, name)
        assert backward.get("attention", 0.0) == 2.5 * forward.get("attention", 0.0)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_that_a_graph_returns_are_read_and_added(microbatches: int) -> None:
    rounds = f"layout.microbatches={microbatches}"
    added, returned = (program_of(rounds, f"passes.accumulate-gradients.enabled={on}") for on in ("true", "false"))
    times = [predict_step(p, "B300").blocks["head", "backward"]["other"] for p in (added, returned)]
    weight = 64 * 32 * (2 + 4 * (2 - 1 / microbatches))
    assert times[1] - times[0] == pytest.approx(weight / (MEMORY * 8e12))


def test_room_that_routing_does_not_fill_costs_nothing() -> None:
    def step(capacity: int) -> float:
        layout = f"layout={{dp: 2, ep: 2, transport: padded, capacity: {capacity}}}"
        return predict_step(program_of(layout), "B300").compute

    assert step(4) == pytest.approx(step(1), rel=0.02)


@pytest.mark.slow
def test_products_in_8_bits_take_half_the_time_and_their_casts_are_counted() -> None:
    plain, cast = (program_of(f"precision.mxfp8.experts={on}", "model.moe.d_ff=32") for on in ("off", "on"))
    for program, share in ((plain, 1.0), (cast, 0.5)):
        for kernel in (k for k in kernels(program, "moe", "forward") if k.kind == "experts"):
            compute = kernel.operations / (0.68 * 2250e12) * share
            assert kernel.seconds == max(compute, kernel.moved / (MEMORY * 8e12))
    assert predict_step(plain, "B300").blocks["moe", "forward"]["casts"] == 0
    assert predict_step(cast, "B300").blocks["moe", "forward"]["casts"] > 0
    assert ("moe", "prepare") in predict_step(cast, "B300").blocks


def test_the_operations_of_a_step_are_the_same_in_every_format() -> None:
    everything = "{experts: 'on', shared: 'on', attention: 'on', dispatch: 'on', wgrad: mxfp8}"
    layout = "layout={dp: 2, ep: 2, transport: padded}"
    sizes = ("model.d_model=64", "model.moe.d_ff=64", "passes.fuse-experts.enabled=true", layout)
    plain = program_of(*sizes)
    for how in (f"precision.mxfp8={everything}", "precision={compute: bf16, fp8: rowwise, fp8_wgrad: true}"):
        cast = program_of(*sizes, how)
        for graph in ("forward", "backward"):
            found = [sum(k.operations for k in kernels(p, "moe", graph)) for p in (plain, cast)]
            assert found[0] == found[1] > 0, (how, graph)
    low, high = (
        predict_step(p, "B300").blocks["moe", "forward"]
        for p in (program_of(*sizes, f"precision.mxfp8={everything}"), plain)
    )
    assert 0.7 < low["exchange"] / high["exchange"] < 0.85  # out in half the bytes, back as ever


def test_products_that_quantise_their_results_are_products_and_casts_move_less() -> None:
    fused = ("model.moe.d_ff=32", "passes.fuse-experts.enabled=true", "precision.mxfp8={experts: 'on', saved: 'on'}")
    folded, separate = program_of(*fused), program_of(*fused, "passes.fold-casts.enabled=false")
    for graph in ("forward", "backward"):
        have, want = (kernels(program, "moe", graph) for program in (folded, separate))
        for each in (have, want):
            assert sum(k.operations for k in each if k.kind == "experts") > 0
        operations = [sum(k.operations for k in each) for each in (have, want)]
        assert operations[0] == operations[1]
        moved = [sum(k.moved for k in each if k.kind in ("casts", "experts")) for each in (have, want)]
        assert moved[0] < moved[1]


@pytest.mark.slow
def test_a_weight_gradient_of_payloads_is_a_product_in_bf16_and_a_cast_where_it_decodes_first() -> None:
    sizes = (
        "model={num_layers: 1, dense: null, d_model: 512, moe: {d_ff: 256}}",
        "layout={dp: 4, ep: 4, transport: direct, capacity: 1.25}",
    )
    low = ("passes.fuse-experts.enabled=true", "precision.mxfp8={experts: 'on', dispatch: 'on'}")
    folded, separate = (program_of(*sizes, *low, f"passes.fold-decodes.enabled={on}") for on in ("true", "false"))
    rows = rows_of(folded)
    for machine, decoded in (
        (B300, 2),
        (MACHINES["H200"], 1),
    ):  # one weight is narrow enough there
        have, want = (kernels_of(p.units["moe"].graphs["backward"], machine, rows) for p in (folded, separate))
        moved = [sum(k.moved for k in each if k.kind == "casts") for each in (have, want)]
        copies = 2 * rows.routed * 512 * (33 / 32 + 2)
        assert moved[0] == pytest.approx(moved[1] - copies + decoded / 2 * copies)
        operations = [sum(k.operations for k in each) for each in (have, want)]
        assert operations[0] == operations[1]
        seconds = [sum(k.seconds for k in each if k.kind == "experts") for each in (have, want)]
        assert 0.9 * seconds[1] < seconds[0] <= seconds[1]  # fewer bytes


@pytest.mark.parametrize("transport", ["exact", "padded", "direct"])
def test_rows_for_other_ranks_take_their_time_on_the_link(transport: str) -> None:
    program = program_of(f"layout={{dp: 4, ep: 4, transport: {transport}, capacity: 1.25}}")
    spec, rows = program.spec, rows_of(program)
    payload = rows.routed * spec.model.d_model * 2 * 3 / 4  # three of four rows leave
    for graph in ("forward", "backward"):
        sent = sum(k.sent for k in kernels(program, "moe", graph) if k.kind == "exchange")
        assert 2 * payload <= sent < 2.3 * payload  # weights of rows and counts travel too
        least = 2 * payload / (LINK * B300.link)
        assert predict_step(program, "B300").blocks["moe", graph]["exchange"] >= least


def test_what_is_fused_moves_its_ends_and_views_move_nothing() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    turned = graph.call_function(torch.ops.aten.transpose.int, (x, 0, 1))
    a = graph.call_function(torch.ops.aten.exp.default, (turned,))
    b = graph.call_function(torch.ops.aten.mul.Tensor, (a, a))
    product = graph.call_function(torch.ops.aten.mm.default, (b, x))
    c = graph.call_function(torch.ops.aten.add.Tensor, (product, 1.0))
    graph.output((c,))
    for node, shape in ((x, (8, 4)), (turned, (4, 8)), (a, (4, 8)), (b, (4, 8)), (product, (4, 4)), (c, (4, 4))):
        node.meta["val"] = torch.empty(shape, device="meta")
    module = fx.GraphModule({}, graph)
    found = {kernel.nodes: kernel for kernel in kernels_of(module, B300, Rows(0, 1))}
    assert found[a, b].moved == 4 * (32 + 32)  # x and b; a stays inside
    assert found[c,].moved == 4 * (16 + 16)
    assert found[product,].operations == 2 * 4 * 4 * 8
    assert len(found) == 3


def test_rows_that_are_gathered_and_summed_are_moved() -> None:
    program = program_of()
    rows, width = rows_of(program).routed, program.spec.model.d_model
    for graph, name in (("forward", "permute"), ("forward", "combine"), ("backward", "permute")):
        moved = [k.moved for k in kernels(program, "moe", graph) if f"moegraph.{name}" in str(k.nodes[0].target)]
        assert moved == [2 * 2 * rows * width] * len(moved)
        assert moved


def test_a_step_is_micro_batches_and_an_optimizer() -> None:
    once, twice = (predict_step(program_of(f"layout.microbatches={n}"), "H200") for n in (1, 2))
    assert once.seconds == once.compute + once.optimizer
    assert twice.optimizer == once.optimizer
    assert twice.tokens == once.tokens
    bf16 = predict_step(program_of("train.optimizer.moments=bf16"), "H200")
    assert bf16.optimizer < once.optimizer


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(UsageError, match="there are B300, H200"):
        predict_step(program_of(), "A100")
    with pytest.raises(UsageError, match="pp 1 only"):
        predict_step(program_of("layout={pp: 2, microbatches: 2}"), "B300")
    with pytest.raises(UsageError, match="fp64"):
        predict_step(compile_once(small_spec("precision.compute=fp64")).program, "B300")
