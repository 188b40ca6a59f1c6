"""`moegraph doctor`: what this machine has, what a run would use of it, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moegraph.cli.options import DEFAULT_SPEC, Json, Set, refuse
from moegraph.cli.output import print_json, print_table
from moegraph.errors import MoegraphError, UsageError

if TYPE_CHECKING:
    from moegraph.specs import Spec

Verdict = Literal["ok", "note", "failed"]
FAILED = 3
MIN_TORCH = (2, 11)
ENOUGH_DISK = 2 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `failed`: training cannot work as it is; `note`: it works, with a consequence."""

    name: str
    value: str
    verdict: Verdict = "ok"
    note: str = ""


def doctor_command(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC]", help=f"Whose shapes to choose kernels for. Default: ./{DEFAULT_SPEC} or the tiny preset."
        ),
    ] = None,
    set_: Set = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Instead: compile the kernels of one block for a chip, without a GPU.")
    ] = False,
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="With --kernels: sm_90, sm_100 or sm_103. Default: this GPU's.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --kernels: the shape, A (default), C, D, Q or wide.")
    ] = None,
    bring_up: Annotated[
        bool, typer.Option("--bring-up", help="Instead: try everything a new GPU has to show; takes an hour or so.")
    ] = False,
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="With --bring-up: only this part. Repeatable.")
    ] = None,
    tune_seconds: Annotated[
        float | None, typer.Option(min=1, metavar="S", help="With --bring-up: how long to tune. Default: 600.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="With --bring-up: the report.")
    ] = None,
    json: Json = False,
) -> int:
    """Check this machine: versions, devices, kernels, disk.

    With --kernels: registers, spills, shared memory and instructions of the kernels of one block for a chip that need
    not be here, and where each configuration comes from.

    With --bring-up: GPU tests, MXFP8 against its emulation, tuning, one block, whole steps; all of it in one report
    file, bring-up.json unless said otherwise, to read or to send to whoever asked. Exit status 3 if a check or part
    fails.
    """
    if bring_up:
        refuse(
            spec=spec, set=set_, kernels=kernels, arch=arch, preset=preset, json=json, because="no part of --bring-up"
        )
        from moegraph.cli.bring_up import TUNE_SECONDS, doctor_bring_up

        found = doctor_bring_up(output or Path("bring-up.json"), part or (), tune_seconds or TUNE_SECONDS)
        return 0 if found else FAILED
    refuse(part=part, tune_seconds=tune_seconds, output=output, because="goes with --bring-up")
    if kernels:
        if spec is not None or set_:
            raise UsageError("doctor --kernels takes a shape by --preset; `moegraph inspect SPEC --kernels` a spec's")
        from moegraph.cli.doctor_kernels import doctor_kernels

        return doctor_kernels(arch, preset or "A", as_json=json)
    refuse(arch=arch, preset=preset, because="goes with --kernels")
    from moegraph.specs import load_spec

    name = spec or (DEFAULT_SPEC if Path(DEFAULT_SPEC).exists() else "presets/tiny.yaml")
    loaded = load_spec(name, set_ or ())
    findings = [
        *_versions(),
        *_devices(),
        *_kernels(loaded, name),
        *_low_precision(loaded, name),
        *_compiler(),
        *_cache(),
        *_disk(),
    ]
    failed = [finding for finding in findings if finding.verdict == "failed"]
    if json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        print_table(["", "found", "verdict", "note"], [[f.name, f.value, f.verdict, f.note] for f in findings])
    return FAILED if failed else 0


