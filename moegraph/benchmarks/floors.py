"""The least bytes a fused block must move, and the time that takes at a measured copy rate.

The design counted: six grouped products, each reading its operands from memory once and writing its result once, with
gather, SwiGLU, its derivative and the router weights inside them, and two sums over a token's K rows. With b bytes an
element, T tokens, D = d_model, F = d_ff, R = T·K rows and P = 3·E·D·F weights (of which only those of the experts that
have rows are read):

    forward    up projection     reads x (T·D) and 2/3 of P; writes z (2·R·F) and the activation (R·F)
               down projection   reads the activation and 1/3 of P; writes y (R·D)
               combine           reads y; writes out (T·D)
               = P + 2·T·D + 4·R·F + 2·R·D
    backward   dgrad of down     reads the gradient of out (T·D), 1/3 of P and z; writes dz (2·R·F) and the activation
                                 times the router weight (R·F)
               wgrad of down     reads the gradient of out (T·D) and that activation; writes 1/3 of P
               dgrad of up       reads dz and 2/3 of P; writes a gradient per row (R·D)
               sum               reads it; writes dx (T·D)
               wgrad of up       reads x (T·D) and dz; writes 2/3 of P
               = 2·P + 4·T·D + 10·R·F + 2·R·D

A token that is gathered K times counts once. Left out, below one percent: the router's logits, weights and indices.
"""

from __future__ import annotations

from moegraph.benchmarks.shapes import Shape


def forward_bytes(shape: Shape, element: int, experts_with_rows: float | None = None) -> float:
    """Bytes of the forward pass for elements of `element` bytes; experts without rows are not read."""
    return element * (_weights(shape, experts_with_rows) + 2 * _tokens(shape) + _rows(shape, 4))


def forward_backward_bytes(shape: Shape, element: int, experts_with_rows: float | None = None) -> float:
    """Bytes of forward and backward. The gradient of every expert's weights is written, rows or none."""
    written = _weights(shape, None)
    backward = _weights(shape, experts_with_rows) + written + 4 * _tokens(shape) + _rows(shape, 10)
    return forward_bytes(shape, element, experts_with_rows) + element * backward


def _weights(shape: Shape, experts: float | None) -> float:
    return 3 * (shape.experts if experts is None else experts) * shape.d_model * shape.d_ff


def _tokens(shape: Shape) -> int:
    return shape.tokens * shape.d_model


def _rows(shape: Shape, expert_widths: int) -> int:
    """`expert_widths` passes over [R, F], and the two over [R, D] around a sum."""
    return shape.rows * (expert_widths * shape.d_ff + 2 * shape.d_model)
