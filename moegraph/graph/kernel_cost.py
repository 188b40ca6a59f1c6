"""How long the kernels of a step graph take on a machine, predicted from shapes: a roofline for each.

    seconds = max(operations / (share · peak), bytes / (share · bandwidth))

What torch.compile would fuse counts as one kernel: nodes that are connected, are neither a matrix product nor an
operator of moegraph's own, and have equally many of those before them. Its bytes are what it reads from outside and
what is used outside. Views are free. Rows are counted as balanced routing fills them, not as buffers have room for.
Nothing is counted for launches, and kernels do not overlap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from moegraph.graph.machine import ATTENTION, LINK, MEMORY, PRODUCTS, Machine
from moegraph.kernels.chips import CHIPS, Card
from moegraph.ops.flops import visible_keys
from moegraph.ops.mx_payload import payload_width
from moegraph.ops.payload_wgrad import payload_backend

Class = Literal["experts", "dense products", "attention", "casts", "exchange", "other"]
CLASSES: tuple[Class, ...] = ("experts", "dense products", "attention", "casts", "exchange", "other")
_VIEWS = {
    "alias", "as_strided", "detach", "expand", "getitem", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "wait_tensor",
}  # fmt: skip
_DENSE = {"mm", "addmm", "bmm", "baddbmm"}
_SENDS = {"direct_put", "direct_dispatch", "direct_return", "direct_take", "exact_exchange", "all_to_all_single"}
_GATHERS = {"permute", "combine", "embedding"}
_PRODUCTS = ("grouped_mm", "swiglu", "expert_ffn")  # parts of the names of products of experts
_ACTIVATIONS = {"swiglu_quantized", "swiglu_kept_quantized", "swiglu_backward_quantized"}
_CODERS = {"mx_encode", "mx_decode", "mx_split"}  # casts of rows that travel
# uint8: of a payload, when nothing else says what a product multiplies
_FORMATS = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float16: "bf16", torch.uint8: "bf16"}
_BACKWARD_PRODUCTS = 2.5  # of attention: five products where the forward has two


@dataclass(frozen=True)
class Kernel:
    """One predicted kernel: its class, the nodes that it computes, operations, bytes of memory and of the link."""

    kind: Class
    nodes: tuple[fx.Node, ...]
    operations: float
    moved: float
    sent: float
    seconds: float


@dataclass(frozen=True)
class Rows:
    """How many rows a rank's experts get from balanced routing, and how many ranks they come from."""

    routed: int
    ranks: int


def kernels_of(module: fx.GraphModule, machine: Machine, rows: Rows) -> list[Kernel]:
    """The predicted kernels of a step graph on a machine, fused regions last."""
    found, fused = [], []
    for node in module.graph.nodes:
        if node.op != "call_function" or _is_view(node):
            continue
        if _is_own(node) or _name(node) in _DENSE:
            found += [_single(node, machine, rows), *_decoded_first(node, machine, rows)]
        else:
            fused.append(node)
    return found + [_region(nodes, machine, rows) for nodes in _regions(module.graph, fused)]


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.rpartition("::")[2] if hasattr(target, "_schema") else str(target.__name__)


def _is_view(node: fx.Node) -> bool:
    """Whether a node makes nothing: moegraph.permute moves rows, aten.permute is another way to look at them."""
    return node.op == "call_function" and _name(node) in _VIEWS and getattr(node.target, "namespace", "") != "moegraph"


def _is_own(node: fx.Node) -> bool:
    space = getattr(node.target, "namespace", "")
    return space in ("moegraph", "_c10d_functional")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _filled(tensor: Tensor, rows: Rows) -> float:
    """Bytes of a tensor, of which only as many rows count as are routed."""
    size = float(tensor.numel() * tensor.element_size())
    return size * rows.routed / tensor.shape[0] if tensor.dim() and tensor.shape[0] > rows.routed > 0 else size


def _bytes(nodes: Iterable[fx.Node], rows: Rows) -> float:
    return sum(_filled(tensor, rows) for node in nodes for tensor in _tensors(node.meta.get("val")))


def _seconds(operations: float, peak: float, moved: float, sent: float, machine: Machine) -> float:
    compute = operations / peak if operations else 0.0
    return max(compute, moved / (MEMORY * machine.memory), sent / (LINK * machine.link))


def _single(node: fx.Node, machine: Machine, rows: Rows) -> Kernel:
    name = _name(node)
    moved = _bytes([*node.all_input_nodes, node], rows)
    if name in _SENDS:
        (payload, *_) = _tensors(node.args[0].meta["val"])  # type: ignore[union-attr]
        out = max(_filled(each, rows) for each in _tensors(node.meta["val"]))
        sent = max(_filled(payload, rows), out) * (rows.ranks - 1) / rows.ranks
        return Kernel("exchange", (node,), 0, moved, sent, _seconds(0, 1, moved, sent, machine))
    if name in _GATHERS:  # which reads as many rows as it writes, or the other way round
        moved = 2 * max(_filled(t, rows) for n in (*node.all_input_nodes[:1], node) for t in _tensors(n.meta["val"]))
    if name == "embedding_wgrad_add":  # reads and writes the rows of its buffer that tokens have, at most one for each
        into, grad = (node.args[i].meta["val"] for i in (0, 2))  # type: ignore[union-attr]
        moved = grad.numel() * (grad.element_size() + 2.0 * into.element_size())
    operations, kind, share = _operations(node, name, rows)
    peak = share * machine.peaks[_format(node)] if operations else 1.0
    return Kernel(kind, (node,), operations, moved, 0, _seconds(operations, peak, moved, 0, machine))


