"""Start one endpoint: ``python -m runners.jobs.serve.sglang ATTEMPT_DIR``."""

from runners.jobs.runtime import run_job
from runners.jobs.serve.relayed.backend import prepare, serve_with
from runners.jobs.serve.sglang.adapter import Sglang

if __name__ == "__main__":
    run_job("serve", serve_with(Sglang()), prepare)
