"""Small models for tests: specs, batches, and one pass forward and backward through a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moegraph.compiled import Compiled, compile
from moegraph.data.loader import StepBatch
from moegraph.graph.program import Program
from moegraph.runtime.computed import Computed
from moegraph.runtime.executor import Executor
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.initialise import initial_values
from moegraph.runtime.step import StepComputer
from moegraph.specs import Spec, load_spec

VOCAB, SEQ_LEN, SEQUENCES = 64, 16, 4
CPU = torch.device("cpu")


def small_spec(*overrides: str, **sections: Any) -> Spec:
    """Four layers, the first dense, eight experts, two of them chosen; `sections` replace parts of the spec."""
    spec: dict[str, Any] = {
        "spec_version": 1,
        "model": {
            "vocab_size": VOCAB,
            "d_model": 32,
            "num_layers": 4,
            "max_seq_len": 64,
            "attention": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": "per_head"},
            "dense": {"d_ff": 48, "layers": [0]},
            "moe": {
                "num_experts": 8,
                "top_k": 2,
                "d_ff": 16,
                "shared": {"num_experts": 1},
                "balance": {"over": "sequence", "coef": 0.01, "z_coef": 0.001},
            },
        },
        "precision": {"compute": "fp64"},
        "train": {"steps": 3, "tokens_per_step": SEQ_LEN * SEQUENCES, "compile": "eager", "device": "cpu"},
        "data": {"source": "corpus:python-stdlib", "seq_len": SEQ_LEN},
    }
    return load_spec({**spec, **sections}, overrides)


def random_batch(spec: Spec, seed: int = 0, padding: int = 0) -> StepBatch:
    """Random tokens, two documents a row; the last `padding` tokens of each row are padding."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = spec.sequences_per_step, spec.data.seq_len
    tokens = torch.randint(0, spec.model.vocab_size, (rows, length), generator=generator)
    labels = torch.randint(0, spec.model.vocab_size, (rows, length), generator=generator)
    places = torch.arange(length).expand(rows, length)
    documents = (places >= length // 2).int().masked_fill(places >= length - padding, -1)
    labels = labels.masked_fill(documents < 0, -100)
    positions = (places % (length // 2)).int().contiguous()
    ids = torch.arange(rows)
    return StepBatch(tokens, labels, positions, documents.contiguous(), ids, int((labels >= 0).sum()))


def start_values(program: Program, seed: int = 0, spread: float = 4.0) -> dict[str, Tensor]:
    """Initial values, made larger than a real start so that nothing hides in small numbers."""
    dtype = torch.float64 if program.spec.precision.compute == "fp64" else torch.float32
    values = initial_values(program.parameters.values(), seed, dtype)
    scaled = {n: v * spread if program.parameters[n].init == "normal" else v for n, v in values.items()}
    return {n: v.to(program.parameters[n].dtype) for n, v in scaled.items()}


_compiled: dict[str, Compiled] = {}


def compile_once(spec: Spec) -> Compiled:
    """The compiled spec, with the passes that come with moegraph; the same spec is compiled once per test run."""
    key = spec.model_dump_json(by_alias=True)
    if key not in _compiled:
        _compiled[key] = compile(spec)
    return _compiled[key]


def compute_step(
    spec: Spec, batch: StepBatch, values: Mapping[str, Tensor] | None = None, compiled: Compiled | None = None
) -> tuple[Computed, GradientBuffers]:
    """One step's compute phase: what it reports, and the gradients."""
    compiled = compiled or compile_once(spec)
    values = start_values(compiled.program) if values is None else values
    executor = Executor(compiled.program, values, CPU, spec.train.compile)
    dtype = torch.float64 if spec.precision.compute == "fp64" else torch.float32
    gradients = GradientBuffers(compiled.program.trained(), dtype, CPU)
    return StepComputer(spec, executor, gradients, CPU).compute(batch), gradients


def relative_error(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖ in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
