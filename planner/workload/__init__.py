"""Workload costs: prefill, decode steps, training steps and compression jobs."""
