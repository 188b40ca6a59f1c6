"""Shapes of one block with experts, and the named ones. Imports nothing heavy: the command line reads it first."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Shape:
    """One block with experts. `skew` is the standard deviation of a bias per expert added to the router's logits."""

    tokens: int
    d_model: int
    d_ff: int
    experts: int
    top_k: int
    skew: float = 0.0

    @property
    def rows(self) -> int:
        """Routed rows R = T·K."""
        return self.tokens * self.top_k

    @property
    def operations(self) -> int:
        """Operations of the forward pass, 6 · R · d_model · d_ff: the three matrix products and nothing else.

        Backward counts twice that, forward and backward 18 · R · d_model · d_ff; nothing recomputed counts.
        """
        return 6 * self.rows * self.d_model * self.d_ff

    @property
    def cfg(self) -> tuple[int, int, int, int, int, float]:
        """(T, d_model, d_ff, E, K, skew), as a peer's `setup` is given it."""
        return self.tokens, self.d_model, self.d_ff, self.experts, self.top_k, self.skew

    def to_json(self) -> dict[str, float]:
        """As JSON-able data."""
        return asdict(self)


PRESETS = {
    "A": Shape(32768, 2048, 1024, 128, 8),
    "C": Shape(32768, 4096, 1536, 64, 4),
    "D": Shape(32768, 2048, 768, 128, 8),
    "Q": Shape(32768, 4096, 1536, 128, 8),
    "wide": Shape(16384, 4096, 4096, 16, 4),
}
