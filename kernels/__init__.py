"""Triton kernels, one per file, each with its plain-torch reference in `moegraph.ops`."""
