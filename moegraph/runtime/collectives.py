"""Failed collectives, in words: when a peer is gone or too slow, what this rank was doing is said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from moegraph.errors import MoegraphError, RunError

_SIGNS = ("gloo", "NCCL", "Connection", "connection", "Timed out", "timed out", "timeout", "Socket", "store")


@contextmanager
def during(what: str) -> Iterator[None]:
    """Within, an error of a collective becomes a RunError that says what was being done; the innermost one says it."""
    try:
        yield
    except MoegraphError:
        raise
    except RuntimeError as error:
        if not dist.is_initialized() or not _is_of_a_collective(error):
            raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise RunError(
            f"a collective failed while {what}: a peer has ended or did not answer in time ({reason})"
        ) from error


def _is_of_a_collective(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__
    return False
