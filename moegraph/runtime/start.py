"""Starting together: what fails on one rank ends all of them, and what has to be equal on all ranks is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moegraph.compiled import Compiled
from moegraph.errors import CheckFailed, RunError
from moegraph.runtime.mesh import Mesh


@contextmanager
def together(mesh: Mesh, what: str) -> Iterator[None]:
    """Each rank does its part within; when one fails, it raises its own error and the others a RunError that names it.
    Nobody waits for a rank that will not come."""
    if mesh.world == 1:
        yield
        return
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = torch.zeros(mesh.world, dtype=torch.int64)
    failed[mesh.rank] = failure is not None
    dist.all_reduce(failed)
    if failure is not None:
        raise failure
    if failed.any():
        names = ", ".join(str(rank) for rank in failed.nonzero().flatten().tolist())
        raise RunError(f"rank {mesh.rank}: {what} failed on rank {names}, which says why")


def check_equal(mesh: Mesh, compiled: Compiled, data_fingerprint: str) -> None:
    """Raises CheckFailed, on every rank and naming the ranks, unless all have the same spec, graphs and data."""
    if mesh.world == 1:
        return
    facts = {
        "the resolved spec": compiled.spec.model_dump_json(by_alias=True),
        "the graphs": "\n".join(f"{name} {value}" for name, value in compiled.hashes.items()),
        "the data": data_fingerprint,
    }
    for what, text in facts.items():
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int64)
        every = [torch.empty_like(digest) for _ in range(mesh.world)]
        dist.all_gather(every, digest)
        other = [rank for rank, value in enumerate(every) if not torch.equal(value, every[0])]
        if other:
            raise CheckFailed(
                f"{what} of rank {', '.join(map(str, other))} differ from those of rank 0: the same spec, versions and "
                "files are needed everywhere"
            )
