"""Every kernel in Triton's interpreter, against plain torch, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_every_kernel_is_right_in_the_interpreter() -> None:
    """A process of its own: Triton decides when a kernel is defined whether it is interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert int(counted.group(1)) > 30
    assert "skipped" not in done.stdout
