"""Lowering: one graph per kind however many layers, names that stay, and the sizes that were published."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache

import pytest
import torch

from moegraph import ops
from moegraph.compiled import compile
from moegraph.graph.names import display_name
from moegraph.graph.program import Program
from moegraph.graph.text import graph_text
from moegraph.lowering import lower
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.specs import load_spec
from tests.small_models import small_spec

OLMO3, ULTRA = "presets/olmo3-47b.yaml", "presets/olmo3-ultra-2t.yaml"
DOTTED = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


@cache
def olmo3(experts: int) -> Program:
    return lower(load_spec(OLMO3, [f"model.moe.num_experts={experts}"]))


@pytest.mark.parametrize(
    ("experts", "total", "active"),
    [
        (8, "4.580", "3.171"),
        (32, "13.037", "3.172"),
        (48, "18.674", "3.172"),
        (64, "24.312", "3.173"),
        (128, "46.863", "3.175"),
    ],
)
def test_the_preset_has_the_published_parameters_at_every_number_of_experts(
    experts: int, total: str, active: str
) -> None:
    assert tuple(f"{count / 1e9:.3f}" for count in count_parameters(olmo3(experts))) == (total, active)


def test_a43_more_experts_cost_only_their_router() -> None:
    few, many = (flops_per_token(olmo3(e).spec, olmo3(e)) for e in (8, 128))
    assert many - few == 3 * 7 * 2 * 4096 * 120


SCRIPT = """
import json, resource, time
started = time.process_time()
from moegraph.compiled import compile
from moegraph.runtime.accounting import count_parameters
from moegraph.specs import load_spec
compiled = compile(load_spec("presets/olmo3-ultra-2t.yaml"))
total, active = count_parameters(compiled.records[0].program)
print(json.dumps({
    "seconds": time.process_time() - started,
    "kibibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "total": total, "active": active,
    "kinds": list(compiled.program.units), "passes": [record.name for record in compiled.records],
}))
"""


def test_a_model_of_2_38_trillion_parameters_is_compiled_in_a_minute_and_4_gib() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["seconds"] < 60
    assert found["kibibytes"] < 4 * 2**20
    assert (found["total"], found["active"]) == (2_379_500_234_496, 58_405_955_328)
    assert found["kinds"] == ["embedding", "dense.recompute_full", "moe.recompute_full", "head"]
    layer = ["lower", "canonicalize", "balance-losses", "dispatch-experts", "fuse-experts", "split-pipeline"]
    assert found["passes"] == [*layer, "trace", "recompute", "accumulate-gradients", "split-backward"]


@pytest.mark.parametrize("layers", [2, 5, 40])
def test_there_is_one_graph_per_kind_whatever_the_number_of_layers(layers: int) -> None:
    program = lower(small_spec(f"model.num_layers={layers}"))
    assert list(program.units) == ["embedding", "dense", "moe", "head"]
    assert [i.prefix for i in program.instances_of("moe")] == [f"layers.{i}" for i in range(1, layers)]


def test_whatever_differs_between_layers_makes_another_kind() -> None:
    spec = small_spec(
        "model.attention.window={size: 4, pattern: LG}",
        "passes.recompute={policy: selective, layers: [2]}",
        "model.num_layers=5",
    )
    assert [i.kind for i in lower(spec).instances] == [
        "embedding",
        "dense.window_4",
        "moe",
        "moe.window_4.recompute_selective",
        "moe",
        "moe.window_4",
        "head",
    ]


def test_the_number_of_layers_changes_only_the_start_of_output_projections() -> None:
    few, many = (lower(small_spec(f"model.num_layers={n}")) for n in (2, 8))
    for kind, unit in few.units.items():
        assert graph_text(unit.layer_graph) == graph_text(many.units[kind].layer_graph)
    smaller = {n for n, p in few.parameters.items() if p.std != many.parameters[n].std}
    assert smaller == {n for n in few.parameters if n.endswith(("w_down", "attention.output.weight"))}


def test_names_are_dotted_words_and_each_instance_joins_its_prefix() -> None:
    program = lower(small_spec())
    for unit in program.units.values():
        for node in unit.layer_graph.graph.nodes:
            assert DOTTED.fullmatch(display_name(node)), display_name(node)
    for instance in program.instances:
        assert all(model == f"{instance.prefix}.{local}" for local, model in instance.parameters.items())


def test_the_names_of_an_expert_layer_are_these() -> None:
    names = [p for p in lower(small_spec("model.moe.shared.gate=sigmoid")).parameters if p.startswith("layers.1.")]
    assert names == [
        f"layers.1.{name}"
        for name in (
            "attention.norm.weight",
            "attention.q.weight",
            "attention.q_norm.weight",
            "attention.k.weight",
            "attention.k_norm.weight",
            "attention.v.weight",
            "attention.output.weight",
            "moe.norm.weight",
            "moe.router.weight",
            "moe.w_up",
            "moe.w_down",
            "shared.w_up",
            "shared.w_down",
            "shared.gate.weight",
        )
    ]


def test_lowering_twice_gives_the_same_texts() -> None:
    first, second = lower(small_spec()), lower(small_spec())
    assert [graph_text(u.layer_graph) for u in first.units.values()] == [
        graph_text(u.layer_graph) for u in second.units.values()
    ]


def test_parameters_lie_on_no_device_and_take_no_memory() -> None:
    for unit in olmo3(128).units.values():
        assert all(parameter.device.type == "meta" for parameter in unit.layer_graph.parameters())


def test_a_tied_head_reads_the_embedding() -> None:
    program = lower(small_spec("model.tie_embeddings=true"))
    assert program.instances[-1].parameters["weight"] == "embedding.weight"
    assert "head.weight" not in program.parameters
    assert "head.weight" in lower(small_spec()).parameters


@pytest.mark.parametrize(("compute", "high"), [("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
def test_the_router_and_the_loss_are_never_below_fp32(compute: str, high: str) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    program = lower(small_spec(f"precision.compute={compute}", "model.moe.router.select_bias=learned_free"))
    roles = {"router": high, "select_bias": high, "matrix": compute, "expert": compute, "norm": compute}
    for parameter in program.parameters.values():
        assert parameter.dtype == dtypes[roles.get(parameter.role, compute)], parameter
    (logits,) = (n for n in program.units["moe"].layer_graph.graph.nodes if n.target is ops.router_logits)
    assert logits.meta["val"].dtype == dtypes[high]


@pytest.mark.parametrize(("head_dim", "fraction", "rotated"), [(16, 1.0, 16), (100, 0.58, 58), (20, 0.7, 14)])
def test_the_rotated_width_is_the_nearest_whole_number(head_dim: int, fraction: float, rotated: int) -> None:
    """0.58 · 100 is 57.99… in binary; cut instead of rounded, it would leave an odd width."""
    program = lower(
        small_spec(f"model.attention.head_dim={head_dim}", f"model.attention.rope={{fraction: {fraction}}}")
    )
    ropes = [n for n in program.units["dense"].layer_graph.graph.nodes if n.target is ops.rope]
    assert [node.kwargs["rotary_dim"] for node in ropes] == [rotated, rotated]


def test_residual_writers_start_smaller_by_depth_unless_told_otherwise() -> None:
    plain, flat = lower(small_spec()), lower(small_spec("model.init.scale_depth=false"))
    assert plain.parameters["layers.1.moe.w_down"].std == pytest.approx(0.02 / 8**0.5)
    assert flat.parameters["layers.1.moe.w_down"].std == plain.parameters["layers.1.moe.w_up"].std == 0.02


def test_a_rank_that_the_layout_has_not_is_refused() -> None:
    from moegraph.errors import UsageError

    with pytest.raises(UsageError, match=r"there is no rank 4: the layout has 4 .*; valid: 0 to 3"):
        compile(small_spec("layout={dp: 2, pp: 2, microbatches: 2}"), rank=4)