def _decoded_first(node: fx.Node, machine: Machine, rows: Rows) -> Iterator[Kernel]:
    """The copy in bf16 that a weight gradient of payloads makes, where the machine does not decode as it loads."""
    if not _name(node).startswith("payload_"):
        return
    grad, given, offsets = (arg.meta["val"] for arg in node.args[-3:])  # type: ignore[union-attr]
    payloads = grad.dtype == torch.uint8, given.dtype == torch.uint8
    n, k = (payload_width(t) if low else t.shape[1] for t, low in zip((grad, given), payloads, strict=True))
    capability = next(each for each, chip in CHIPS.items() if machine.name in chip.title)
    card = Card(CHIPS[capability].card, capability)
    if payload_backend(n, k, grad.shape[0], offsets.shape[0], payloads, card)[0] == "decode":
        widths = (n * payloads[0], k * payloads[1])
        moved = sum(_filled(grad, rows) / grad.nbytes * grad.shape[0] * width * (33 / 32 + 2) for width in widths)
        yield Kernel("casts", (node,), 0, moved, 0, _seconds(0, 1, moved, 0, machine))


def _operations(node: fx.Node, name: str, rows: Rows) -> tuple[float, Class, float]:
    if name in _DENSE:
        inner = next(_tensors(node.args[-1].meta["val"])).shape[-2]  # type: ignore[union-attr]
        return 2.0 * node.meta["val"].numel() * inner, "dense products", PRODUCTS
    if name in ("mx_linear", "mx_linear_wgrad"):
        inner = node.args[0].meta["val"].shape[-1 if name == "mx_linear" else 0]  # type: ignore[union-attr]
        return 2.0 * node.meta["val"].numel() * inner, "dense products", PRODUCTS
    if name == "linear_wgrad_add":
        into, grad = (node.args[i].meta["val"] for i in (0, 2))  # type: ignore[union-attr]
        return 2.0 * into.numel() * grad.shape[0], "dense products", PRODUCTS
    if name in ("attention", "attention_backward"):
        query = next(t for n in node.all_input_nodes for t in _tensors(n.meta["val"]) if t.dim() == 4)
        sequences, length, heads, width = query.shape
        window = next((arg for arg in node.args if isinstance(arg, int) and not isinstance(arg, bool)), None)
        forward = 4.0 * sequences * heads * width * visible_keys(length, window)
        return forward * (_BACKWARD_PRODUCTS if name.endswith("backward") else 1), "attention", ATTENTION
    if name in _ACTIVATIONS:
        return 0.0, "other", 1.0
    if any(part in name for part in _PRODUCTS):
        per_row = sum(2.0 * math.prod(weight.shape[1:]) for weight in _weights(node))
        return per_row * rows.routed, "experts", PRODUCTS
    return 0.0, "casts" if "quantize" in name or name in _CODERS else "other", 1.0


def _weights(node: fx.Node) -> Iterator[Tensor]:
    """The weights [E, N, K] among the operands of a product of experts, or the gradients that it makes."""
    values = [t for n in (*node.all_input_nodes, node) for t in _tensors(n.meta["val"]) if t.dim() == 3]
    largest = max((t.numel() for t in values), default=0)
    seen: set[tuple[int, ...]] = set()
    for tensor in values:
        if tensor.numel() * 8 >= largest and tensor.dtype != torch.uint8 and tuple(tensor.shape) not in seen:
            seen.add(tuple(tensor.shape))
            yield tensor


def _format(node: fx.Node) -> str:
    found = [t.dtype for n in node.all_input_nodes for t in _tensors(n.meta["val"])]
    return next((_FORMATS[dtype] for dtype in _FORMATS if dtype in found), "fp32")


def _regions(graph: fx.Graph, fused: list[fx.Node]) -> list[list[fx.Node]]:
    level: dict[fx.Node, int] = {}
    own = set(fused)
    for node in graph.nodes:
        before = max((level[each] for each in node.all_input_nodes), default=0)
        level[node] = before if node in own or _is_view(node) else before + 1
    root: dict[fx.Node, fx.Node] = {node: node for node in fused}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            node = root[node]
        return node

    for node in fused:
        for source in map(_behind_views, node.all_input_nodes):
            if source in own and level[source] == level[node]:
                root[find(source)] = find(node)
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in fused:
        groups[find(node)].append(node)
    return list(groups.values())


def _behind_views(node: fx.Node) -> fx.Node:
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _region(nodes: list[fx.Node], machine: Machine, rows: Rows) -> Kernel:
    inside = set(nodes)
    read = {_behind_views(each) for node in nodes for each in node.all_input_nodes} - inside
    written = [node for node in nodes if any(user not in inside for user in _real_users(node))]
    moved = _bytes(read, rows) + _bytes(written, rows)
    return Kernel("other", tuple(nodes), 0, moved, 0, _seconds(0, 1, moved, 0, machine))


def _real_users(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_view(user):
            yield from _real_users(user)
        else:
            yield user
