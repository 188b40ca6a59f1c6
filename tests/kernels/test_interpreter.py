"""Every kernel in Triton's interpreter, against plain torch, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))
SCALED = [name for name in FILES if name in ("test_fp8.py", "test_fp8_blocks.py", "test_mx.py")]
OTHERS = [name for name in FILES if name not in SCALED]


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("files", [OTHERS, SCALED], ids=["bf16 and routing", "scaled"])
def test_every_kernel_is_right_in_the_interpreter(files: list[str], which: str) -> None:
    """A process of its own: Triton decides when a kernel is defined whether it is interpreted."""
    paths = [str(HERE / "interpreted" / name) for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *paths],
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
