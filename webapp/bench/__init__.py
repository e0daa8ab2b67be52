"""Benchmarks of ``manage.py bench``."""
