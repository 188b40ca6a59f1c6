"""Every private or version-dependent torch API that moegraph touches, each with the reason. Tried on 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch._ops import OpOverload as OpOverload  # what a node of a step graph calls; no public name
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # values without data; no public name
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def traced_graph() -> fx.Graph:
    """The graph that the running `make_fx` is writing.

    Joint tracing credits each new node to the layer node being evaluated by looking at how far the graph has grown;
    torch offers the proxy mode but no public way to its graph.
    """
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("traced_graph() is only meaningful inside make_fx")
    graph: fx.Graph = mode.tracer.graph
    return graph


def deferred_graph_module(root: Any, graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A graph module whose Python code is written when it is called or asked for: every pass makes modules, few are
    ever run, and code is a fifth of the time of compiling. torch has this for Dynamo, without a public name."""
    return _LazyGraphModule(root, graph, class_name=class_name)


def compile_backend(name: str) -> Callable[..., Any]:
    """The backend of torch.compile of this name, to be wrapped. `torch.compiler` lists names, but hands none out."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Grouped product in bfloat16 on CUDA; rows past the last offset are left unwritten.

    The private name because it is the one known to be the same operator in 2.11 and 2.13.
    """
    return torch.ops.aten._grouped_mm.default(a, b, offsets)  # type: ignore[no-any-return]


def mm_into(into: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """a [M, K] · b [K, N] on CUDA, written to or added to `into` [M, N], of their dtype or, for bfloat16, float32.

    Overloads by name: `torch.mm` and `torch.addmm` take `out_dtype` and `out` together in no documented way.
    """
    if into.dtype == a.dtype:
        if accumulate:
            torch.addmm(into, a, b, out=into)
        else:
            torch.mm(a, b, out=into)
    elif accumulate:
        torch.ops.aten.addmm.dtype_out(into, a, b, into.dtype, out=into)
    else:
        torch.ops.aten.mm.dtype_out(a, b, into.dtype, out=into)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Causal cuDNN attention of q, k, v [B, H, S, Dh] plus an optional additive bias [B, 1, S, S].

    Returns (out [B, H, S, Dh], lse [B, H, S, 1] float32). The public `scaled_dot_product_attention` does not return
    the logsumexp, picks its kernel by itself, and refuses a bias together with causality.
    """
    out = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, 0.0, True, False, scale=scale)
    return out[0], out[1]


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `cudnn_attention`. Without dropout the random state is not read, but the schema wants tensors."""
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse, unused, unused, bias, None, None, q.shape[2], k.shape[2], 0.0, True, scale=scale
    )
    return grads[0], grads[1], grads[2]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> tuple[Tensor, Tensor]:
    """Causal flash attention of q, k, v [B, S, H, Dh] → (out [B, S, H, Dh], lse [B, H, S] float32).

    `window` counts the query itself. The public `scaled_dot_product_attention` knows no windows.
    """
    left, right = (None, None) if window is None else (window - 1, 0)
    out = torch.ops.aten._flash_attention_forward.default(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out[0], out[1]


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `flash_attention`. Without dropout the random state is not read, but the schema wants tensors."""
    left, right = (None, None) if window is None else (window - 1, 0)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, True, state, unused,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@contextmanager
def inductor_decides_by_rule(wanted: bool) -> Iterator[None]:
    """Where wanted, Inductor does not time kernels to choose among those that add in different orders."""
    if not wanted:
        yield
        return
    from torch._inductor import config

    with config.patch(deterministic=True):
        yield


@contextmanager
def inductor_headers_in(folder: Path) -> Iterator[None]:
    """Within, Inductor keeps the C++ headers that it compiles once for all kernels in `folder`.

    They are code that goes into every kernel, and no setting says where: torch puts them under a name that anyone can
    guess in the folder for temporary files, where another user may have been first.
    """
    from torch._inductor import codecache

    before = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(folder), str(folder / "locks")
    codecache._precompile_header.cache_clear()
    try:
        yield
    finally:
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = before
        codecache._precompile_header.cache_clear()


def name_process_group(name: str, group: dist.ProcessGroup) -> None:
    """Makes `group` what collectives of a graph find under `name`.

    torch gives every group a name of its own, which differs between the subgroups of one axis; written into a graph it
    would make every rank's graph another one, compiled anew.
    """
    _register_process_group(cast(Any, name), group)


def forget_process_group(name: str) -> None:
    """Undoes `name_process_group`."""
    _unregister_process_group(cast(Any, name))


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The group that has this name here."""
    return _resolve_process_group(cast(Any, name))


class LeanStage:
    """Mixed in before torch's `PipelineStage` (imported late, it takes a second): keeps tensors only while needed.

    torch 2.11 and 2.13 allocate a receive buffer per micro-batch and direction and keep them for ever, and keep inputs
    and outputs of a forward until its backward. Here a receive gets its buffer when it is posted, and the stage's own
    methods say when to `release` it. Every message carries the tag `round`, so that gloo never takes one left over from
    a step that failed for one of the next. 2.11 also greets the neighbours by messages, which gloo cannot send to
    itself, as V-shaped schedules ask; there are none here.
    """

    round = 0

    def new_buffer(self) -> Tensor:
        """Room for one message."""
        raise NotImplementedError

    def release(self, infos: Iterable[Any]) -> None:
        """Drops the buffers of receives; torch wants a tensor there. Arguments from outside have none."""
        for info in infos:
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty(0)

    def forget_step(self) -> None:
        """Drops whatever a step that raised left behind."""
        stage: Any = self
        stage.clear_runtime_states()
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            self.release(infos)
        stage.bwd_cache.clear()
        stage.dw_runner.clear()

    def get_fwd_recv_ops(self, chunk: int) -> list[Any]:
        return self._receives(super().get_fwd_recv_ops, self.args_recv_info, chunk)  # type: ignore[misc, attr-defined]

    def get_bwd_recv_ops(self, chunk: int) -> list[Any]:
        return self._receives(super().get_bwd_recv_ops, self.grad_recv_info, chunk)  # type: ignore[misc, attr-defined]

    def get_fwd_send_ops(self, chunk: int) -> list[Any]:
        operations = super().get_fwd_send_ops(chunk)  # type: ignore[misc]
        self.fwd_cache[chunk] = ((), [])  # type: ignore[attr-defined]
        return self._marked(operations)

    def get_bwd_send_ops(self, chunk: int) -> list[Any]:
        return self._marked(super().get_bwd_send_ops(chunk))  # type: ignore[misc]

    def _receives(self, operations: Callable[[int], list[Any]], infos: dict[int, Any], chunk: int) -> list[Any]:
        for info in infos[chunk]:
            if hasattr(info, "buffer") and not getattr(info, "is_root_arg", False):
                info.buffer = self.new_buffer()
        return self._marked(operations(chunk))

    def _marked(self, operations: list[Any]) -> list[Any]:
        for operation in operations:
            operation.tag = self.round
        return operations

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[misc]
        self.forget_step()
        return prepared

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)  # type: ignore[misc]
        self.forget_step()
        return prepared


