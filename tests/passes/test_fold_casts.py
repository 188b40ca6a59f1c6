"""fold-casts: what is folded, what is left and why, that no number changes, and what it saves."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from moegraph._torch_compat import FakeTensorMode
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import facts
from moegraph.passes.contract import PassContext, PassResult
from moegraph.passes.fold_casts import FoldCasts
from moegraph.passes.gated_activations import activation_of
from moegraph.passes.pipeline import passes_for
from tests.small_models import compile_once, compute_step, random_batch, small_spec

_mg = torch.ops.moegraph
BF16 = ("precision.compute=bf16", "model.moe.d_ff=32", "model.num_layers=1", "model.dense=null")
MX, FP8 = "precision.mxfp8.experts='on'", "precision.fp8=rowwise"
BLOCKS, BY_128 = "precision.fp8=blockwise", ("model.d_model=128", "model.moe.d_ff=128")
FUSED, OFF = "passes.fuse-experts.enabled=true", "passes.fold-casts.enabled=false"


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target).removeprefix("moegraph.").removesuffix(".default") for node in graph.graph.nodes]


def folded(*options: str) -> list[str]:
    """The operators of the joint graph of a block with experts behind the pass."""
    return targets(compile_once(small_spec(*BF16, *options)).record("fold-casts").program.units["moe"].graphs["joint"])


def test_rows_are_quantised_before_they_are_gathered() -> None:
    before = compile_once(small_spec(*BF16, MX, FUSED)).record("cast-mxfp8").program.units["moe"].graphs["joint"]
    have, had = folded(MX, FUSED), targets(before)
    assert have.count("mx_permute_quantize") == 2  # x, and the gradient of the output
    assert have.count("permute") == had.count("permute") - 1  # those that a weight gradient in bf16 reads are left


def test_rows_in_blocks_are_quantised_before_they_are_gathered_and_what_stays_is_named() -> None:
    record = compile_once(small_spec(*BF16, BLOCKS, *BY_128)).record("fold-casts")
    have = targets(record.program.units["moe"].graphs["joint"])
    assert have.count("fp8_permute_quantize_blocks") == 1  # x; the gradient of the output is scaled behind permute
    assert have.count("fp8_quantize_blocks") == 4 + 1  # weights, and that gradient
    assert record.notes["moe"].count("which does not quantise") == 1
    fused = compile_once(small_spec(*BF16, BLOCKS, *BY_128, FUSED)).record("fold-casts")
    have = targets(fused.program.units["moe"].graphs["joint"])
    assert have.count("fp8_permute_quantize_blocks") == 2
    assert have.count("fp8_block_up_swiglu_quantized") == have.count("fp8_block_dgrad_swiglu_quantized") == 1
    assert have.count("fp8_quantize_blocks") == 4
    assert fused.notes["moe"] == ""


SHARED = ("precision.mxfp8={experts: 'on', shared: 'on'}", "model.moe.shared.d_ff=32")
SELECTIVE = "passes.recompute.policy=selective"


@pytest.mark.parametrize("options", [SHARED, (FP8, "model.moe.activation={kind: swiglu_clamped}")])
def test_activations_of_experts_that_are_not_fused_are_quantised_by_what_computes_them(
    options: tuple[str, ...],
) -> None:
    record = compile_once(small_spec(*BF16, *options)).record("fold-casts")
    joint = record.program.units["moe"].graphs["joint"]
    have, parts = targets(joint), 1 + (options is SHARED)
    assert have.count("swiglu_kept_quantized") == have.count("swiglu_backward_quantized") == parts
    assert "swiglu_quantized" not in have
    assert have.count("aten.silu") == 2 - parts  # of a shared expert in bf16
    layers = {facts(n)["layer"] for n in joint.graph.nodes if "swiglu" in str(n.target)}
    assert layers == {"moe.act", "shared.act"} if options is SHARED else {"moe.act"}
    for node in joint.graph.find_nodes(op="call_function", target=_mg.swiglu_kept_quantized.default):
        act = next(user for user in node.users if user.args[1] == 0)
        assert all(facts(user)["direction"] == "backward" for user in act.users)  # the weight gradient alone


def test_an_activation_that_backward_computes_again_is_written_in_8_bits_only() -> None:
    units = compile_once(small_spec(*BF16, MX, SELECTIVE)).program.units
    (unit,) = [unit for kind, unit in units.items() if kind.startswith("moe")]
    forward, backward = targets(unit.graphs["forward"]), targets(unit.graphs["backward"])
    assert forward.count("swiglu_quantized") == 1
    assert "swiglu_kept_quantized" not in forward
    assert forward.count("aten.silu") == 1  # of the shared expert, in bf16
    assert backward.count("swiglu_backward_quantized") == 1
    assert not {"swiglu_quantized", "swiglu_kept_quantized"} & set(backward)


def test_an_activation_that_is_not_quite_one_is_quantised_by_a_node() -> None:
    plant = Rewriter(compile_once(small_spec(*BF16, MX)).record("cast-mxfp8").program.units["moe"].graphs["joint"], "x")
    silu = next(node for node in plant.graph.nodes if "silu" in str(node.target) and facts(node)["layer"] == "moe.act")
    silu.target = torch.ops.aten.relu.default
    result = apply(plant)
    assert "moe.act/_to_copy.2 comes from aten._to_copy, which does not quantise" in result.note
    have = targets(result.unit.graphs["joint"])
    assert "swiglu_kept_quantized" not in have
    assert "swiglu_backward_quantized" in have


@pytest.mark.parametrize("least", [None, -2.0])
def test_an_activation_with_other_limits_is_not_the_clamped_one(least: float | None) -> None:
    """A limit that is not there is not a number either."""

    def other(z: Tensor) -> Tensor:
        gate, up = z.float().chunk(2, -1)
        gate, up = gate.clamp(max=0.5), up.clamp(least, 0.5)
        return ((up + 1.0) * (gate * torch.sigmoid(1.7 * gate))).bfloat16()

    with FakeTensorMode():
        graph = make_fx(other)(torch.empty(4, 64, dtype=torch.bfloat16)).graph
    assert activation_of(graph.output_node().args[0]) is None


def test_activations_of_linear_layers_and_operands_of_weight_gradients_are_named_as_kept() -> None:
    dense = "precision.mxfp8={experts: 'on', attention: 'on', wgrad: mxfp8}"
    wide = ("model.attention.num_kv_heads=4", "model.num_layers=2", "model.dense={d_ff: 64, layers: [0]}")
    notes = compile_once(small_spec(*BF16, dense, *wide)).record("fold-casts").notes
    of_block = next(note for kind, note in notes.items() if kind.startswith("dense"))
    assert "attention.q/quantize" in of_block
    of_experts = next(note for kind, note in notes.items() if kind.startswith("moe"))
    assert "along the other side, for weight gradients" in of_experts


STEPS = {
    "mxfp8": (MX,),
    "mxfp8, shared experts too": SHARED,
    "mxfp8, clamped, selective recompute": (MX, SELECTIVE, "model.moe.activation={kind: swiglu_clamped}"),
    "fp8": (FP8,),
    "mxfp8, fused": (MX, FUSED),
    "mxfp8, fused, full recompute": (MX, FUSED, "passes.recompute.policy=full"),
    "mxfp8, fused, saved": (MX, FUSED, "precision.mxfp8.saved='on'"),
    "fp8, fused, weight gradients too": (FP8, FUSED, "precision.fp8_wgrad=true"),
    "fp8 in blocks": (BLOCKS, *BY_128),
    "fp8 in blocks, fused": (BLOCKS, *BY_128, FUSED),
}


def test_products_write_what_only_the_next_product_reads_in_8_bits() -> None:
    have = folded(MX, FUSED)
    assert not {"mx_up_swiglu", "mx_dgrad_swiglu"} & set(have)
    assert have.count("mx_up_swiglu_quantized") == have.count("mx_dgrad_swiglu_quantized") == 1
    assert have.count("mx_quantize_rows") == 4  # weights, both ways round
    graph = compile_once(small_spec(*BF16, MX, FUSED)).record("fold-casts").program.units["moe"].graphs["joint"]
    (up,) = graph.graph.find_nodes(op="call_function", target=_mg.mx_up_swiglu_quantized.default)
    assert [str(part.dtype) for part in up.meta["val"]] == ["torch.bfloat16", "torch.float8_e4m3fn", "torch.uint8"]


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step_has_the_same_bits_as_without_the_pass(case: str) -> None:
    options = STEPS[case]
    batch = random_batch(small_spec(*BF16, *(BY_128 if BLOCKS in options else ())))
    have, gradients = compute_step(small_spec(*BF16, *options), batch)
    want, expected = compute_step(small_spec(*BF16, *options, OFF), batch)
    assert torch.equal(have.loss, want.loss)
    for name in expected:
        assert torch.equal(gradients[name], expected[name]), name


def test_what_is_left_is_said_with_the_reason() -> None:
    """A row's scale in FP8 is of the whole row, which no tile of a product holds."""
    notes = compile_once(small_spec(*BF16, FP8, FUSED, "precision.fp8_wgrad=true")).record("fold-casts").notes
    assert "fp8_up_swiglu, which does not quantise" in notes["moe"]
    assert "fp8_dgrad_swiglu, which does not quantise" in notes["moe"]
    assert notes["head"].startswith("nothing but weights")


