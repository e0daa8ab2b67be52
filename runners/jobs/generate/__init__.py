"""Answer a pile of prompts: ``python -m runners.jobs.generate ATTEMPT_DIR``."""
