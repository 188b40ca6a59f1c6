"""Blocks of other projects, from a Python file, timed beside moegraph's on the same inputs and weights.

A peer is a class of that file with these attributes; it is made with no arguments, once for each shape:

    name                      what --peers calls it
    setup(cfg, w_up, w_down)  cfg = (T, D, F, E, K, skew); w_up [E, 2F, D], gate rows first, and w_down [E, D, F], not
                              to be changed. Makes `params`, leaf tensors in the peer's own layout
    fwd(x, logits)            x [T, D] and router logits [T, E] float32 → out [T, D], differentiable for both and for
                              `params`: softmax over the K largest logits, SwiGLU experts, weighted sum
    canon(grads)              gradients of `params` → those of w_up and w_down in their layout
    has_bwd                   optional; False for a peer without backward
    time_fwd(i), time_fb(i)   optional, instead of fwd and canon: what is timed for forward and for forward and backward
                              when only matrix products and no block are compared; such a peer has no errors

The file runs as a module of its own name, with its folder on the import path, so that further files can import it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moegraph.errors import UsageError

PeerClass = type[Any]
_ROWS = ("moegraph", "dense ", "copy")  # how the names of the other rows begin


def load_peers(files: Sequence[Path], names: Sequence[str]) -> list[PeerClass]:
    """The classes called `names`, in that order, of files run one after the other; a later file's class wins.

    Raises UsageError for a file that fails when it is run, for a name that none has and for one that is taken.
    """
    found: dict[str, PeerClass] = {}
    for file in files:
        found |= {each.name: each for each in vars(_run_file(file)).values() if _is_peer(each)}
    there = ", ".join(found) or "no peer at all"
    taken = [name for name in names if name.startswith(_ROWS) or "|" in name]
    if taken:
        raise UsageError(f"--peers {taken[0]}: a name of a row that is there anyway, or with a |; rename the class")
    missing = [name for name in names if name not in found]
    if missing or not names:
        what = f"--peers {missing[0]} is not in" if missing else "--peers NAMES is needed with"
        raise UsageError(f"{what} --peers-file {', '.join(map(str, files))}, which has {there}")
    return [found[name] for name in names]


def _is_peer(value: object) -> bool:
    if not isinstance(value, type) or not isinstance(getattr(value, "name", None), str):
        return False
    return callable(getattr(value, "setup", None)) and (hasattr(value, "fwd") or hasattr(value, "time_fwd"))


def _run_file(file: Path) -> Any:
    path = file.resolve()
    before = sys.modules.get(path.stem)
    if before is not None and getattr(before, "__file__", None) != str(path):
        raise UsageError(f"--peers-file {file}: a module {path.stem} is imported already; give the file another name")
    if before is not None:
        return before
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--peers-file {file}: no Python file is there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        text = f"--peers-file {file} fails when it is run: {type(error).__name__}: {error}"
        raise UsageError(f"{text}; --debug shows where") from error
    return module


@contextmanager
def quick_autotuning(device: torch.device) -> Iterator[None]:
    """Within, Triton's autotuner measures a candidate for 25 ms instead of 125: peers try hundreds of them."""
    if device.type != "cuda":
        yield
        return
    import triton

    active: Any = triton.runtime.driver.active
    before = active.get_benchmarker
    active.get_benchmarker = lambda: functools.partial(triton.testing.do_bench, warmup=5, rep=20)
    try:
        yield
    finally:
        active.get_benchmarker = before