def apply(plant: Rewriter) -> PassResult:
    spec = small_spec(*BF16, MX, FUSED)
    program = compile_once(spec).record("cast-mxfp8").program
    unit = program.units["moe"].with_graphs({"joint": plant.finish()})
    return FoldCasts().apply(unit, PassContext(program))


def planted() -> Rewriter:
    spec = small_spec(*BF16, MX, FUSED)
    return Rewriter(compile_once(spec).record("cast-mxfp8").program.units["moe"].graphs["joint"], "planted")


def test_a_quantiser_for_other_rows_than_were_gathered_stays() -> None:
    plant = planted()
    quantise = next(n for n in plant.find(_mg.mx_quantize_rows.default) if n.args[0].target is _mg.permute.default)
    other = plant.call_before(quantise, "other", torch.ops.aten.clone.default, quantise.args[1])
    facts(other).update(layer=facts(quantise)["layer"], direction="forward")
    quantise.update_arg(1, other)
    result = apply(plant)
    assert "moe.experts/rows is of other rows" in result.note
    assert targets(result.unit.graphs["joint"]).count("mx_permute_quantize") == 1


def test_two_quantisers_of_the_same_rows_become_one() -> None:
    plant = planted()
    quantise = next(n for n in plant.find(_mg.mx_quantize_rows.default) if n.args[0].target is _mg.permute.default)
    again = plant.copy_before(quantise.next, quantise, "again", {})
    data, scale = plant.results(quantise).values()
    for index, part in enumerate((data, scale)):
        taken = plant.copy_before(part.next.next, part, f"part{index}", {quantise: again})
        part.replace_all_uses_with(taken, lambda user: user.target is _mg.mx_up_swiglu.default)
    result = apply(plant)
    assert targets(plant.module).count("mx_quantize_rows") == 9
    assert targets(result.unit.graphs["joint"]).count("mx_permute_quantize") == 2


