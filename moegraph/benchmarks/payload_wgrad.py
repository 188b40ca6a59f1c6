"""Weight gradients of rows that arrived in MXFP8: dequantised in the product as they load, beside decoded before it.

`python -m moegraph.benchmarks.payload_wgrad` prints a JSON document of a GPU's: for each shape of a block, and whether
the product is written in bf16 or added to an fp32 buffer, milliseconds (medians, in turn)

    decode, product   `mx_decode`, then the plain product: what an operator without a kernel of its own runs
    product           the plain product alone, of rows that are bf16 already
    loads: TILE       dequantised as it loads, for every tile that is tried, the rule's first

and whether every tile has the bits of the first row. Bytes of the copy in bf16, which the last rows do not need, are
beside them. `--tokens`, `--d-model`, `--d-ff`, `--experts` and `--top-k` are the sizes of the block.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.timing import time_in_turn
from moegraph.kernels.config import Config
from moegraph.ops.payload_wgrad import payload_backend

# Tiles as of a gradient's payload: columns of it, columns of the other operand. Four warps: two programs to a
# multiprocessor.
TILES = (
    Config(128, 128, 64, num_warps=4, num_stages=3),
    Config(128, 128, 64, num_warps=4, num_stages=3, flatten=True),
    Config(64, 256, 64, num_warps=4, num_stages=2),
    Config(128, 128, 128, num_warps=4, num_stages=2),
    Config(128, 256, 64, num_warps=8, num_stages=3, flatten=True),
    Config(128, 256, 64, num_warps=8, num_stages=3),
    Config(256, 128, 64, num_warps=8, num_stages=4, flatten=True),
)


def time_payload_wgrad(
    device: torch.device, *, rows: int, d_model: int, d_ff: int, experts: int, repeats: int = 5
) -> list[dict[str, Any]]:
    """One entry per product and way of storing; see the module. CUDA only."""
    return [
        _time(device, which, n, k, rows, experts, added, repeats)
        for which, n, k in (("grad", d_model, d_ff), ("rows", 2 * d_ff, d_model))
        for added in (False, True)
    ]


def _time(
    device: torch.device, which: str, n: int, k: int, rows: int, experts: int, added: bool, repeats: int
) -> dict[str, Any]:
    from moegraph.kernels import payload_wgrad, wgrad

    generator = torch.Generator(device).manual_seed(0)
    grad, x = (torch.randn(rows, w, device=device, generator=generator).bfloat16() for w in (n, k))
    given = (ops.mx_encode(grad), x) if which == "grad" else (grad, ops.mx_encode(x))
    wide = (ops.mx_decode(given[0]), x) if which == "grad" else (grad, ops.mx_decode(given[1]))
    ends = (torch.arange(1, experts + 1, dtype=torch.int64) * rows // experts).to(torch.int32).to(device)
    out = torch.zeros(experts, n, k, device=device, dtype=torch.float32 if added else torch.bfloat16)

    def plain(left: Tensor, right: Tensor) -> None:
        wgrad.wgrad_into(left, right, ends, out, accumulate=added)

    def loaded(config: Config) -> None:
        payload_wgrad.payload_wgrad_into(*given, ends, out, accumulate=added, config=config)

    def decoded(_: int) -> None:
        plain(ops.mx_decode(given[0]), x) if which == "grad" else plain(grad, ops.mx_decode(given[1]))

    jobs: dict[str, Callable[[int], Any]] = {"decode, product": decoded, "product": lambda _: plain(*wide)}
    equal, failed = {}, {}
    out.zero_()
    plain(*wide)
    want = out.clone()
    for name, config in _tiles(which):
        try:
            out.zero_()
            loaded(config)
            equal[name] = torch.equal(out, want)
        except Exception as error:  # a tile that does not compile or fit on this device is left out, and said
            failed[name] = str(error)[:200]
            continue
        jobs[name] = lambda _, config=config: loaded(config)  # type: ignore[misc]
    seconds = time_in_turn(jobs, device, repeats=repeats)
    milliseconds = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
    payloads = (which == "grad", which == "rows")
    return {
        "payload": which,
        "n": n,
        "k": k,
        "rows": rows,
        "experts": experts,
        "added": added,
        "copy_bytes": 2 * rows * (n if which == "grad" else k),
        "chosen": payload_backend(n, k, rows, experts, payloads, device),
        "milliseconds": milliseconds,
        "tflops": {name: 2e-9 * rows * n * k / ms for name, ms in milliseconds.items()},
        "equal": equal,
        "failed": failed,
    }


def _tiles(which: str) -> Iterator[tuple[str, Config]]:
    for tile in TILES:
        config = tile if which == "grad" else replace(tile, block_m=tile.block_n, block_n=tile.block_m)
        yield f"loads: {config}", config


def main() -> int:
    """Times the block of the arguments on the current device."""
    parser = argparse.ArgumentParser(prog="python -m moegraph.benchmarks.payload_wgrad")
    for name, default in (("tokens", 32768), ("d-model", 2048), ("d-ff", 1024), ("experts", 128), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = {"d_model": asked.d_model, "d_ff": asked.d_ff, "experts": asked.experts}
    found = time_payload_wgrad(device, rows=asked.tokens * asked.top_k, **sizes)
    document = {"device": torch.cuda.get_device_name(device), "torch": str(torch.__version__), "products": found}
    print(json.dumps(document, indent=1))
    return 0 if all(all(each["equal"].values()) for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
