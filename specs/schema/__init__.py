"""The typed vocabulary of a spec (pydantic 2)."""

from moegraph.specs.schema.model import Attention, Dense, Model, Norm, Rope, Window
from moegraph.specs.schema.moe import Balance, Moe, Router, RouterGroups, RouterNorm, SharedExperts
from moegraph.specs.schema.run import (
    AdamW,
    Checkpoint,
    Constant,
    Cosine,
    Data,
    Layout,
    ParameterGroup,
    Passes,
    Precision,
    RecomputeOptions,
    Train,
    UserPassOptions,
    Validation,
    Wsd,
)
from moegraph.specs.schema.spec import Spec

__all__ = [
    "AdamW",
    "Attention",
    "Balance",
    "Checkpoint",
    "Constant",
    "Cosine",
    "Data",
    "Dense",
    "Layout",
    "Model",
    "Moe",
    "Norm",
    "ParameterGroup",
    "Passes",
    "Precision",
    "RecomputeOptions",
    "Rope",
    "Router",
    "RouterGroups",
    "RouterNorm",
    "SharedExperts",
    "Spec",
    "Train",
    "UserPassOptions",
    "Validation",
    "Window",
    "Wsd",
]
