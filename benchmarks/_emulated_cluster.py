"""tools/emulated_cluster.py, which tests and examples use too, under a name that the programs of this folder import."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from emulated_cluster import Cables, ClusterUnavailable, EmulatedCluster

__all__ = ["Cables", "ClusterUnavailable", "EmulatedCluster"]
