"""What a run says while it trains: a moving line on a terminal, plain lines everywhere else.

    step 10/300  loss 7.123  grad_norm 0.912  lr 2.9e-03  tokens/s 21,340  TFLOP/s 0.52  MFU 41.0 %  memory 1.2 GiB

Every field has its name and unit; a field that is not in the record is not shown. Lines come every `log_every` steps,
and for each record that has a validation loss, and for the last step. On a terminal the line moves in place, and what
has a validation loss stays. Colour and movement are left out when the stream is not a terminal, when the terminal
cannot move its cursor, or when NO_COLOR is set (no-color.org).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


def _memory(value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


# (key of the record, name shown, how the value is written)
FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("validation_loss", "validation loss", lambda value: f"{value:.4f}"),
    ("grad_norm", "grad_norm", lambda value: f"{value:.3g}"),
    ("lr", "lr", lambda value: f"{value:.2e}"),
    ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
    ("tflops", "TFLOP/s", lambda value: f"{value:.3g}" if value < 100 else f"{value:.0f}"),
    ("mfu", "MFU", lambda value: f"{100 * value:.1f} %"),
    ("memory_bytes", "memory", _memory),
)


def format_record(record: Mapping[str, Any], steps: int) -> str:
    """One record as one plain line. Keys: step, loss and validation_loss (nats per token), grad_norm, lr,
    tokens_per_second, tflops (10¹² per second and device), mfu (fraction), memory_bytes (peak), router (per layer, of
    which the worst is shown), skipped_steps (so far)."""
    parts = [f"step {record['step']}/{steps}"]
    for key, name, write in FIELDS:
        value = record.get(key)
        if value is not None:
            parts.append(f"{name} {write(value)}")
    if record.get("skipped_steps"):
        parts.append(f"skipped {record['skipped_steps']}")
    return "  ".join(parts + _routing(record.get("router") or {}))


def _routing(router: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The worst of the layers: highest and lowest load over the mean, and experts that no token chose."""
    layers = list(router.values())
    if not layers:
        return []
    dead = sum(layer["dead_experts"] for layer in layers)
    most, least = max(layer["load_max"] for layer in layers), min(layer["load_min"] for layer in layers)
    return [f"load max/mean {most:.2f}  min/mean {least:.2f}"] + ([f"dead experts {dead}"] if dead else [])


def is_interactive(stream: IO[str]) -> bool:
    """Whether a moving line may be drawn on this stream."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") not in ("dumb", "unknown")


class Progress:
    """Shows the records of a run of `steps` steps. Use it as a context manager, so that the terminal is left clean."""

    def __init__(self, steps: int, log_every: int = 1, stream: IO[str] | None = None, first_step: int = 0) -> None:
        self.steps, self.log_every = steps, log_every
        self.stream = stream or sys.stdout
        self._first_step = first_step
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        if is_interactive(self.stream):
            self._bar = _bar(self.stream)
            self._bar.add_task("train", total=self.steps, completed=self._first_step, line="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, record: Mapping[str, Any]) -> None:
        """Shows a record, if it is one of those that are shown."""
        step = record["step"]
        stays = record.get("validation_loss") is not None or step == self.steps
        due = stays or step % self.log_every == 0
        if self._bar is None:
            if due:
                self.note(format_record(record, self.steps))
            return
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=step)
        if due:
            self._bar.update(task, line=format_record(record, self.steps))
        if stays:
            self.note(format_record(record, self.steps))

    def note(self, text: str) -> None:
        """Prints a line that stays, above the moving one."""
        if self._bar is None:
            print(text, file=self.stream, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bar(stream: IO[str]) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    left = TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True))
    line = TextColumn("left  {task.fields[line]}", markup=False, table_column=Column(no_wrap=False))
    columns = (BarColumn(bar_width=10, table_column=Column(min_width=10)), left, line)
    return Progress(*columns, console=Console(file=stream), refresh_per_second=5, transient=True)
