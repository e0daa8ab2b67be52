"""Start one endpoint: ``python -m runners.jobs.serve.llamacpp ATTEMPT_DIR``."""

from runners.jobs.runtime import run_job
from runners.jobs.serve.llamacpp.backend import prepare, work

if __name__ == "__main__":
    run_job("serve", work, prepare)
