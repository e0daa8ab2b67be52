"""The stages of a validation, each in its own process: ``runners.jobs.prove.recorder``."""
