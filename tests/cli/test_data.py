"""`moegraph data prepare` and `data show`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Moegraph


@pytest.fixture
def text(here: Path) -> Path:
    folder = here / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"def f{number}(x): return x + {number}\n" * 8, encoding="utf-8")
    return folder


def test_text_becomes_tokens_and_show_says_what_there_is(text: Path, moegraph: Moegraph) -> None:
    line = ("data", "prepare", text, "-o", "tokens", "--vocab-size", "300", "--validation-fraction", "0.2")
    done = moegraph(*line)
    assert done.status == 0, done.err
    assert "prepared\n" in done.out
    assert "encoding" in done.err
    shown = moegraph("data", "show", "tokens", "--verify", "--json").json
    assert shown["splits"]["train"]["documents"] + shown["splits"]["validation"]["documents"] == 40
    assert shown["tokenizer"]["vocab_size"] == 300
    assert shown["fingerprint"] in moegraph("data", "show", "tokens").out
    again = moegraph(*line, "--json")
    assert again.json["already"] is True
    assert again.json["fingerprint"] == shown["fingerprint"]


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("prepare", 2, "either inputs"),
        ("prepare text", 2, "output folder"),
        ("prepare absent -o tokens", 2, "absent"),
        ("prepare --corpus nothing -o tokens", 2, "python-stdlib"),
        ("prepare text -o tokens --validation-fraction 2", 2, "validation_fraction"),
        ("show text", 1, "moegraph data prepare"),
    ],
)
def test_a_wrong_call_is_a_sentence(text: Path, moegraph: Moegraph, line: str, status: int | None, says: str) -> None:
    done = moegraph("data", *line.split())
    assert done.status == status or (status is None and done.status in (1, 2))
    assert says in done.err
    assert sorted(path.name for path in text.parent.iterdir()) == ["text"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_behind(text: Path, number: int, status: int) -> None:
    (text / "large.txt").write_text(
        "".join(f"x{i} = y{i * 7 % 1000} + {i}\n" for i in range(600_000)), encoding="utf-8"
    )
    command = [sys.executable, "-m", "moegraph", "data", "prepare", "text", "-o", "tokens", "--vocab-size", "300"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=text.parent
    ) as process:
        until = time.monotonic() + 30
        while not list(text.parent.glob(".tokens.partial-*")) and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert out == ""
    assert "Traceback" not in err
    assert [path.name for path in text.parent.iterdir()] == ["text"]
