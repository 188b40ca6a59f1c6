"""Rows to the ranks of their experts and back, timed as transport `direct` and as NCCL's variable all-to-all.

    dispatch           rows and router weights from tokens to expert order on the ranks that own the experts
    forward            and back: each token's sum over its K rows
    forward+backward   and the gradients of both: of the sums out, of rows and weights back

`nccl` permutes rows, exchanges them, and regroups them by expert (and the reverse); it knows the sizes of its parts
beforehand, `nccl, sizes read` asks the device for them once, as it has to in training. `direct` includes the exchange
of counts and the plan. Routing and its sort are done beforehand for all. Experts do nothing: rows go back as they came.
`direct, mxfp8` sends rows and the gradients of sums in MXFP8, casts included, and bf16 back. All rows of the table give
the same bits, and that is checked; those in MXFP8 are nccl's of inputs that have been through MXFP8.

Ranks run the same jobs in the same order, a fixed number of times: how long one took never decides what comes next.

Legend: T tokens per rank, D width, K top-k, R = T·K, P ranks, E experts, N = 1.25 · R rows of a buffer (or more).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.timing import synchronize
from moegraph.graph.dispatch_cost import BF16, PAYLOAD
from moegraph.ops.mx_format import BLOCK
from moegraph.runtime.mesh import Mesh

STAGES = ("dispatch", "forward", "forward+backward")
TRANSFERS = {"dispatch": (1, 0), "forward": (1, 1), "forward+backward": (2, 2)}  # out, home
MXFP8 = "direct, mxfp8"
GROUP = ops.EXPERT_GROUP
_WARM_TURNS, _IN_A_ROW = 4, 3
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One way at one stage: milliseconds, the slowest rank's median; GB/s that a rank writes to other ranks."""

    way: str
    stage: str
    milliseconds: float
    least_milliseconds: float
    gigabytes_per_second: float


