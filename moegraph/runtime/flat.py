"""Named tensors as views of one flat buffer, each starting at a multiple of 256 bytes.

One flat tensor is one thing to zero, to scale, to reduce over ranks and to cut into shards. Buffers made from equal
shapes, units and parts have equal layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 256
UNIT = 128  # elements: 256 bytes of the narrowest dtype, for buffers of several dtypes with one layout


class FlatTensors(Mapping[str, Tensor]):
    """Zeros of the given shapes, by name, in the order given. `flat` [N] holds them all, with zeros between.

    `unit` is what each starts at a multiple of, in elements (default 256 bytes); N is a multiple of `parts` units, so
    that `parts` ranks can hold equal shards. `starts[name]` is where each begins, in elements.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        unit: int | None = None,
        parts: int = 1,
    ) -> None:
        step = unit or _ALIGNMENT_BYTES // dtype.itemsize
        sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.starts: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            self.starts[name] = end
            end += -(-size.numel() // step) * step
        end = -(-end // (step * parts)) * step * parts
        self.flat = torch.zeros(end, dtype=dtype, device=device)
        self._views = {name: self.flat[self.starts[name] :][: size.numel()].view(size) for name, size in sizes.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