def _versions() -> Iterator[Finding]:
    from moegraph.runtime.manifest import versions

    for package, version in versions().items():
        old = package == "torch" and tuple(int(part) for part in version.split(".")[:2]) < MIN_TORCH
        yield Finding(package, version, "failed" if old else "ok", "moegraph needs torch 2.11 or newer" if old else "")
    yield Finding("platform", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")


def _devices() -> Iterator[Finding]:
    import torch

    from moegraph.runtime.peaks import peak_flops

    yield Finding("CUDA of torch", torch.version.cuda or "none")
    if not torch.cuda.is_available():
        why = "" if torch.version.cuda is None else "torch has CUDA but sees no device: is there a driver?"
        yield Finding("devices", "CPU only", "note", why or "this torch is built without CUDA")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        peak = peak_flops(device.name, "bf16")
        yield Finding(
            f"cuda:{index}",
            f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"
            + (f", peak {peak / 1e12:g} TFLOP/s in bf16" if peak else ""),
            "ok" if peak else "note",
            "" if peak else "not in the table of peaks: MFU will not be shown",
        )


def _kernels(spec: Spec, name: str) -> Iterator[Finding]:
    """Which implementations the spec's shapes get on the device it would run on."""
    import torch

    from moegraph import ops

    cuda = spec.train.device != "cpu" and torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[spec.precision.compute]
    head = spec.model.head_dim
    windows = sorted({spec.model.window(layer) for layer in range(spec.model.num_layers)}, key=lambda w: w or 0)
    for window in windows:
        documents = spec.data.document_mask
        backend, reason = ops.attention_backend(device, dtype, head, documents=documents, window=window)
        what = f"attention of {name}" + (f", window {window}" if window else "")
        yield Finding(what, backend, "note" if cuda and backend == "reference" else "ok", reason)
    if spec.model.moe is not None:
        moe, where = spec.model.moe, torch.device(device)
        rows = spec.sequences_per_microbatch * spec.data.seq_len * moe.top_k
        try:
            backend, reason = ops.grouped_mm_backend(
                "grouped_mm", dtype, 2 * moe.d_ff, spec.model.d_model, rows, moe.num_experts, where
            )
            yield Finding(f"grouped_mm of {name}", backend, "note" if cuda and backend == "loop" else "ok", reason)
        except MoegraphError as error:
            yield Finding(f"grouped_mm of {name}", "tuning table", "failed", str(error))


def _low_precision(spec: Spec, name: str) -> Iterator[Finding]:
    """Whether products in 8 bits would run on matrix units of their own here, or be emulated."""
    import torch

    from moegraph.ops.mx_mm import mx_backend
    from moegraph.ops.scaled_mm import fp8_backend

    if spec.model.moe is None:
        return
    device = torch.device("cuda" if spec.train.device != "cpu" and torch.cuda.is_available() else "cpu")
    for format_, choose in (("mxfp8", mx_backend), ("fp8", fp8_backend)):
        backend, reason = choose(spec.model.moe.d_ff, spec.model.d_model, device)
        yield Finding(f"{format_} experts of {name}", "native" if backend == "triton" else backend, "ok", reason)


def _compiler() -> Iterator[Finding]:
    found = next((path for path in map(shutil.which, ("g++", "clang++")) if path), None)
    note = "" if found else "torch.compile needs one: install g++, or train with --set train.compile=eager"
    yield Finding("C++ compiler", found or "none", "ok" if found else "failed", note)


def _cache() -> Iterator[Finding]:
    """The user's cache folders: prepared corpora, and compiled kernels, which are code and so this user's alone."""
    from moegraph.data.corpora import corpus_folder
    from moegraph.data.manifest import Inputs

    root = corpus_folder("any", Inputs(documents_sha256="0" * 64)).parents[1]
    yield _folder("cache folder", root, stat.S_IWGRP | stat.S_IWOTH)
    yield _folder("compile cache", root / "compiled", stat.S_IRWXG | stat.S_IRWXO)


def _folder(name: str, folder: Path, forbidden: int) -> Finding:
    """Whether a folder can be written to, is this user's, and has none of the `forbidden` permissions."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding(name, str(folder), "failed", f"{existing} cannot be written")
    if existing != folder:
        return Finding(name, str(folder), "ok", "does not exist yet, can be made")
    facts = folder.stat()
    shown = f"{folder}, mode {stat.S_IMODE(facts.st_mode):04o}"
    if facts.st_uid != os.getuid():
        return Finding(name, shown, "failed", "belongs to another user")
    if facts.st_mode & forbidden:
        return Finding(name, shown, "failed", f"open to others: chmod go= {folder}")
    return Finding(name, shown)


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free
    short = free < ENOUGH_DISK
    yield Finding(
        "free disk here", f"{free / 2**30:.1f} GiB", "note" if short else "ok", "little room" if short else ""
    )
