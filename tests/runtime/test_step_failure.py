"""A step that is not finite ends the run in a sentence and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moegraph import ops
from moegraph.compiled import Compiled
from moegraph.errors import CheckFailed, RunError, UsageError
from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Unit
from moegraph.lowering import lower
from moegraph.passes import PassContext
from moegraph.passes.pipeline import order_passes, passes_for, run_pipeline
from moegraph.runtime.run_log import read_records
from moegraph.runtime.trainer import Trainer
from tests.passes.user_passes import pass_class

from .small_runs import run_spec, trainer


def snapshot(one: Trainer) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in one.state.optimizer.state_dict().items()}
    return {**state, **{f"value.{name}": value.clone() for name, value in one.state.values.items()}}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].nan_to_num(7.0), b[n].nan_to_num(7.0)) for n in a)


@pytest.mark.parametrize(
    ("where", "compute"),
    [("embedding.weight", "bf16"), ("layers.2.moe.router.weight", "fp64"), ("layers.1.moe.w_down", "bf16")],
)
def test_a_nan_in_a_weight_ends_the_run_and_leaves_model_and_optimizer_bitwise(
    where: str, compute: str, tokens: Path, tmp_path: Path
) -> None:
    options = ("train.steps=9", f"precision.compute={compute}", "model.moe.router.select_bias=learned_free")
    one = trainer(run_spec(tmp_path, *options), tokens)
    states: list[dict[str, torch.Tensor]] = []
    commit = one.state.commit

    def commit_then_break(*args: object) -> None:
        commit(*args)  # type: ignore[arg-type]
        if one.state.optimizer.steps == 3:
            one.state.values[where].view(-1)[0] = float("nan")
            states.append(snapshot(one))

    one.state.commit = commit_then_break  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"step 4: loss is nan; the model is as it was after step 3") as caught:
        one.run()
    assert caught.value.exit_code == 1
    assert same(snapshot(one), states[0])
    records = read_records(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["loss"] is None
    assert "loss" in records[-1]["non_finite"]
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is(tokens: Path, tmp_path: Path) -> None:
    one = trainer(run_spec(tmp_path, "train.steps=3"), tokens)
    compute, before = one.computer.compute, snapshot(one)

    def overflow(batch: object) -> object:
        computed = compute(batch)  # type: ignore[arg-type]
        one.gradients["layers.1.moe.w_up"][2, 1, 0] = float("inf")
        return computed

    one.computer.compute = overflow  # type: ignore[method-assign, assignment]
    with pytest.raises(RunError, match="step 1: grad_norm is inf"):
        one.run()
    assert same(snapshot(one), before)


def test_a_value_of_another_dtype_than_the_graph_was_traced_for_is_refused_by_name(
    tokens: Path, tmp_path: Path
) -> None:
    one = trainer(run_spec(tmp_path, "train.steps=1"), tokens)
    one.state.values["embedding.weight"] = one.state.values["embedding.weight"].float()
    with pytest.raises(CheckFailed, match=r"embedding/\w+: input weight is f32\[.*\], the graph wants f64\["):
        one.run()


def test_an_auxiliary_loss_that_nothing_weighs_is_refused_before_the_first_step(tokens: Path, tmp_path: Path) -> None:
    def add_loss(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for logits in rewriter.find(ops.router_logits):
            loss = rewriter.call_before(rewriter.output_node(), "moe.mine", ops.z_loss, logits, None)
            rewriter.set_output("auxiliary", "mine", loss)

    spec = run_spec(tmp_path, "train.steps=1")
    passes = order_passes([*passes_for(spec), pass_class("add-loss", apply=add_loss)()])
    compiled = Compiled(spec, run_pipeline(lower(spec), passes))
    with pytest.raises(UsageError, match="moe returns the auxiliary loss 'mine', which has no coefficient"):
        trainer(spec, tokens, compiled)
