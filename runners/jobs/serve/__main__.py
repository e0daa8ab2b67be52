"""Start one endpoint: ``python -m runners.jobs.serve ATTEMPT_DIR``."""

from runners.jobs.runtime import run_job
from runners.jobs.serve.own_backend import work

if __name__ == "__main__":
    run_job("serve", work)
