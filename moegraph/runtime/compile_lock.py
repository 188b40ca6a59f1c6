"""The ranks of one host compile each graph once: the first one does, the others wait and find it in the cache.

All ranks of a stage compile the same graphs, which name no rank. Compiling runs no collective, so waiting for another
rank's compiler cannot hold up anything that that rank waits for.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # set by `compile_cache`: a folder of this user's alone
_RANKS_HERE = "LOCAL_WORLD_SIZE"


@contextmanager
def one_rank_at_a_time(label: str) -> Iterator[None]:
    """Within, no other rank of this host compiles the graph of this label. Alone on the host it does nothing."""
    folder = os.environ.get(_CACHE)
    if os.environ.get(_RANKS_HERE, "1") == "1" or not folder:
        yield
        return
    locks = Path(folder).parent / "locks"
    locks.mkdir(mode=0o700, exist_ok=True)
    with (locks / re.sub(r"\W+", "_", label)).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go of when the file is closed, also by a process that dies
        yield
