"""One global order of samples, a pure function of the seed and the position.

Contract: position p of the run shows sample `order(p)`; each epoch is a permutation of all samples, drawn from a
counter-based generator (Philox 4×64, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by (seed, epoch).
Nothing is carried from step to step, so a resumed run, or one with another layout, sees the same samples. Only the
generator's raw output is used: numpy promises that it never changes, unlike `Generator.permutation`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SampleOrder:
    """The order of `num_samples` samples under `seed`, in [0, 2^64). Holds one epoch, 4 or 8 bytes a sample."""

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples {num_samples} is not positive")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed {seed} is outside [0, 2^64)")
        self.num_samples, self.seed = num_samples, seed
        self._epoch = -1
        self._permutation: NDArray[np.uint32 | np.uint64] = np.empty(0, dtype=np.uint32)

    def sample_ids(self, position: int, count: int) -> NDArray[np.int64]:
        """The samples at positions [position, position + count), int64 [count]; the range may span epochs."""
        ids = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, first = divmod(position + done, self.num_samples)
            part = self._of_epoch(epoch)[first : first + count - done]
            ids[done : done + len(part)] = part
            done += len(part)
        return ids

    def _of_epoch(self, epoch: int) -> NDArray[np.uint32 | np.uint64]:
        if epoch != self._epoch:
            key = np.array([self.seed, epoch], dtype=np.uint64)
            keys = np.random.Philox(key=key).random_raw(self.num_samples)
            order = np.argsort(keys, kind="stable")
            self._permutation = order.astype(np.uint32 if self.num_samples < 1 << 32 else np.uint64)
            self._epoch = epoch
        return self._permutation
