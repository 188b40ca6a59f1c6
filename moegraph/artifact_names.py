"""How the files of a compiled directory are called (`moegraph.artifact`). Apart, so that naming one needs no torch."""

from __future__ import annotations

SPEC_NAME = "spec.yaml"
REPORT_NAME = "report.json"
GRAPH_NAME = "graph.json"
PASSES_NAME = "passes"
