"""The spec: its schema, the strict loader and the shipped presets. Nothing here imports torch."""

from moegraph.specs.loader import ResolvedSpec, load_resolved, load_spec
from moegraph.specs.schema.spec import Spec

__all__ = ["ResolvedSpec", "Spec", "load_resolved", "load_spec"]
