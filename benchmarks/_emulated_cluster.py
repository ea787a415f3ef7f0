"""Lets the benchmarks import tools/emulated_cluster.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from emulated_cluster import Cables, ClusterUnavailable, EmulatedCluster

__all__ = ["Cables", "ClusterUnavailable", "EmulatedCluster"]
