"""The stages of a proof run, each in its own process: ``runners.jobs.prove.recorder``."""
