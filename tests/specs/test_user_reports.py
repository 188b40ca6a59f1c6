"""Rows of the public user reports that a spec's loading answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.specs import load_spec
from tests.specs.small import MINIMAL, problem_of, problems_of, write


def test_a1_a_router_that_cannot_learn_is_refused_with_the_cause(tmp_path: Path) -> None:
    source = write(tmp_path, MINIMAL)
    one = ["model.moe.top_k=1"]
    problem = problem_of(source, *one, "model.moe.router={score: none, weight_from: softmax_selected}")
    assert problem.path == "model.moe.router.weight_from"
    assert "softmax over the one selected logit is always 1" in problem.message
    assert "the gradient of the router is zero" in problem.message
    for score in ("softmax", "sigmoid"):
        problem = problem_of(source, *one, f"model.moe.router={{score: {score}, norm: {{kind: sum}}}}")
        assert "the gradient of the router is zero" in problem.message
    assert load_spec(source, [*one, "model.moe.router={score: softmax}"]).model.moe is not None


@pytest.mark.parametrize(("name", "layers"), [("global_batch", "sum"), ("micro_batch", "pooled")])
def test_a13_a_balance_loss_over_the_whole_batch_needs_every_forward_first(
    tmp_path: Path, name: str, layers: str
) -> None:
    source = write(tmp_path, MINIMAL)
    balance = f"model.moe.balance={{over: {name}, layers: {layers}, coef: 0.01}}"
    problem = problem_of(source, balance, "layout.microbatches=4")
    assert "needs every forward before the first backward" in problem.message
    assert "the first of 4 micro-batches" in problem.message
    assert problem.fix is not None
    assert "layout.schedule=gpipe" in problem.fix
    load_spec(source, [balance, "layout.microbatches=4", "layout.schedule=gpipe"])
    load_spec(source, [balance, "layout.microbatches=1"])


def test_a21_fewer_microbatches_than_stages_names_both_numbers(tmp_path: Path) -> None:
    problem = problem_of(write(tmp_path, MINIMAL), "layout.pp=4", "layout.microbatches=1")
    assert problem.message == "microbatches 1 is fewer than the 4 stages of the pipeline (pp 4)"
    assert problem.allowed == "4 or more"


def test_a24_numbers_that_do_not_divide_are_refused_with_those_that_do(tmp_path: Path) -> None:
    source = write(tmp_path, MINIMAL)
    six = problem_of(source, "model.moe.num_experts=6", "layout.dp=4", "layout.ep=4")
    assert "num_experts 6 is not divisible by ep 4; valid ep: 1, 2, 3, 6" in six.message
    assert "top_k 9 is more than num_experts 8" in problem_of(source, "model.moe.top_k=9").message
    assert "ep 8 is more than dp 4; valid ep: 1, 2, 4" in problem_of(source, "layout.dp=4", "layout.ep=8").message
    assert "more than the 4 layers" in problem_of(source, "layout.pp=8", "layout.microbatches=8").message


def test_a45_a_misplaced_key_is_refused_with_its_place_and_section(tmp_path: Path) -> None:
    text = f"{MINIMAL}learning_rate: 1e-4\nnum-epochs: 3\n"
    first, second = problems_of(write(tmp_path, text))
    assert (first.line, first.column, first.nearest) == (10, 1, "train.optimizer.lr")
    assert (second.line, second.column, second.nearest) == (11, 1, "train.steps")
    assert "the key `learning_rate` is unknown at the top level" in first.message