def forget_schedule_step(schedule: Any) -> list[Any]:
    """Makes a pipeline schedule whose step raised ready for another: what it keeps between actions has no public reset.

    Single-stage schedules keep losses only; the others also the receives that they posted and have not waited for,
    which are returned.
    """
    schedule._internal_losses.clear()
    posted = [getattr(schedule, name, {}) for name in ("fwd_recv_ops", "bwd_recv_ops")]
    dropped = [dict(each) for each in posted]
    for each in posted:
        each.clear()
    return dropped


def pipeline_orders(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """What each rank of one of torch's schedules with several stages per rank does, in torch's notation: `3F0` is stage
    3, forward, micro-batch 0; `B`, `I` and `W` are the whole backward, its input half and its weight half.

    A schedule works the orders of all ranks out when it is made, but wants stages, which want a process group. Of the
    stages it reads no more than is given here. The two halves of what torch would overlap run one after the other.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class  # a second to import

    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            submod=None,
        )
        for index in range(stages_per_rank)
    ]
    orders: dict[int, list[Any]] = get_schedule_class(schedule)(stages, microbatches).pipeline_order
    return [
        [str(part) for action in orders[rank] if action is not None for part in action.sub_actions or (action,)]
        for rank in range(ranks)
    ]


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Sums `whole` [R · N] over the R ranks of a group and leaves this rank's part in `out` [N]; renamed in 2.13."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(out, whole, group=group, async_op=async_op)


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to write every rank's `part` [N], one after the other, into `out` [R · N]; renamed in 2.13."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(out, part, group=group, async_op=True)


def symmetric_memory(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """`size` bytes on `device` that the ranks of a group map into each other's address space: this rank's memory, every
    rank's address in ours, and what keeps the mapping alive. Collective, through the group's store.

    Ranks have to be on devices with peer access; torch raises RuntimeError where they are not. The module is private in
    2.11 and 2.13, but the only way to such memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group)
    return memory, [int(address) for address in handle.buffer_ptrs], handle
