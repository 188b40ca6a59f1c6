"""Rewrites of graphs, one per file, the registry that knows them and the pipeline that runs them.

`registry` lists them; importing this package registers the built-in ones in the order they run.
"""

from moegraph.passes.contract import Pass, PassContext, PassResult
from moegraph.passes.registry import registry

from moegraph.passes import (  # isort: skip
    canonicalize,
    balance_losses,
    chunk_experts,
    dispatch_experts,
    fuse_experts,
    split_pipeline,
    cast_mxfp8,
    cast_fp8,
    save_mxfp8,
    cast_dispatch,
    fold_casts,
    recompute,
    fold_decodes,
    overlap_communication,
    accumulate_gradients,
    split_backward,
    prepare_weights,
)

__all__ = [
    "Pass",
    "PassContext",
    "PassResult",
    "accumulate_gradients",
    "balance_losses",
    "canonicalize",
    "cast_dispatch",
    "cast_fp8",
    "cast_mxfp8",
    "chunk_experts",
    "dispatch_experts",
    "fold_casts",
    "fold_decodes",
    "fuse_experts",
    "overlap_communication",
    "prepare_weights",
    "recompute",
    "registry",
    "save_mxfp8",
    "split_backward",
    "split_pipeline",
]
