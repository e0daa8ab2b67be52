"""Start one generation attempt: ``python -m runners.jobs.generate ATTEMPT_DIR``."""

from runners.jobs.generate.job import work
from runners.jobs.runtime import run_job

if __name__ == "__main__":
    run_job("generate", work)
