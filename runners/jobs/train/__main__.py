"""Run one training attempt."""

from runners.jobs.runtime import run_job
from runners.jobs.train.job import work

if __name__ == "__main__":
    run_job("train", work)
