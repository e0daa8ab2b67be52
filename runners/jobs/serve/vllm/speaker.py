"""A spec in vLLM's words, and what it calls its figures.

Sources: vLLM 0.33.0 (PyPI wheel): ``vllm/engine/arg_utils.py`` and
``vllm/entrypoints/common/cli_args.py`` for the arguments, ``vllm/v1/metrics/loggers.py`` for the
figures, ``vllm/entrypoints/serve/instrumentator/health.py`` for ``/health`` (200, or 503 once its
engine is dead), ``vllm/entrypoints/serve/middleware/`` for ``VLLM_API_KEY``.
"""

import json
import sys
from itertools import chain
from pathlib import Path

from runners.endpoint_spec import LOOPBACK
from runners.jobs.model_files import read_config
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.relayed.backend import Placed, Speaker
from runners.jobs.serve.relayed.folders import dtype_flags, loaded_format, template_flags
from runners.jobs.serve.relayed.process import Command, Door
from runners.jobs.serve.relayed.scrape import MetricNames
from runners.jobspec import ServeSpec
from runners.jobspec.engine import EngineOptions

# Formats that it makes of plain weights as it loads them; our int4 is nf4, which it has not.
LOADED_AS = {"fp8": "fp8", "int8": "int8_per_channel_weight_only"}
# What config.json calls formats that it reads (QUANTIZATION_METHODS and their older names).
STORED = frozenset({
    "awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors", "torchao", "modelopt",
    "modelopt_fp4", "mxfp4", "quark", "inc", "auto-round",
})  # fmt: skip
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks
DRAIN_SECONDS = 10  # for open answers once it is told to end; our own stop takes less
# Nothing is fetched and nobody is told; what it compiled is kept below the user's cache.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
}


class Vllm(Speaker):
    """vLLM's own HTTP server."""

    title = "vLLM"
    names = MetricNames.below(
        "vllm", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds",
        "inter_token_latency_seconds",  # a value a token, as our charts have it
    )  # fmt: skip

    def command(self, spec: ServeSpec, placed: Placed, door: Door) -> Command:
        """Return how it is started: its key in the environment, where no list of processes has it.

        Raises:
            BadInputError: it does not serve this, by the field.
        """
        argv = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        return Command(
            [*argv, *arguments(spec, placed, door.port)], {**QUIET, "VLLM_API_KEY": door.key}
        )


def arguments(spec: ServeSpec, placed: Placed, port: int) -> list[str]:
    """Return the words after ``vllm``.

    Raises:
        BadInputError: it does not serve this, by the field.
    """
    options = spec.engine_options or EngineOptions()
    return [
        *("serve", str(placed.model), "--host", LOOPBACK, "--port", str(port)),
        *("--served-model-name", spec.served_name, "--seed", str(spec.seed)),
        *("--generation-config", "vllm"),  # OpenAI's defaults, as our own engine has them
        *("--shutdown-timeout", str(DRAIN_SECONDS), "--disable-uvicorn-access-log"),
        *_formats(spec, placed, options),
        *_limits(spec, options),
        *_layout(options),
        *_adapters(spec, placed),
        *_draft(options, placed.draft),
        *template_flags(placed.model),
    ]


def _formats(spec: ServeSpec, placed: Placed, options: EngineOptions) -> list[str]:
    made = loaded_format(Vllm.title, placed.config, spec.weight_dtype, STORED, LOADED_AS)
    return [*dtype_flags(spec.weight_dtype), *made, "--kv-cache-dtype", options.kv_cache_dtype]


def _limits(spec: ServeSpec, options: EngineOptions) -> list[str]:
    step = max(spec.max_batch_tokens, spec.max_concurrency)  # it asks for one token of each
    if options.has_chunked_prefill is False:
        step = max(step, spec.max_length or 0)  # a prompt is read whole
    flags = ["--max-num-seqs", str(spec.max_concurrency), "--max-num-batched-tokens", str(step)]
    if spec.max_length:
        flags += ["--max-model-len", str(spec.max_length)]
    if options.memory_ratio is not None:
        flags += ["--gpu-memory-utilization", f"{options.memory_ratio:g}"]
    for name, wanted in (
        ("enable-chunked-prefill", options.has_chunked_prefill),
        ("enable-prefix-caching", options.has_prefix_cache),
    ):
        if wanted is not None:
            flags.append(f"--{'' if wanted else 'no-'}{name}")
    return flags


def _layout(options: EngineOptions) -> list[str]:
    sizes = {
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--data-parallel-size": options.data_parallel_size,
    }
    flags = chain.from_iterable((name, str(size)) for name, size in sizes.items() if size > 1)
    return [*flags, *(["--enable-expert-parallel"] if options.has_expert_parallel else [])]


def _adapters(spec: ServeSpec, placed: Placed) -> list[str]:
    if not placed.adapters:
        return []
    rank = max(_rank(name, folder) for name, folder in placed.adapters.items())
    together = str(min(len(placed.adapters), spec.max_concurrency))
    modules = [
        json.dumps({"name": name, "path": str(folder), "base_model_name": spec.served_name})
        for name, folder in placed.adapters.items()
    ]
    flags = ["--enable-lora", "--max-loras", together, "--max-cpu-loras", str(len(modules))]
    return [*flags, "--max-lora-rank", str(rank), "--lora-modules", *modules]


def _rank(name: str, folder: Path) -> int:
    """Return the least of vLLM's ranks that an adapter fits into."""
    found = read_config(folder / "adapter_config.json").get("r")
    fitting = [each for each in LORA_RANKS if isinstance(found, int) and 0 < found <= each]
    if not fitting:
        msg = f"adapter {name}: its rank r is {str(found)[:40]}; vLLM takes 1 to {LORA_RANKS[-1]}"
        raise BadInputError(msg)
    return fitting[0]


def _draft(options: EngineOptions, folder: Path | None) -> list[str]:
    if options.draft is None or folder is None:
        return []
    setting = {"method": "draft_model", "model": str(folder)}
    tokens = {"num_speculative_tokens": options.draft.tokens}
    return ["--speculative-config", json.dumps({**setting, **tokens})]
