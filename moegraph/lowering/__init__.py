"""From a spec to layer graphs."""

from moegraph.lowering.lower import lower

__all__ = ["lower"]
