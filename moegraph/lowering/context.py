"""What every part of a lowering needs: the builder, the sizes and dtypes, and how parameters are declared.

Legend: T tokens of a micro-batch, B sequences, S sequence length, D model width, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from moegraph import ops
from moegraph.graph.build import GraphBuilder
from moegraph.graph.program import Parameter
from moegraph.specs.schema import Spec

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(spec: Spec) -> torch.dtype:
    """The dtype of activations and matrix products."""
    return COMPUTE_DTYPES[spec.precision.compute]


def high_dtype(spec: Spec) -> torch.dtype:
    """The dtype of router, losses and master weights: fp32, or fp64 when compute is fp64."""
    return torch.float64 if spec.precision.compute == "fp64" else torch.float32


@dataclass
class Lowering:
    """One block being lowered."""

    spec: Spec
    builder: GraphBuilder

    @property
    def sequences(self) -> int:
        """B: sequences of one micro-batch."""
        return self.spec.sequences_per_microbatch

    @property
    def seq_len(self) -> int:
        """S: tokens of one sequence."""
        return self.spec.data.seq_len

    @property
    def tokens(self) -> int:
        """T = B · S: tokens of one micro-batch."""
        return self.sequences * self.seq_len

    def weight(
        self,
        name: str,
        *shape: int,
        role: Literal["matrix", "embedding", "router", "expert"] = "matrix",
        into_residual: bool = False,
    ) -> fx.Node:
        """A normally initialised weight; those that write into the residual stream may start smaller by depth."""
        init = self.spec.model.init
        std = init.std / math.sqrt(2 * self.spec.model.num_layers) if into_residual and init.scale_depth else init.std
        dtype = high_dtype(self.spec) if role == "router" else compute_dtype(self.spec)
        return self.builder.parameter(Parameter(name, shape, role, "normal", std, dtype=dtype))

    def bias(self, name: str, size: int, *, router: bool = False) -> fx.Node:
        """A bias that starts at zero."""
        dtype = high_dtype(self.spec) if router else compute_dtype(self.spec)
        return self.builder.parameter(Parameter(name, (size,), "bias", "zeros", dtype=dtype))

    def expert_bias(self, name: str, num_experts: int, size: int) -> fx.Node:
        """A bias for each expert that starts at zero."""
        dtype = compute_dtype(self.spec)
        return self.builder.parameter(Parameter(name, (num_experts, size), "expert_bias", "zeros", dtype=dtype))

    def norm(self, name: str, x: fx.Node, width: int) -> fx.Node:
        """RMS norm over the last axis with a learned scale."""
        dtype = compute_dtype(self.spec)
        scale = self.builder.parameter(Parameter(f"{name}.weight", (width,), "norm", "ones", dtype=dtype))
        return self.builder.call(name, ops.rms_norm, x, scale, self.spec.model.norm.eps)
