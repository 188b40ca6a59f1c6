"""Troubles that users of other systems reported, as far as the training loop is where they would happen."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moegraph.compiled import compile
from moegraph.data.dataset import TokenDataset
from moegraph.data.loader import Loader, StepBatch
from moegraph.runtime.model_state import ModelState
from moegraph.runtime.router_metrics import updated_bias
from moegraph.specs import Spec
from tests.data.small import write_tokens
from tests.small_models import CPU, compute_step, random_batch, relative_error, small_spec, start_values

from .small_runs import run, run_spec, trainer

BIASED = "model.moe.router={score: sigmoid, select_bias: learned_free, bias_update_rate: 0.01, norm: {kind: sum}}"


@pytest.mark.parametrize("balance_losses", ["true", "false"])
def test_a12_biases_balance_a_model_whose_first_layers_are_dense(
    balance_losses: str, tokens: Path, tmp_path: Path
) -> None:
    """The bias of each layer is what the counts of all steps make of zero, and nothing else moves it."""
    dense, off = "model.dense.layers=[0, 1]", f"passes.balance-losses.enabled={balance_losses}"
    done = run(run_spec(tmp_path, dense, off, BIASED, "train.steps=5", "layout.microbatches=2"), tokens)
    assert {name for name in done.weights if "select_bias" in name} == {
        "layers.2.moe.select_bias",
        "layers.3.moe.select_bias",
    }
    for layer in ("layers.2", "layers.3"):
        bias = torch.zeros(8, dtype=torch.float64)
        for record in done.records:
            bias = updated_bias(bias, torch.tensor(record["router"][layer]["counts"]), 0.01)
        assert torch.equal(done.weights[f"{layer}.moe.select_bias"], bias)
        assert bias.any()


def test_a18_an_expert_without_tokens_has_a_zero_gradient_and_only_decays() -> None:
    """Its bias keeps expert 3 from being chosen. Its moments stay zero, so a step multiplies it by 1 - lr · decay."""
    spec = small_spec(BIASED, "train.optimizer={weight_decay: 0.5}", "train.clip_norm=null")
    compiled = compile(spec)
    state = ModelState(spec, compiled.program, CPU)
    expert = {n: state.values[n][3] for n in state.values if n.endswith(("moe.w_up", "moe.w_down"))}
    before = {name: value.clone() for name, value in expert.items()}
    other = state.values["layers.1.moe.w_up"][4].clone()
    assert len(expert) == 6
    for _ in range(3):
        for name, value in state.values.items():
            if name.endswith("select_bias"):
                value[3] = -1e3
        computed, gradients = compute_step(spec, random_batch(spec), state.values, compiled)
        assert computed.expert_counts is not None
        assert (computed.expert_counts[:, 3] == 0).all()
        assert all(not gradients[name][3].any() for name in expert)
        state.commit(gradients, 1.0, 0.1, computed.expert_counts)
    for name, value in expert.items():
        assert relative_error(value, before[name] * (1 - 0.1 * 0.5) ** 3) < 1e-14, name
    assert relative_error(state.values["layers.1.moe.w_up"][4], other * (1 - 0.1 * 0.5) ** 3) > 0.1


def test_a30_what_a_step_reads_does_not_depend_on_the_steps_before_it(tokens: Path, tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "train.steps=8", "train.validation={every: 2, sequences: 3}")
    used: list[list[int]] = []
    one = trainer(spec, tokens)
    step = one.loader.step

    def watched(index: int) -> StepBatch:
        batch = step(index)
        used.append(batch.sample_ids.tolist())
        return batch

    one.loader.step = watched  # type: ignore[method-assign]
    one.run()
    fresh = trainer(spec, tokens, one.compiled)
    assert used[6] == fresh.loader.step(6).sample_ids.tolist()  # step 7, with no step before it
    assert used == [fresh.loader.sample_ids(index).tolist() for index in range(8)]
    assert len({tuple(ids) for ids in used}) == 8


def test_a42_no_two_layers_or_experts_start_alike() -> None:
    program = compile(small_spec()).program
    values = ModelState(small_spec(), program, CPU).values
    tensors = {name: value for name, value in values.items() if program.parameters[name].init == "normal"}
    for (a, x), (b, y) in itertools.combinations(tensors.items(), 2):
        assert x.shape != y.shape or not torch.equal(x, y), (a, b)
    experts = [row for name in tensors if program.parameters[name].experts for row in tensors[name]]
    assert len(experts) == 3 * 2 * 8
    assert len({row.flatten()[0].item() for row in experts}) == len(experts)


FIRST, SECOND = [5, 9, 31, 7, 11, 2], [5, 9, 40, 8]


def documents_spec(length: int) -> Spec:
    """One row of this many tokens, one layer of every kind the model has, attention wide enough to cross over."""
    sizes = (f"data.seq_len={length}", f"train.tokens_per_step={length}", "model.vocab_size=300")
    return small_spec(*sizes, "model.num_layers=2", "model.moe.balance={coef: 0, z_coef: 0}")


def alone(document: list[int]) -> StepBatch:
    """A document by itself, as a row without padding: its end token is predicted, nothing follows."""
    ids = torch.tensor([[*document, 0]])
    labels = torch.cat([ids[:, 1:], torch.tensor([[-100]])], 1)
    places = torch.arange(ids.shape[1], dtype=torch.int32)[None]
    return StepBatch(ids, labels, places, torch.zeros_like(places), torch.tensor([0]), len(document))


def total_loss(spec: Spec, batch: StepBatch, values: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Sum of the cross entropies and its gradients."""
    computed, gradients = compute_step(spec, batch, values)
    sums = {name: gradient * batch.valid_targets for name, gradient in gradients.items()}
    return float(computed.loss) * batch.valid_targets, sums


def test_a48_two_packed_documents_cost_what_each_costs_alone(tmp_path: Path) -> None:
    length = len(FIRST) + len(SECOND) + 2
    spec = documents_spec(length)
    data = TokenDataset.open(write_tokens(tmp_path / "tokens", [FIRST, SECOND, [3]]))
    loader = Loader(data, seq_len=length, sequences_per_step=1, seed=0, document_mask=True, vocab_size=300)
    packed = loader.step(0)
    assert packed.tokens.tolist() == [[*FIRST, 0, *SECOND, 0]]
    assert packed.positions.tolist() == [[*range(len(FIRST) + 1), *range(len(SECOND) + 1)]]
    assert packed.labels.tolist() == [[*FIRST[1:], 0, -100, *SECOND[1:], 0, -100]]
    values = start_values(compile(spec).program)
    both, gradients = total_loss(spec, packed, values)
    first, first_gradients = total_loss(documents_spec(len(FIRST) + 1), alone(FIRST), values)
    second, second_gradients = total_loss(documents_spec(len(SECOND) + 1), alone(SECOND), values)
    assert both == pytest.approx(first + second, rel=1e-12)
    for name, gradient in gradients.items():
        assert relative_error(gradient, first_gradients[name] + second_gradients[name]) < 1e-10, name
