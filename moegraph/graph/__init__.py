"""The graph as data: programs of blocks, canonical text, diffs and hashes."""

from moegraph.graph.program import Instance, Parameter, Port, Program, Unit, ports, results

__all__ = ["Instance", "Parameter", "Port", "Program", "Unit", "ports", "results"]