def test_an_activation_that_is_read_in_16_bits_too_is_quantised_by_a_node() -> None:
    plant = planted()
    act = next(n for n in plant.find(operator.getitem) if n.args[0].target is _mg.mx_up_swiglu.default and n.args[1])
    other = plant.call_before(act.next, "other", torch.ops.aten.clone.default, act)
    facts(other).update(layer=facts(act)["layer"], direction="forward")
    plant.set_output("metric", "other", other)
    result = apply(plant)
    assert "is read in 16 bits too" in result.note
    assert "mx_up_swiglu" in targets(result.unit.graphs["joint"])


def test_a_quantiser_in_backward_of_a_forward_activation_stays() -> None:
    plant = planted()
    quantise = next(
        n
        for n in plant.find(_mg.mx_quantize_rows.default)
        if n.args[0].target is operator.getitem and n.args[0].args[0].target is _mg.mx_up_swiglu.default
    )
    facts(quantise)["direction"] = "backward"
    assert "runs in the other direction" in apply(plant).note


def test_what_is_saved_and_read_in_16_bits_too_is_quantised_by_a_node() -> None:
    spec = small_spec(*BF16, MX, FUSED, "precision.mxfp8.saved='on'")
    plant = Rewriter(compile_once(spec).record("save-mxfp8").program.units["moe"].graphs["joint"], "planted")
    z = next(n for n in plant.find(_mg.mx_quantize_rows.default) if n.args[2] is False).args[0]
    other = plant.call_before(z.next, "other", torch.ops.aten.clone.default, z)
    facts(other).update(layer=facts(z)["layer"], direction="forward")
    plant.set_output("metric", "other", other)
    result = apply(plant)
    assert "is read in 16 bits too" in result.note
    have = targets(result.unit.graphs["joint"])
    assert "mx_up_swiglu_quantized" in have
    assert "mx_dgrad_swiglu_saved" in have
    assert have.count("mx_quantize_rows") == 5  # weights, both ways round, and what is saved


@pytest.mark.slow
def test_selective_recompute_repeats_no_product_in_8_bits() -> None:
    policy = "passes.recompute.policy=selective"
    for options in ((MX, FUSED), (FP8, FUSED)):
        units = compile_once(small_spec(*BF16, *options, policy)).record("recompute").program.units
        graph = next(unit for kind, unit in units.items() if kind.startswith("moe")).graphs["joint"]
        again = [node for node in graph.graph.nodes if facts(node).get("recomputed")]
        assert again
        assert not {"fp8_up_swiglu", "mx_up_swiglu_quantized", "fp8_grouped_mm", "mx_grouped_mm"} & {
            str(node.target).split(".")[1] for node in again if "moegraph" in str(node.target)
        }


def test_it_is_there_with_a_cast_and_unless_switched_off() -> None:
    names = [[p.name for p in passes_for(small_spec(*BF16, *options))] for options in ((MX,), (MX, OFF), ())]
    assert ["fold-casts" in each for each in names] == [True, False, False]
