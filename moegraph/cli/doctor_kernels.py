"""`moegraph doctor --kernels`: what the kernels of one block compile to for a chip, which need not be here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moegraph.benchmarks.shapes import PRESETS
from moegraph.cli.output import Status, print_json, print_table, say
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.kernels.chips import Card
    from moegraph.kernels.compiled import KernelReport
    from moegraph.kernels.shapes import Problem
    from moegraph.kernels.tuning import Choice

FAILED = 1


@dataclass(frozen=True)
class Line:
    """One kernel. `backend` is what the product runs on by default or by a table, and why; `choice` the configuration
    of moegraph's kernel (both None for a kernel that is no product); `report` is None for one that does not compile;
    `failed` says what does not hold."""

    name: str
    backend: tuple[str, str] | None
    choice: Choice | None
    report: KernelReport | None
    seconds: float
    failed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        from dataclasses import asdict

        choice = self.choice and {**self.choice._asdict(), "config": asdict(self.choice.config)}
        report = self.report and self.report.to_json()
        backend = self.backend and dict(zip(("name", "reason"), self.backend, strict=True))
        found = {"name": self.name, "backend": backend, "choice": choice, "report": report}
        return {**found, "seconds": self.seconds, "failed": list(self.failed)}


def doctor_kernels(arch: str | None, preset: str, *, as_json: bool) -> int:
    """Compiles each kernel of one bf16 block at a preset's shape for `arch` (None: this machine's chip, else sm_90).

    Returns the exit status: 1 if a kernel does not compile, spills, exceeds shared memory, or a product does without
    the chip's matrix instruction or asynchronous loads.
    """
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset}: one of {', '.join(PRESETS)}")
    from moegraph.kernels.chips import CHIPS, card_for

    card = card_for(arch)
    with Status() as status:
        lines = list(_lines(preset, card, status))
    failed = [line for line in lines if line.failed]
    if as_json:
        head = {"ok": not failed, "chip": CHIPS[card.capability].title, "card": card.name, "preset": preset}
        print_json({**head, "kernels": [line.to_json() for line in lines]})
        return FAILED if failed else 0
    print(f"preset {preset}, bf16, for {CHIPS[card.capability].title}, {card.name}; compiled here, not run")
    chosen, compiled = ["runs on", "configuration", "source"], [">registers", ">spilled B", ">shared KiB", "matrix"]
    print_table(["kernel", *chosen, *compiled, "async loads", ">s", "verdict"], map(_row, lines))
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if line.choice is not None and line.backend is not None:
            reasons.setdefault(f"configuration {line.choice.reason}", []).append(line.name)
            reasons.setdefault(f"{line.backend[0]}: {line.backend[1]}", []).append(line.name)
    for reason, names in reasons.items():
        print(f"{', '.join(names)}: {reason}")
    for line in failed:
        say(f"{line.name}: {', '.join(line.failed)}")
    return FAILED if failed else 0


def _lines(preset: str, card: Card, status: Status) -> Iterator[Line]:
    import torch

    from moegraph.kernels.catalogue import launches
    from moegraph.kernels.chips import CHIPS
    from moegraph.kernels.compiled import compile_launch
    from moegraph.kernels.shapes import block_problems
    from moegraph.kernels.tuning import choose_for
    from moegraph.ops import grouped_mm_backend

    s = PRESETS[preset]
    sizes = {"tokens": s.tokens, "d_model": s.d_model, "d_ff": s.d_ff, "num_experts": s.experts, "top_k": s.top_k}
    problems: dict[str, Problem] = block_problems(**sizes, dtype=torch.bfloat16)
    for name, launch in launches(**sizes, dtype=torch.bfloat16, card=card):
        status(f"compiling {name}")
        backend, choice = None, None
        if name in problems:
            # The product behind the fused up projection runs where that does.
            p = problems["up_swiglu" if name == "down" else name]
            backend = grouped_mm_backend(p.kernel, p.dtype, p.n, p.k, p.rows, p.experts, card)
            choice = choose_for(problems[name], card)
        began = time.perf_counter()
        try:
            report = compile_launch(launch, card.capability)
        except Exception as error:  # of Triton, of its passes, of ptxas
            what = f"does not compile: {type(error).__name__}: {str(error).strip()[:200] or 'no message'}"
            yield Line(name, backend, choice, None, time.perf_counter() - began, (what.replace("\n", " "),))
            continue
        wanted = CHIPS[card.capability].matrix_instruction if name in problems else None
        seconds = time.perf_counter() - began
        yield Line(name, backend, choice, report, seconds, tuple(_failures(report, wanted)))


def _failures(report: KernelReport, instruction: str | None) -> Iterator[str]:
    """What does not hold of a report; `instruction` is that of a product, None for other kernels."""
    if report.spill_bytes:
        yield f"spills {report.spill_bytes} bytes per thread"
    if report.shared_bytes > report.shared_limit:
        yield f"takes {report.shared_bytes} bytes of shared memory, {report.shared_limit} are there"
    if instruction is not None and report.matrix_instruction != instruction:
        yield f"uses {report.matrix_instruction} instead of {instruction}"
    if instruction is not None and not report.asynchronous_loads:
        yield "has no asynchronous loads"


def _row(line: Line) -> list[str]:
    choice = [str(line.choice.config), line.choice.source] if line.choice is not None else ["–", "fixed"]
    choice.insert(0, line.backend[0] if line.backend is not None else "triton")
    verdict = [f"{line.seconds:.1f}", "failed" if line.failed else "ok"]
    r = line.report
    if r is None:
        return [line.name, *choice, *["–"] * 5, *verdict]
    shared = f"{r.shared_bytes / 1024:.0f}/{r.shared_limit >> 10}"
    instruction = r.matrix_instruction if r.matrix_instruction != "none" else "–"
    loads = "yes" if r.asynchronous_loads else "no"
    return [line.name, *choice, str(r.registers), str(r.spill_bytes), shared, instruction, loads, *verdict]
