"""A step cut into micro-batches is the same step, and keeps no more activations than its schedule needs."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from moegraph.compiled import Compiled, compile
from moegraph.data.loader import StepBatch
from moegraph.graph.program import Port
from moegraph.runtime.computed import Computed
from moegraph.runtime.executor import HIDDEN, Activations, Executor
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.step import StepComputer
from tests.small_models import CPU, VOCAB, compute_step, random_batch, relative_error, small_spec, start_values

BALANCE_OFF = "model.moe.balance={coef: 0, z_coef: 0}"


@functools.cache
def compiled(*overrides: str) -> Compiled:
    """Compiling takes most of the time here, and several tests want the same."""
    return compile(small_spec(*overrides))


def step(batch: StepBatch, *overrides: str) -> tuple[Computed, GradientBuffers]:
    return compute_step(small_spec(*overrides), batch, compiled=compiled(*overrides))


@pytest.mark.parametrize("padding", [0, 5])
def test_one_two_or_four_micro_batches_give_the_same_gradients(padding: int) -> None:
    batch = random_batch(small_spec(), padding=padding)
    whole, expected = step(batch)
    for count in (2, 4):
        parts, gradients = step(batch, f"layout.microbatches={count}")
        for name, gradient in expected.items():
            assert relative_error(gradients[name], gradient) < 1e-10, name
        assert float(parts.loss) == pytest.approx(float(whole.loss), rel=1e-12)
        assert parts.expert_counts is not None
        assert whole.expert_counts is not None
        assert torch.equal(parts.expert_counts, whole.expert_counts)
        assert parts.router_entropy is not None
        assert whole.router_entropy is not None
        assert relative_error(parts.router_entropy, whole.router_entropy) < 1e-12


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_gpipe_and_1f1b_are_bitwise_equal(compute: str) -> None:
    cut = ("layout.microbatches=4", f"precision.compute={compute}")
    batch = random_batch(small_spec())
    results = [step(batch, *cut, f"layout.schedule={s}") for s in ("gpipe", "1f1b")]
    (a, a_gradients), (b, b_gradients) = results
    assert torch.equal(a_gradients.flat, b_gradients.flat)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.balance, b.balance)


def test_micro_batches_of_unequal_targets_weigh_by_their_targets() -> None:
    """The loss is the mean over all targets of the step, not the mean of the micro-batches' means."""
    batch = random_batch(small_spec())
    batch.labels[1, 2:] = -100
    batch.labels[3, 1:] = -100
    unequal = type(batch)(**{**vars(batch), "valid_targets": int((batch.labels >= 0).sum())})
    parts, gradients = step(unequal, "layout.microbatches=4")
    whole, expected = step(unequal)
    assert float(parts.loss) == pytest.approx(float(whole.loss), rel=1e-12)
    assert relative_error(gradients.flat, expected.flat) < 1e-10


def test_a_parameter_without_a_gradient_has_none_of_an_earlier_step() -> None:
    parameters = list(compiled().program.trained())
    buffers = GradientBuffers(parameters, torch.float64, CPU)
    name, other = parameters[0].name, parameters[1].name
    for names in ((name, other), (other,)):
        buffers.begin()
        for each in names:
            buffers.add(each, torch.ones(buffers[each].shape, dtype=torch.float64))
        buffers.finish()
    assert not buffers[name].any()
    assert buffers[other].all()


def saved(activations: Activations, instance: int) -> list[weakref.ref[Tensor]]:
    kept = activations.entered[instance]
    return [weakref.ref(value) for port, value in kept.items() if port != Port("input", HIDDEN)]


def living(references: list[weakref.ref[Tensor]]) -> int:
    return sum(reference() is not None for reference in references)


def test_activations_die_block_by_block() -> None:
    """When a block's weight gradients arrive, nothing that it or a later block saved is left."""
    spec = small_spec(BALANCE_OFF)
    program = compiled(BALANCE_OFF).program
    executor = Executor(program, start_values(program), CPU, "eager")
    owner = {name: i for i, block in enumerate(program.instances) for name in block.parameters.values()}
    computer = StepComputer(spec, executor, GradientBuffers([], torch.float64, CPU), CPU)
    batch = random_batch(spec)
    activations = executor.forward(computer.place(batch.microbatch(), batch.valid_targets))
    references = [saved(activations, i) for i in range(len(program.instances))]
    assert all(living(block) == len(block) for block in references)
    assert sum(len(block) for block in references) > 20
    alive: dict[int, int] = {}

    class Watching(GradientBuffers):
        def added(self, name: str) -> None:
            alive[owner[name]] = sum(living(block) for block in references[owner[name] :])

    executor.backward(activations, {}, Watching(program.trained(), torch.float64, CPU))
    assert alive == dict.fromkeys(range(len(program.instances)), 0)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 1), ("gpipe", 4)])
def test_1f1b_keeps_the_activations_of_one_micro_batch_and_gpipe_of_all(schedule: str, most: int) -> None:
    cut = ("layout.microbatches=4", f"layout.schedule={schedule}")
    spec, program = small_spec(*cut), compiled(*cut).program
    made: list[weakref.ref[Tensor]] = []
    peak: list[int] = []

    class Watching(Executor):
        def forward(self, batch: Mapping[str, Tensor]) -> Activations:
            activations = super().forward(batch)
            made.append(saved(activations, 2)[0])
            peak.append(living(made))
            return activations

    executor = Watching(program, start_values(program), CPU, "eager")
    computer = StepComputer(spec, executor, GradientBuffers(program.trained(), torch.float64, CPU), CPU)
    computer.compute(random_batch(spec))
    assert max(peak) == most
    assert living(made) == 0


def test_the_step_reports_the_mean_over_valid_targets() -> None:
    """With all weights of the head zero every target costs log(vocabulary)."""
    values = start_values(compiled(BALANCE_OFF).program)
    values["head.weight"] = torch.zeros_like(values["head.weight"])
    batch = random_batch(small_spec(), padding=3)
    computed, _ = compute_step(small_spec(BALANCE_OFF), batch, values, compiled(BALANCE_OFF))
    assert float(computed.loss) == pytest.approx(math.log(VOCAB), rel=1e-12)
