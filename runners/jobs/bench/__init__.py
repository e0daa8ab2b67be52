"""Benchmarks of jobs, and the rates of a device."""
