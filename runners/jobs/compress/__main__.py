"""Run one compression attempt."""

from runners.jobs.compress.job import work
from runners.jobs.runtime import run_job

if __name__ == "__main__":
    run_job("compress", work)
