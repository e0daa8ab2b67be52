"""Batch generation for a set of prompts: ``python -m runners.jobs.generate ATTEMPT_DIR``."""
