"""Which problems share a configuration: shape classes of grouped products.

A product has R rows over E experts, n output columns and a contraction over k (for `wgrad`, whose contraction is the
rows, dW is [E, n, k]; for `up_swiglu` n counts columns of the activation, of which each costs two). Its shape class
keeps n and k and forgets the number of tokens: of R / E only the power of two it falls under counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Forward and input gradient of a product run on one kernel, but read their weights in different orders.
KERNELS = ("up_swiglu", "grouped_mm", "dgrad_swiglu", "grouped_mm_dgrad", "wgrad")
TORCH_HAS = ("grouped_mm", "grouped_mm_dgrad", "wgrad")  # what torch._grouped_mm computes too
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ROWS_PER_EXPERT = (64, 128, 256, 512, 1024, 2048)  # 2048 stands for all above 1024


def rows_class(rows: int, experts: int) -> int:
    """The class of the mean rows per expert: the least of ROWS_PER_EXPERT that is not below it, or the last."""
    return next((most for most in ROWS_PER_EXPERT if rows <= most * experts), ROWS_PER_EXPERT[-1])


@dataclass(frozen=True)
class ShapeClass:
    """A kernel, its dtype, n and k, and the class of its rows per expert: what a configuration is chosen for."""

    kernel: str
    dtype: torch.dtype
    n: int
    k: int
    rows_per_expert: int

    @property
    def rows_text(self) -> str:
        """`≤ 512`, or `> 1024` for the last class."""
        last = self.rows_per_expert == ROWS_PER_EXPERT[-1]
        return f"> {ROWS_PER_EXPERT[-2]}" if last else f"≤ {self.rows_per_expert}"

    @property
    def dtype_name(self) -> str:
        """`bf16`, or torch's own name where moegraph has none."""
        return DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))

    def to_json(self) -> dict[str, str | int]:
        """As JSON-able data, as a tuning table has it."""
        names = {"kernel": self.kernel, "dtype": self.dtype_name}
        return {**names, "n": self.n, "k": self.k, "rows_per_expert": self.rows_per_expert}

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype_name} n {self.n} k {self.k}, {self.rows_text} rows per expert"


@dataclass(frozen=True)
class Problem:
    """One grouped product at its exact size. `tokens` is how many tokens the rows are gathered from (`up_swiglu`)."""

    kernel: str
    dtype: torch.dtype
    n: int
    k: int
    rows: int
    experts: int
    tokens: int = 0

    @property
    def shape(self) -> ShapeClass:
        """The class it falls in."""
        return ShapeClass(self.kernel, self.dtype, self.n, self.k, rows_class(self.rows, self.experts))

    @property
    def operations(self) -> int:
        """Floating-point operations, a multiply and an add being two."""
        return 2 * self.rows * self.n * self.k * (2 if self.kernel == "up_swiglu" else 1)


def block_problems(
    *, tokens: int, d_model: int, d_ff: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Problem]:
    """The products of one mixture-of-experts block by name: first those of the fused experts, then the two that take
    their place where the experts are separate operators (`up`, `down_dgrad`)."""
    rows = tokens * top_k
    dgrad = "grouped_mm_dgrad" if dtype.itemsize > 1 else "grouped_mm"  # FP8: with a weight quantised along N

    def problem(kernel: str, n: int, k: int) -> Problem:
        return Problem(kernel, dtype, n, k, rows, num_experts, tokens if kernel == "up_swiglu" else 0)

    return {
        "up_swiglu": problem("up_swiglu", d_ff, d_model),
        "down": problem("grouped_mm", d_model, d_ff),
        "dgrad_swiglu": problem("dgrad_swiglu", d_ff, d_model),
        "up_dgrad": problem(dgrad, d_model, 2 * d_ff),
        "up_wgrad": problem("wgrad", 2 * d_ff, d_model),
        "down_wgrad": problem("wgrad", d_model, d_ff),
        "up": problem("grouped_mm", 2 * d_ff, d_model),
        "down_dgrad": problem(dgrad, d_ff, d_model),
    }
