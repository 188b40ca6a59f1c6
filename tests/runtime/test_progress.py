"""What is printed while training."""

from __future__ import annotations

import io
from typing import Any

import pytest

from moegraph.runtime.progress import Progress, format_record, is_interactive

RECORD: dict[str, Any] = {
    "step": 10,
    "loss": 7.12345,
    "validation_loss": 6.5,
    "grad_norm": 0.9123,
    "lr": 2.9e-3,
    "tokens_per_second": 21340.4,
    "tflops": 0.5213,
    "mfu": 0.41,
    "memory_bytes": 1.25 * 2**30,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_every_field_has_its_name_and_unit() -> None:
    assert format_record(RECORD, 300) == (
        "step 10/300  loss 7.1235  validation loss 6.5000  grad_norm 0.912  lr 2.90e-03  tokens/s 21,340  "
        "TFLOP/s 0.521  MFU 41.0 %  memory 1.2 GiB"
    )


def test_fields_that_are_not_known_are_not_shown() -> None:
    assert format_record({"step": 1, "loss": 7.0, "mfu": None}, 5) == "step 1/5  loss 7.0000"


def test_large_and_small_values_stay_readable() -> None:
    line = format_record({"step": 1, "tflops": 466.2, "memory_bytes": 300 * 2**20, "grad_norm": float("nan")}, 5)
    assert line == "step 1/5  grad_norm nan  TFLOP/s 466  memory 300 MiB"


def _lines(progress: Progress, stream: io.StringIO, steps: range, **extra: dict[int, float]) -> list[str]:
    with progress:
        for step in steps:
            values = {key: by_step[step] for key, by_step in extra.items() if step in by_step}
            progress.show({"step": step, "loss": 1.0, **values})
    return stream.getvalue().splitlines()


def test_plain_lines_come_every_log_every_steps_and_at_the_end() -> None:
    stream = io.StringIO()
    lines = _lines(Progress(25, 10, stream), stream, range(1, 26))
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]


def test_a_validation_is_always_shown() -> None:
    stream = io.StringIO()
    lines = _lines(Progress(25, 10, stream), stream, range(0, 6), validation_loss={0: 8.3, 5: 7.0})
    assert lines == ["step 0/25  loss 1.0000  validation loss 8.3000", "step 5/25  loss 1.0000  validation loss 7.0000"]


def test_plain_lines_have_no_control_characters() -> None:
    stream = io.StringIO()
    progress = Progress(3, 1, stream)
    with progress:
        progress.show({**RECORD, "step": 3})
        progress.note("results lie in runs/tiny")
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().endswith("results lie in runs/tiny\n")


def test_a_terminal_gets_a_moving_line_and_keeps_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with Progress(2, 1, stream) as progress:
        progress.show({"step": 1, "loss": 5.25})
        progress.show({"step": 2, "loss": 4.5, "validation_loss": 4.75})
    assert "\x1b[" in stream.getvalue()
    assert "loss 4.5000  validation loss 4.7500" in stream.getvalue()


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colour_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_interactive(Terminal())
    monkeypatch.setenv(variable, value)
    stream = Terminal()
    assert not is_interactive(stream)
    assert _lines(Progress(1, 1, stream), stream, range(1, 2)) == ["step 1/1  loss 1.0000"]
    assert "\x1b" not in stream.getvalue()


def test_a_failing_run_leaves_the_terminal_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(2, 1, stream) as progress:
        _interrupted(progress)
    hidden, shown = stream.getvalue().rfind("\x1b[?25l"), stream.getvalue().rfind("\x1b[?25h")
    assert shown > hidden >= 0


def _interrupted(progress: Progress) -> None:
    progress.show({"step": 1, "loss": 5.25})
    raise KeyboardInterrupt


def test_the_worst_layers_load_and_dead_experts_are_on_the_line() -> None:
    calm = {"load_max": 1.1, "load_min": 0.9, "dead_experts": 0}
    skewed = {"load_max": 3.25, "load_min": 0.0, "dead_experts": 2}
    line = format_record({"step": 5, "loss": 2.0, "router": {"layers.1": calm, "layers.2": skewed}}, 10)
    assert line.endswith("load max/mean 3.25  min/mean 0.00  dead experts 2")
    assert "dead" not in format_record({"step": 5, "router": {"layers.1": calm}}, 10)
