"""Rewrites of graphs, one per file, the registry that knows them and the pipeline that runs them.

`registry` lists them; importing this package registers the built-in ones in the order they run.
"""

from moegraph.passes.contract import Pass, PassContext, PassResult
from moegraph.passes.registry import registry

from moegraph.passes import canonicalize, balance_losses, fuse_experts, recompute, split_backward  # isort: skip

__all__ = [
    "Pass",
    "PassContext",
    "PassResult",
    "balance_losses",
    "canonicalize",
    "fuse_experts",
    "recompute",
    "registry",
    "split_backward",
]
