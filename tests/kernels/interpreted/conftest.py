"""These tests run only under TRITON_INTERPRET=1, which `tests/kernels/test_interpreter.py` sets for a process of its
own: Triton reads it when a kernel is defined."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
