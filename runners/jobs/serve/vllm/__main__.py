"""Start one endpoint: ``python -m runners.jobs.serve.vllm ATTEMPT_DIR``."""

from runners.jobs.runtime import run_job
from runners.jobs.serve.relayed.backend import prepare, serve_with
from runners.jobs.serve.vllm.adapter import Vllm

if __name__ == "__main__":
    run_job("serve", serve_with(Vllm()), prepare)
