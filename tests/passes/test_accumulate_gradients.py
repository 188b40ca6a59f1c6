"""accumulate-gradients: which gradients go straight to their buffers, that sums stay, and what may be written to."""

from __future__ import annotations

import pytest
import torch

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Port, ports
from moegraph.verify.passes import verify_spec
from moegraph.verify.structure import no_mutation
from tests.everyday import everyday
from tests.small_models import compile_once, compute_step, random_batch, small_spec

OFF = "passes.accumulate-gradients.enabled=false"
ADD = torch.ops.moegraph.grouped_mm_wgrad_add.default


LINEAR = {
    *(f"attention.{name}.weight" for name in ("q", "k", "v", "output")),
    *("shared.w_up", "shared.w_down", "moe.router.weight"),
}


EXPERTS = {"moe.w_up", "moe.w_down"}
PRODUCTS = 2 * (1 + 6 + len(LINEAR) + 2 + 1)  # embedding, dense block, experts' block, head; and what was there


@pytest.mark.parametrize("graph", ["backward", "backward_weight"])
def test_gradients_of_experts_are_written_where_they_are_summed(graph: str) -> None:
    module = compile_once(small_spec()).program.units["moe"].graphs[graph]
    outputs = ports(module, "outputs")
    assert {port.name for port in outputs if port.role == "added"} == EXPERTS | LINEAR
    assert all(port.name.endswith("norm.weight") for port in outputs if port.role == "grad")
    (up,) = (n for n, p in zip(module.graph.find_nodes(op="placeholder"), ports(module, "inputs"), strict=True)
             if p == Port("gradient_buffer", "moe.w_up"))  # fmt: skip
    assert up.meta["val"].dtype == torch.float64
    assert [user.target for user in up.users] == [ADD]


@pytest.mark.parametrize(
    ("compute", "extra"),
    everyday(
        [("bf16", ("passes.fuse-experts.enabled=true", "layout.microbatches=2")), ("fp64", ("layout.microbatches=4",))]
    ),
)
def test_every_gradient_of_a_step_keeps_its_bits(compute: str, extra: tuple[str, ...]) -> None:
    options = (f"precision.compute={compute}", *extra)
    batch = random_batch(small_spec(*options))
    computed, gradients = compute_step(small_spec(*options), batch)
    expected, before = compute_step(small_spec(*options, OFF), batch)
    assert torch.equal(computed.loss, expected.loss)
    for name in before:
        assert torch.equal(gradients[name], before[name]), name


@pytest.mark.parametrize("extra", [(), ("passes.fuse-experts.enabled=true", "precision.compute=bf16")])
def test_verify_proves_it_and_sees_a_planted_fault(extra: tuple[str, ...]) -> None:
    report = verify_spec(small_spec(*extra))
    assert report.ok
    (row,) = [row for row in report.rows if row.name == "accumulate-gradients"]
    assert (row.rewritten, row.output_difference, row.gradient_difference) == (PRODUCTS, 0.0, 0.0)
    assert row.planted_found


def test_the_sum_over_runs_of_tokens_is_left_to_the_runtime() -> None:
    layout = "layout={dp: 2, ep: 2, transport: padded, capacity: 2}"
    chunks = "passes.overlap-communication={mode: on, chunks: 2}"
    unit = compile_once(small_spec(layout, chunks)).program.units["moe"]
    roles = {
        port.name: port.role for port in ports(unit.graphs["backward"], "outputs") if port.name in EXPERTS | LINEAR
    }
    assert roles == {**dict.fromkeys(EXPERTS, "grad"), **dict.fromkeys(LINEAR, "added")}


def test_what_products_in_8_bits_return_is_said_and_left_to_the_runtime() -> None:
    low = "precision={compute: bf16, mxfp8: {experts: 'on', wgrad: mxfp8}}"
    compiled = compile_once(small_spec(low, "model.moe.d_ff=32"))
    assert compiled.record("accumulate-gradients").notes["moe"].count("moegraph.mx_grouped_mm_wgrad adds nothing") == 2
    outputs = ports(compiled.program.units["moe"].graphs["backward"], "outputs")
    assert {port.name for port in outputs if port.role == "grad"} >= EXPERTS


def test_nothing_else_may_write_and_no_buffer_is_written_twice() -> None:
    unit = compile_once(small_spec()).program.units["moe"]
    module = unit.graphs["backward"]
    assert list(no_mutation(module)) == []
    rewriter = Rewriter(module, "mine")
    (first, second) = rewriter.find(ADD)
    second.args = (first.args[0], *second.args[1:])
    assert len(list(no_mutation(rewriter.finish()))) == 2
    rewriter = Rewriter(module, "mine")
    first = rewriter.find(ADD)[0]
    first.args = (first.args[2], *first.args[1:])
    assert ["writes to its argument" in sentence for sentence in no_mutation(rewriter.finish())] == [True]


@pytest.mark.parametrize("keep", [0, 1])
def test_the_operator_writes_or_adds_as_the_flag_says(keep: int) -> None:
    torch.manual_seed(0)
    grad, rows = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    into = torch.randn(3, 4, 3, dtype=torch.float64) if keep else torch.full((3, 4, 3), torch.nan, dtype=torch.float64)
    expected = ops.grouped_mm_wgrad(grad, rows, offsets) + (into if keep else 0)
    done = ops.grouped_mm_wgrad_add(into, torch.tensor([keep], dtype=torch.int32), grad, rows, offsets)
    assert done.shape == (0,)
    assert torch.equal(into, expected)
    torch.library.opcheck(ADD, (into, torch.tensor([keep], dtype=torch.int32), grad, rows, offsets))
