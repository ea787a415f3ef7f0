"""Watches a job from outside while it runs: metrics for Prometheus and an event log (docs/monitoring.md)."""
