"""What every test can use: golden files, refreshed by `pytest --update-golden`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is imported, here and in every process that a test starts: threads that wait sleep. By default they spin,
# and small tests take two to twenty times as long when another process wants a core. The numbers are the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # several tests run at once: a thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure() -> None:
    """A shell that starts the tests in the background makes them ignore SIGINT, and with them every process they start.
    Tests of Ctrl-C need what a terminal gives."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` asserts that `text` is what tests/golden/NAME holds."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} differs; if it should, run pytest --update-golden"

    return check
