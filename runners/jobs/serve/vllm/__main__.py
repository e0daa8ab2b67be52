"""Start one endpoint: ``python -m runners.jobs.serve.vllm ATTEMPT_DIR``."""

from runners.jobs.runtime import run_job
from runners.jobs.serve.relayed.backend import prepare, work_of
from runners.jobs.serve.vllm.speaker import Vllm

if __name__ == "__main__":
    run_job("serve", work_of(Vllm()), prepare)
