"""An endpoint job whose child is llama.cpp's server, through all that vLLM's goes through.

Only the argv and the names of the figures are llama.cpp's.
"""

import os

from runners.jobs.runtime import run_job
from runners.jobs.serve.relayed.backend import EngineAdapter, ModelPaths, prepare, serve_with
from runners.jobs.serve.relayed.process import Command, ListenAddress, MetricNames
from runners.jobspec import ServeSpec


class Llama(EngineAdapter):
    """llama.cpp's own server; the GGUF file and the interpreter come with the environment."""

    title = "llama.cpp's server"
    names = MetricNames.with_prefix(
        "llamacpp", "requests_processing", "requests_deferred", "kv_cache_usage_ratio",
        "prompt_tokens_total", "tokens_predicted_total",
    )  # fmt: skip

    def command(self, spec: ServeSpec, placed: ModelPaths, door: ListenAddress) -> Command:
        """Return how it is started."""
        assert (placed.model / "config.json").read_bytes()
        argv = [os.environ["LLAMA_PYTHON"], "-m", "tests.system.jobs.serve.llama_server"]
        limits = [str(spec.max_concurrency), str(spec.max_length)]
        rest = [os.environ["LLAMA_FILE"], str(door.port), *limits, spec.served_name]
        return Command([*argv, *rest], {"LLAMA_KEY": door.key})


if __name__ == "__main__":
    run_job("serve", serve_with(Llama()), prepare)
