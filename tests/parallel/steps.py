"""A few training steps of a small model under any layout, and everything that must not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph.compiled import Compiled, compile
from moegraph.data.loader import StepBatch
from moegraph.graph.placement import rank_of_stage
from moegraph.runtime.engine import Engine, gather_weights
from moegraph.runtime.mesh import Mesh, join
from moegraph.specs import load_spec
from moegraph.specs.schema import Spec

CPU = torch.device("cpu")
SEQ_LEN, SEQUENCES, STEPS = 6, 16, 3


def layout_spec(*overrides: str, **layout: Any) -> Spec:
    """Two mixture-of-experts layers and two dense ones around them, 16 sequences a step, float64."""
    data: dict[str, Any] = {
        "spec_version": 1,
        "model": {
            "vocab_size": 32,
            "d_model": 8,
            "num_layers": 4,
            "max_seq_len": SEQ_LEN,
            "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "qk_norm": "per_head"},
            "dense": {"d_ff": 12, "layers": [0, 3]},
            "moe": {
                "num_experts": 4,
                "top_k": 2,
                "d_ff": 6,
                "router": {"score": "softmax", "norm": {"kind": "sum"}, "select_bias": "learned_free"},
                "shared": {"num_experts": 1, "d_ff": 6},
                "balance": {"definition": "switch", "over": "sequence", "coef": 0.1, "z_coef": 0.01},
            },
        },
        "layout": layout,
        "precision": {"compute": "fp64"},
        "train": {
            "steps": STEPS,
            "tokens_per_step": SEQ_LEN * SEQUENCES,
            "compile": "eager",
            "optimizer": {"lr": 0.01},
            "clip_norm": 0.5,
        },
        "data": {"source": "none", "seq_len": SEQ_LEN},
    }
    return load_spec(data, overrides=list(overrides))


def batch_of(step: int, empty: int = 0) -> StepBatch:
    """A step's batch: two documents in each sequence, ends padded differently, the last `empty` sequences padding."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 32, (SEQUENCES, SEQ_LEN), generator=generator)
    labels = torch.randint(0, 32, (SEQUENCES, SEQ_LEN), generator=generator)
    places = torch.arange(SEQ_LEN).expand(SEQUENCES, SEQ_LEN)
    documents = (places >= 2).to(torch.int32)
    lengths = SEQ_LEN - torch.arange(SEQUENCES) % 3
    lengths[SEQUENCES - empty :] = 0
    padding = places >= lengths[:, None]
    documents = documents.masked_fill(padding, -1)
    labels = labels.masked_fill(padding, -100)
    positions = torch.where(places >= 2, places - 2, places).to(torch.int32).contiguous()
    ids = torch.arange(SEQUENCES)
    return StepBatch(tokens, labels, positions, documents.contiguous(), ids, int((labels >= 0).sum()))


@dataclass
class Outcome:
    """Per step: losses, norm, counts, gradients, biases; and the weights at the end. Gradients are summed over ranks
    and experts joined, so that they are those of the whole model."""

    numbers: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    replays: int = 0
    capacity: float | None = None


@cache
def compiled_once(key: str) -> Compiled:
    return compile(Spec.model_validate_json(key))


def run_steps(
    rank: int,
    spec: Spec,
    steps: int = STEPS,
    empty: int = 0,
    scale: float = 6.0,
    start: Mapping[str, Tensor] | None = None,
    force: bool = False,
) -> Outcome:
    """Trains `steps` steps as one rank; rank 0 returns the outcome of the whole world. `start`: values of parameters
    whose names end so; `force`: the first step overflows at every capacity but the last."""
    outcome = Outcome()
    with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
        engine = Engine(spec, CPU, mesh, compiled_once(spec.model_dump_json(by_alias=True)))
        enlarge(engine, scale, start)
        if force:
            pretend_overflow(engine)
        for step in range(steps):
            agreed = engine.compute(batch_of(step, empty))
            gradients = whole_gradients(engine)
            engine.commit(agreed, 0.01 * (step + 1))
            check_replicas(engine)
            outcome.numbers.append({name: value for name, value in vars(agreed).items() if name != "counts_on_device"})
            outcome.gradients.append(gradients)
        outcome.weights = gather_weights(engine)
        outcome.replays, outcome.capacity = engine.replays, engine.capacity
    return outcome if rank == 0 else Outcome()


def enlarge(engine: Engine, scale: float, start: Mapping[str, Tensor] | None = None) -> None:
    """Larger weights than at a real start, so that nothing hides in small numbers; or the given ones."""
    for name, master in engine.state.optimizer.masters.items():
        if engine.program.parameters[name].init == "normal":
            master.mul_(scale)
        for ending, value in (start or {}).items():
            piece = engine.state.piece(name)
            if name.endswith(ending) and piece is not None:
                master.copy_(value.reshape(-1)[piece.start : piece.stop].reshape(master.shape))
    engine.state.refresh()


def pretend_overflow(engine: Engine) -> None:
    """Every agreement at a rung below the last of a ladder of four says that rows found no place."""
    engine.ladder = [1.0, 2.0, 3.0, 4.0]
    agree = engine.agree

    def pretending(computed: Any) -> Any:
        agreed = agree(computed)
        agreed.overflow += engine.rung < len(engine.ladder) - 1
        return agreed

    engine.agree = pretending  # type: ignore[method-assign]


def whole_gradients(engine: Engine) -> dict[str, Tensor]:
    """The gradient of every parameter of the model, from the reduced shards of all ranks: on every rank."""
    mesh, found = engine.mesh, {}
    for parameter in engine.program.trained():
        whole = torch.zeros(parameter.numel, dtype=torch.float64)
        piece = engine.state.piece(parameter.name)
        owner = rank_of_stage(engine.spec.layout, _stage(engine, parameter.name))
        if piece is not None and mesh.pp_rank == owner:
            offset = mesh.ep_rank * (parameter.numel // parameter.shards) if parameter.shards > 1 else 0
            shard = engine.gradients.shard[parameter.name].reshape(-1).double()
            whole[offset + piece.start : offset + piece.stop] = shard
        if mesh.world > 1:
            dist.all_reduce(whole)
        found[parameter.name] = whole.reshape(parameter.global_shape)
    return found


def _stage(engine: Engine, name: str) -> int:
    return next(each.stage for each in engine.program.instances if name in each.parameters.values())


def check_replicas(engine: Engine) -> None:
    """What the graphs of replicas read is bitwise equal."""
    mesh: Mesh = engine.mesh
    for name, value in engine.state.values.items():
        parameter = engine.program.parameters[name]
        group = mesh.groups.get("edp" if parameter.shards > 1 else "dp")
        if group is not None:
            every = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, value.contiguous(), group=group)
            assert all(torch.equal(each, value) for each in every), name
