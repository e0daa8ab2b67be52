"""The stages of a proof run, each in its own process: ``python -m runners.jobs.prove STAGE``."""
