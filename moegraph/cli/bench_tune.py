"""`moegraph bench tune`: the fastest configuration of each kernel for some shapes, measured on this device."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegraph.benchmarks.shapes import PRESETS
from moegraph.cli.options import Json, Set
from moegraph.cli.output import Status, print_json, print_table, say
from moegraph.errors import RunError, UsageError

if TYPE_CHECKING:
    import torch

    from moegraph.benchmarks.tuner import Outcome
    from moegraph.kernels.shapes import Problem, ShapeClass

_DTYPES = ("bf16", "fp8")


def tune_command(
    spec: Annotated[str | None, typer.Argument(metavar="[SPEC]", help="Tune for the shapes of this spec.")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Or for {', '.join(PRESETS)}, with commas between.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Or for one block: all five of these.")] = None,
    d_model: Annotated[int | None, typer.Option(min=8)] = None,
    d_ff: Annotated[int | None, typer.Option(min=8)] = None,
    experts: Annotated[int | None, typer.Option(min=1)] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of --preset and a block: bf16 or fp8.")] = "bf16",
    seconds: Annotated[float, typer.Option(min=1.0, help="Time budget over all kernels.")] = 300.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The table. Default: your own for this card.")
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> int:
    """Measure candidate configurations of the kernels, and write the fastest into a tuning table.

    Entries of other shape classes in the table stay. Training reads the table and never measures. Exit status 1 if
    nothing could be measured for a kernel.
    """
    block = {"tokens": tokens, "d_model": d_model, "d_ff": d_ff, "num_experts": experts, "top_k": top_k}
    given = [spec is not None, preset is not None, any(value is not None for value in block.values())]
    if sum(given) != 1:
        raise UsageError("name what to tune for, one of: SPEC, --preset A,C, or --tokens … --top-k")
    if set_ and spec is None:
        raise UsageError("--set goes with SPEC")
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: {' or '.join(_DTYPES)}")
    if dtype != _DTYPES[0] and spec is not None:
        raise UsageError("--dtype goes with --preset or a block; a spec says its own")
    names = _preset_names(preset) if preset is not None else []
    if given[2]:
        _check_block(block)
    import torch

    if not torch.cuda.is_available():
        raise RunError(
            "bench tune measures kernels on a CUDA device and torch sees none; `moegraph doctor --kernels` shows what "
            "they compile to without one"
        )
    from moegraph.kernels.chips import CHIPS, card_of
    from moegraph.kernels.tuning import forget_choices, table_of, user_table
    from moegraph.kernels.tuning_table import Table, write_table

    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    assert card is not None
    if card.capability not in CHIPS:
        raise RunError(f"bench tune: no kernels are written for {card.name} (sm_{card.capability})")
    path = output or user_table(card.name)
    table = table_of(card, path) if path.exists() else Table(card, {})  # refused now, not after minutes
    problems = _problems(spec, set_, names, block, dtype)
    outcomes: list[Outcome] = []
    with Status() as status:
        for outcome in _outcomes(problems, device, card.capability, seconds, status):
            outcomes.append(outcome)
            if outcome.entry is not None:
                table = table.with_entries([outcome.entry])
                write_table(path, table)  # after each: Ctrl-C keeps what was measured
    forget_choices()
    _show(outcomes, path, as_json=json)
    return 1 if any(each.entry is None and each.tried for each in outcomes) else 0


def _outcomes(
    problems: Sequence[Problem], device: torch.device, capability: int, seconds: float, status: Status
) -> Iterator[Outcome]:
    from moegraph.benchmarks.tuner import tune
    from moegraph.benchmarks.tuning_device import DeviceTrial
    from moegraph.runtime.compile_cache import compile_cache
    from moegraph.runtime.device import device_name
    from moegraph.runtime.manifest import versions

    known = {name: versions().get(name, "unknown") for name in ("moegraph", "torch", "triton")}
    with compile_cache(device_name(device), inductor=False):
        yield from tune(
            problems,
            lambda problem: DeviceTrial(problem, device, capability),
            capability=capability,
            seconds=seconds,
            versions=known,
            date=datetime.date.today().isoformat(),
            report=status,
        )


def _problems(
    spec: str | None, set_: Sequence[str] | None, presets: Sequence[str], block: dict[str, int | None], dtype: str
) -> list[Problem]:
    """Every product once per shape class."""
    from moegraph.kernels.shapes import DTYPES, block_problems
    from moegraph.ops.grouped_mm import no_kernel
    from moegraph.ops.scaled_mm import no_fp8_kernel

    found: list[Problem] = []
    if spec is not None:
        found = _spec_problems(spec, set_)
    for name in presets:
        s = PRESETS[name]
        sizes = {"tokens": s.tokens, "d_model": s.d_model, "d_ff": s.d_ff, "num_experts": s.experts, "top_k": s.top_k}
        found += block_problems(**sizes, dtype=DTYPES[dtype]).values()
    if not found:
        sizes = {name: value or 0 for name, value in block.items()}
        found += block_problems(**sizes, dtype=DTYPES[dtype]).values()
    classes: dict[ShapeClass, Problem] = {}
    for problem in found:
        fp8 = problem.dtype == DTYPES["fp8"]
        why = no_fp8_kernel(problem.n, problem.k) if fp8 else no_kernel(problem.dtype, problem.n, problem.k)
        if why:
            say(f"{problem.shape}: left out, {why}")
        else:
            classes.setdefault(problem.shape, problem)
    return list(classes.values())


def _spec_problems(spec: str, set_: Sequence[str] | None) -> list[Problem]:
    from moegraph.cli.sources import find_spec, load
    from moegraph.compiled import compile as compile_spec
    from moegraph.runtime.grouped_products import grouped_products

    found = [product.problem for product in grouped_products(compile_spec(load(find_spec(spec), set_).spec).program)]
    if not found:
        raise UsageError(f"{spec} has no experts, so no kernels to tune")
    return found


def _preset_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or any(name not in PRESETS for name in names):
        raise UsageError(f"--preset {text}: {', '.join(PRESETS)}, one or several with commas between")
    return names


def _check_block(block: dict[str, int | None]) -> None:
    missing = [f"--{name.removeprefix('num_').replace('_', '-')}" for name, value in block.items() if value is None]
    if missing:
        raise UsageError(f"a block needs {', '.join(missing)} too")
    if (block["top_k"] or 0) > (block["num_experts"] or 0):
        raise UsageError(f"--top-k {block['top_k']} is more than --experts {block['num_experts']}")


def _show(outcomes: Sequence[Outcome], path: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"table": str(path), "classes": [_outcome_json(each) for each in outcomes]})
    else:
        columns = ["kernel", ">n", ">k", "rows/expert", "backend", "configuration", ">ms", ">TFLOP/s", ">ms by rule"]
        print_table([*columns, ">ms _grouped_mm", ">tried", "skipped"], map(_row, outcomes))
    for each in outcomes:
        if each.entry is None:
            say(f"{each.problem.shape}: {each.why}")
    reached = [each for each in outcomes if each.tried]
    few = sum(each.not_reached > 0 for each in reached)
    if few:
        left, every = sum(each.not_reached for each in reached), sum(each.candidates for each in reached)
        say(f"{left} of {every} candidates, of {few} classes, were not reached within the time budget")
    if any(each.entry is not None for each in outcomes):
        say(f"written to {path}")


def _row(outcome: Outcome) -> list[str]:
    shape, entry = outcome.problem.shape, outcome.entry
    row = [shape.kernel, str(shape.n), str(shape.k), shape.rows_text]
    if entry is None:
        row += ["–"] * 6
    else:
        row += [entry.backend, str(entry.config), f"{entry.milliseconds:.3f}", f"{entry.tflops:.0f}"]
        row += [f"{entry.against[name]:.3f}" if name in entry.against else "–" for name in ("rule", "_grouped_mm")]
    skipped = ", ".join(f"{count} {why}" for why, count in outcome.skipped.items())
    return [*row, f"{outcome.tried}/{outcome.candidates}", skipped or "–"]


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    entry, data = outcome.entry, dict[str, Any](outcome.problem.shape.to_json())
    if entry is not None:
        measured = {"backend": entry.backend, "config": asdict(entry.config), "against": dict(entry.against)}
        data |= {**measured, "milliseconds": entry.milliseconds, "tflops": entry.tflops}
    counts = {"candidates": outcome.candidates, "tried": outcome.tried, "not_reached": outcome.not_reached}
    return {**data, **counts, "skipped": dict(outcome.skipped), "seconds": outcome.seconds, "why": outcome.why}
