"""Independent float64 references for what a pass adds: the auxiliary losses, token by token, in plain loops.

A pass that only rewrites is compared with the graph before it. `balance-losses` also adds outputs; those are compared
with these, written from the definitions and sharing no code with the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from moegraph import ops
from moegraph.graph.names import display_name
from moegraph.graph.program import ports, results
from moegraph.specs.schema import Moe


def _rows(logits: Tensor, mask: Tensor | None) -> list[int]:
    return [t for t in range(logits.shape[0]) if mask is None or bool(mask[t])]


def _probabilities(row: Tensor, score: str) -> Tensor:
    log_score = torch.nn.functional.logsigmoid(row) if score == "sigmoid" else row
    return torch.exp(log_score - torch.logsumexp(log_score, 0))


def balance_reference(logits: Tensor, ids: Tensor, mask: Tensor | None, moe: Moe, sequences: int) -> float:
    """Σ over sequences of (its share of the tokens) · E · Σ_e f_e · P_e; one sequence for the whole micro-batch."""
    logits = logits.double()
    all_rows, length, total = _rows(logits, mask), logits.shape[0] // sequences, 0.0
    for sequence in range(sequences):
        rows = [t for t in all_rows if t // length == sequence]
        frequency = torch.zeros(moe.num_experts, dtype=torch.float64)
        mean = torch.zeros(moe.num_experts, dtype=torch.float64)
        for t in rows:
            mean += _probabilities(logits[t], moe.router.score) / len(rows)
            for e in ids[t].tolist():
                frequency[e] += 1.0 / (len(rows) * (moe.top_k if moe.balance.f_norm == 1 else 1))
        total += len(rows) / max(len(all_rows), 1) * moe.num_experts * float((frequency * mean).sum())
    return total


def z_reference(logits: Tensor, mask: Tensor | None) -> float:
    """Mean over unmasked tokens of logsumexp(logits)²."""
    rows = _rows(logits, mask)
    return sum(float(torch.logsumexp(logits[t].double(), 0)) ** 2 for t in rows) / max(len(rows), 1)


def auxiliary_error(layer: fx.GraphModule, values: dict[str, Any], moe: Moe) -> float | None:
    """The largest relative error of a layer graph's auxiliary scalars against the references, or None if it has none.

    `values` maps node names to what they were when the graph ran.
    """
    worst: float | None = None
    for port, node in zip(ports(layer, "outputs"), results(layer), strict=True):
        if port.role != "auxiliary" or port.name == "probability_sum":
            continue
        arguments = [values[display_name(a)] if isinstance(a, fx.Node) else a for a in _sources(node)]
        expected = _expected(port.name, node, arguments, moe)()
        error = abs(float(values[display_name(node)]) - expected) / max(abs(expected), 1e-300)
        worst = error if worst is None else max(worst, error)
    return worst


def _sources(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of the loss itself, looking through whatever was put behind it."""
    while node.target not in (ops.balance_sequence, ops.balance_micro_batch, ops.z_loss):
        node = node.all_input_nodes[0]
    return node.args


def _expected(name: str, node: fx.Node, arguments: list[Any], moe: Moe) -> Callable[[], float]:
    if name == "z":
        return lambda: z_reference(arguments[0], arguments[1])
    while node.target not in (ops.balance_sequence, ops.balance_micro_batch):
        node = node.all_input_nodes[0]
    sequences = int(node.kwargs.get("sequences", 1))  # type: ignore[arg-type]
    return lambda: balance_reference(arguments[0], arguments[1], arguments[2], moe, sequences)
