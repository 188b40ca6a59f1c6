"""`moegraph doctor --bring-up`: everything that a GPU nobody has tried yet has to show, in one report file.

Every part is a command of its own with a time limit, so that one that crashes or hangs costs only itself. The report
holds each command, how long it took, how it ended and what it printed; it is written anew after each part.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegraph.cli.output import print_table, say
from moegraph.errors import UsageError

LIMIT = 3600.0  # seconds that a part may take
TUNE_SECONDS = 600.0  # over all kernels and shapes
KEPT = 40_000  # characters of what a part prints
_MODEL = ["presets/olmo3-47b.yaml", "--set=model.num_layers=4", "--set=model.moe.num_experts=16"]
_MODEL += ["--set=layout={dp: 1, ep: 1, transport: exact}", "--set=train.tokens_per_step=16384"]
_MODEL += ["--set=data.document_mask=false", "--balanced", "--kernels=40"]


@dataclass(frozen=True)
class Part:
    """One command of the bring-up and what it is for; `command` is what follows the Python interpreter."""

    name: str
    why: str
    command: tuple[str, ...]


def parts_for(capability: tuple[int, int], folder: Path, tune_seconds: float = TUNE_SECONDS) -> list[Part]:
    """The parts for a device of this compute capability. The tuning table goes into `folder`."""
    native = capability[0] == 10
    low = "precision.mxfp8.experts=on" if native else "precision.fp8=rowwise"
    formats = "mxfp8" if native else "fp8,fp8-wgrad"

    def mine(name: str, why: str, *command: str) -> Part:
        return Part(name, why, ("-m", "moegraph", *command))

    table = str(folder / "tuning-table.json")
    tests = Path(__file__).parents[2] / "tests"
    gpu_tests: tuple[str, ...]
    if tests.is_dir() and importlib.util.find_spec("pytest") is not None:
        gpu_tests = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(tests))
    else:
        gpu_tests = ("-c", "raise SystemExit('no tests here: run from a checkout of moegraph, with pytest')")
    tune = ("bench", "tune", "--preset=A,C,D,wide", f"--seconds={tune_seconds:g}", f"--output={table}", "--json")
    layer = ("bench", "layer", "--preset=A,wide", "--backward", "--graph", "--json")
    return [
        mine("doctor", "versions, devices, kernels, disk", "doctor", "--json"),
        Part("tests", "every test that needs a GPU", gpu_tests),
        Part("mxfp8", "MXFP8 here against emulation on the CPU", ("-m", "moegraph.benchmarks.mx_native")),
        mine("tune", "the fastest configurations of the kernels", *tune),
        mine(
            "layer",
            "one block, bf16 and 8 bits",
            *layer,
            f"--precision={formats}",
        ),
        mine("step", "a training step in bf16", "bench", "step", *_MODEL, "--json"),
        mine("step, 8 bits", "the same with experts in 8 bits", "bench", "step", *_MODEL, f"--set={low}", "--json"),
    ]


def bring_up(parts: Sequence[Part], report: Path, about: dict[str, Any], limit: float = LIMIT) -> bool:
    """Runs the parts one after the other and writes `report`, JSON. True if all ended with 0."""
    results: list[dict[str, Any]] = []
    for number, part in enumerate(parts, 1):
        say(f"{number}/{len(parts)} {part.name}: {part.why}")
        results.append(_run(part, limit))
        report.write_text(json.dumps({**about, "parts": results}, indent=1) + "\n", encoding="utf-8")
    rows = [[r["name"], "ok" if r["status"] == 0 else _ended(r), f"{r['seconds']:.0f}", r["why"]] for r in results]
    print_table(["part", "ended", ">s", "what it is"], rows)
    say(f"report: {report}")
    return all(result["status"] == 0 for result in results)


def _run(part: Part, limit: float) -> dict[str, Any]:
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.command], capture_output=True, text=True, errors="replace", timeout=limit
        )
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status, out, err = None, _text(late.stdout), _text(late.stderr)
    found: dict[str, Any] = {
        "name": part.name,
        "why": part.why,
        "command": ["python", *part.command],
        "status": status,
        "seconds": time.monotonic() - began,
        "error": err[-KEPT:],
    }
    try:
        found["json"] = json.loads(out)
    except ValueError:
        found["output"] = out[-KEPT:]
    return found


def _ended(result: dict[str, Any]) -> str:
    return "out of time" if result["status"] is None else f"status {result['status']}"


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def doctor_bring_up(output: Path, only: Sequence[str], tune_seconds: float = TUNE_SECONDS) -> bool:
    """The bring-up of this machine's first GPU, or those of its parts that `only` names. Raises UsageError without a
    GPU, for a part that there is not, and for a report that cannot be written."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "doctor --bring-up needs a GPU; `moegraph doctor --kernels --arch sm_103` compiles without one"
        )
    from moegraph.runtime.manifest import versions

    output = output.absolute()
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"{output.parent} cannot be written")
    parts = parts_for(torch.cuda.get_device_capability(), output.parent, tune_seconds)
    unknown = [name for name in only if name not in [part.name for part in parts]]
    if unknown:
        raise UsageError(f"no part {unknown[0]!r}: there are {', '.join(part.name for part in parts)}")
    about = {
        "report": "moegraph bring-up",
        "versions": versions(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "capability": list(torch.cuda.get_device_capability()),
    }
    return bring_up([part for part in parts if not only or part.name in only], output, about)