@dataclass
class DispatchReport:
    """What was measured. `equal`: per way other than nccl, whether its rows, sums and gradients are nccl's bits."""

    device: str
    versions: dict[str, str]
    shape: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    equal: dict[str, bool] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens x [T, D], weights and the routing's sort, gradients of its sums, and the buffers' room N."""

    x: Tensor
    weights: Tensor
    tangent: Tensor
    order: Tensor
    inverse: Tensor
    offsets: Tensor
    ranks: int
    room: int


def make_inputs(
    tokens: int, width: int, experts: int, top_k: int, capacity: float, mesh: Mesh, device: torch.device
) -> Inputs:
    """Random tokens, weights and routing, other ones on each rank; bf16 on CUDA, fp32 on the CPU."""
    generator = torch.Generator(device).manual_seed(mesh.ep_rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, tangent = (torch.randn(tokens, width, device=device, generator=generator).to(dtype) for _ in range(2))
    scores = torch.rand(tokens, experts, device=device, generator=generator)
    weights, ids = scores.topk(top_k, -1)
    room = mesh.ep * ops.bucket_capacity(tokens * top_k, mesh.ep, capacity)
    return Inputs(x, weights.contiguous(), tangent, *ops.sort_by_expert(ids.int(), experts), mesh.ep, room)


def exchanged_counts(i: Inputs) -> Tensor:
    """The counts of all ranks, [P, E + 1]."""
    one = [1] * i.ranks
    told = ops.counts_for_ranks(i.offsets, i.ranks)
    return ops.all_to_all_wait(ops.all_to_all_start(told, one, one, GROUP), one, one, GROUP)


def direct(i: Inputs, stage: str, low: bool = False) -> Results:
    """(rows, row weights, sums, gradient of x, of the weights), as far as the stage goes; `low`: rows go out in MXFP8
    and are made bf16 where they arrive."""
    counts, top_k = exchanged_counts(i), i.weights.shape[1]
    destination, local, _ = ops.direct_plan(i.inverse, i.offsets, counts, i.room)
    x = ops.mx_encode(i.x) if low else i.x
    rows, weight, origin = ops.direct_dispatch(x, i.weights, destination, local, counts, i.room, GROUP)
    rows = ops.mx_decode(rows) if low else rows
    if stage == "dispatch":
        return rows, weight
    out = ops.direct_return(rows, origin, destination, local, counts, top_k, GROUP)
    if stage == "forward":
        return rows, weight, out
    tangent = ops.mx_encode(i.tangent) if low else i.tangent
    grad = ops.direct_put(tangent, destination, local, counts, i.room, GROUP)
    grad = ops.mx_decode(grad) if low else grad
    return rows, weight, out, *ops.direct_take(grad, weight, origin, destination, local, counts, top_k, GROUP)


@dataclass(frozen=True)
class Sizes:
    """How many rows go to and come from each rank, and where what arrives belongs among rows sorted by expert."""

    send: list[int]
    receive: list[int]
    regroup: Tensor
    ungroup: Tensor


def read_sizes(i: Inputs, counts: Tensor) -> Sizes:
    """Waits for the device once."""
    experts = counts.shape[1] - 1
    table = counts.tolist()
    rank, local = table[0][experts], experts // i.ranks
    send = [sum(table[rank][p * local : (p + 1) * local]) for p in range(i.ranks)]
    receive = [sum(each[rank * local : (rank + 1) * local]) for each in table]
    total = sum(receive)
    mine = counts[:, rank * local : (rank + 1) * local].reshape(-1)
    numbers = torch.arange(local, device=counts.device).repeat(i.ranks)
    regroup = torch.sort(torch.repeat_interleave(numbers, mine, output_size=total), stable=True).indices
    ungroup = torch.empty_like(regroup).scatter_(0, regroup, torch.arange(total, device=regroup.device))
    return Sizes(send, receive, regroup, ungroup)


def nccl(i: Inputs, stage: str, known: Sizes | None) -> Results:
    """The same as `direct` by permute, variable all-to-all and regroup; `known` sizes, or None to read them."""
    sizes = known or read_sizes(i, exchanged_counts(i))
    top_k, where = i.weights.shape[1], (i.order, i.inverse, i.offsets)

    def out(x: Tensor) -> Tensor:
        return _exchange(x, sizes.send, sizes.receive).index_select(0, sizes.regroup)

    def home(x: Tensor) -> Tensor:
        return _exchange(x.index_select(0, sizes.ungroup), sizes.receive, sizes.send)

    rows = out(ops.permute(i.x, *where, top_k=top_k))
    weight = out(ops.gather_weights(i.weights, *where))
    if stage == "dispatch":
        return rows, weight
    sums = ops.combine(home(rows), *where, top_k=top_k)
    if stage == "forward":
        return rows, weight, sums
    grad = out(ops.permute(i.tangent, *where, top_k=top_k))
    by_weight = ops.gather_weights_backward(home(weight), i.inverse, i.offsets, top_k)
    return rows, weight, sums, ops.combine(home(grad), *where, top_k=top_k), by_weight


def _exchange(x: Tensor, send: list[int], receive: list[int]) -> Tensor:
    from moegraph._torch_compat import resolve_process_group

    arrived = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(arrived, x, receive, send, group=resolve_process_group(GROUP))
    return arrived


def time_dispatch(
    mesh: Mesh,
    device: torch.device,
    *,
    tokens: int,
    width: int,
    experts: int,
    top_k: int,
    capacity: float,
    repeats: int,
    report: Callable[[str], None],
) -> DispatchReport:
    """Times every way on the ranks of `mesh`. Collective; every rank has the whole report."""
    from moegraph.runtime.device import device_name

    i = make_inputs(tokens, width, experts, top_k, capacity, mesh, device)
    known = read_sizes(i, exchanged_counts(i))
    if sum(known.receive) > i.room:
        report(f"{sum(known.receive)} rows arrive at rank {mesh.ep_rank}, whose buffer holds {i.room}")
    ways: dict[str, Callable[[str], Results]] = {
        "direct": lambda stage: direct(i, stage),
        "nccl": lambda stage: nccl(i, stage, known),
        "nccl, sizes read": lambda stage: nccl(i, stage, None),
    }
    if width % BLOCK == 0:
        ways[MXFP8] = lambda stage: direct(i, stage, low=True)
    else:
        report(f"no row in MXFP8: d_model {width} is not whole blocks of {BLOCK}")
    shape = {
        "ranks": mesh.ep,
        "tokens_per_rank": tokens,
        "d_model": width,
        "experts": experts,
        "top_k": top_k,
        "buffer_rows": i.room,
        "dtype": str(i.x.dtype).removeprefix("torch."),
    }
    found = DispatchReport(device_name(device), _versions(device), shape)
    found.equal = {way: _same(job(STAGES[-1]), _expected(i, way, known), device) for way, job in ways.items()}
    del found.equal["nccl"]
    jobs = {(way, stage): job for stage in STAGES for way, job in ways.items()}
    seconds = time_ranks(jobs, device, repeats)
    remote = sum(count for rank, count in enumerate(known.send) if rank != mesh.ep_rank)
    remote += sum(count for rank, count in enumerate(known.receive) if rank != mesh.ep_rank)
    numbers = torch.tensor(
        [[statistics.median(each), min(each)] for each in seconds.values()], dtype=torch.float64, device=device
    )
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    sent = torch.tensor(remote / 2 * width, dtype=torch.float64, device=device)
    dist.all_reduce(sent)
    each_way = float(sent) / mesh.ep  # elements that a rank writes to others in one transfer, on average
    for (way, stage), (median, least) in zip(seconds, numbers.tolist(), strict=True):
        rate = _bytes_per_element(way, stage, i.x) * each_way / median / 1e9
        found.rows.append(Row(way, stage, 1e3 * median, 1e3 * least, rate))
    return found


def _bytes_per_element(way: str, stage: str, x: Tensor) -> float:
    """Of all transfers of a stage together."""
    out, home = TRANSFERS[stage]
    sizes = (PAYLOAD, BF16) if way == MXFP8 else (x.element_size(), x.element_size())
    return out * sizes[0] + home * sizes[1]


def _expected(i: Inputs, way: str, known: Sizes) -> Results:
    """What a way should give, by nccl."""
    if way == MXFP8:
        x, tangent = (ops.mx_decode(ops.mx_encode(each)) for each in (i.x, i.tangent))
        i = replace(i, x=x, tangent=tangent)
    return nccl(i, STAGES[-1], known)


def time_ranks(
    jobs: Mapping[tuple[str, str], Callable[[str], object]], device: torch.device, repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of every counted run: `repeats` turns, in which each job runs once uncounted, so that the ranks meet, and
    then a few times in a row."""
    from moegraph.benchmarks.timing import timed

    found: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    for turn in range(-_WARM_TURNS, repeats):
        pending = []
        for (way, stage), job in jobs.items():
            job(stage)
            for _ in range(_IN_A_ROW if turn >= 0 else 1):
                pending.append(((way, stage), timed(partial(_run, job, stage), 0, device)))
        synchronize(device)
        if turn >= 0:
            for key, read in pending:
                found[key].append(read())
    return found


def _run(job: Callable[[str], object], stage: str, count: int) -> object:
    return job(stage)


def _same(found: Results, expected: Results, device: torch.device) -> bool:
    """Whether all ranks have the same bits both ways. A buffer's rows past the last that exists are not compared."""
    pairs = zip(found, expected, strict=True)
    wrong = sum(not torch.equal(a[: b.shape[0]].to(b.dtype), b) for a, b in pairs)
    total = torch.tensor(wrong, device=device)
    dist.all_reduce(total)
    return not int(total)


def _versions(device: torch.device) -> dict[str, str]:
    import triton

    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__)}
    if device.type == "cuda":
        nccl_version: Any = torch.cuda.nccl.version  # untyped in torch
        versions["nccl"] = ".".join(map(str, nccl_version()))
        versions["cuda"] = str(torch.version.cuda)
    return versions
