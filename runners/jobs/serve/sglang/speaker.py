"""A spec in SGLang's words, and what it calls its figures.

Sources: SGLang 0.5.23 (PyPI wheel): ``sglang/srt/arg_groups/fields`` for the arguments,
``sglang/srt/observability/metrics_collector.py`` for the figures, its HTTP server for
``/health`` (200 once it wrote a token, 503 before) and ``/v1/models``, and
``sglang/srt/entrypoints/openai/serving_base.py`` for how an adapter is asked for.
"""

import json
import sys

from runners.endpoint_spec import LOOPBACK
from runners.jobs.serve.relayed.backend import Placed, Speaker
from runners.jobs.serve.relayed.folders import dtype_flags, loaded_format, template_flags
from runners.jobs.serve.relayed.process import Command, Door
from runners.jobs.serve.relayed.scrape import MetricNames
from runners.jobs.serve.sglang.server import KEY
from runners.jobspec import ServeSpec
from runners.jobspec.engine import EngineOptions

LOADED_AS = {"fp8": "fp8"}  # it makes no other format of plain weights as it loads them
# What config.json calls formats that it reads (QUANTIZATION_CHOICES that a folder can name).
STORED = frozenset({
    "awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "modelopt", "modelopt_fp4",
    "mxfp4", "quark", "auto-round", "w8a8_int8", "w8a8_fp8",
})  # fmt: skip
# Its share is of weights and cache alone; activations and captured graphs take the rest.
MOST_STATIC_RATIO = 0.88
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # nothing is fetched


class Sglang(Speaker):
    """SGLang's own HTTP server."""

    title = "SGLang"
    names = MetricNames.below(
        "sglang", "num_running_reqs", "num_queue_reqs", "token_usage", "prompt_tokens_total",
        "generation_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    )  # fmt: skip

    def command(self, spec: ServeSpec, placed: Placed, door: Door) -> Command:
        """Return how it is started: its key in the environment, where no list of processes has it.

        Raises:
            BadInputError: it does not serve this, by the field.
        """
        argv = [sys.executable, "-m", "runners.jobs.serve.sglang.server"]
        return Command([*argv, *arguments(spec, placed, door.port)], {**QUIET, KEY: door.key})

    def called(self, spec: ServeSpec, name: str) -> str:
        """Return ``base:adapter`` for an adapter: a bare name would be answered by the base."""
        return name if name == spec.served_name else f"{spec.served_name}:{name}"


def arguments(spec: ServeSpec, placed: Placed, port: int) -> list[str]:
    """Return the words after ``sglang.launch_server``.

    Raises:
        BadInputError: it does not serve this, by the field.
    """
    options = spec.engine_options or EngineOptions()
    return [
        *("--model-path", str(placed.model), "--host", LOOPBACK, "--port", str(port)),
        *("--served-model-name", spec.served_name, "--random-seed", str(spec.seed)),
        *("--sampling-defaults", "openai", "--enable-metrics"),
        *dtype_flags(spec.weight_dtype),
        *loaded_format(Sglang.title, placed.config, spec.weight_dtype, STORED, LOADED_AS),
        *("--kv-cache-dtype", "fp8_e4m3" if options.kv_cache_dtype == "fp8" else "auto"),
        *_limits(spec, options),
        *_layout(options),
        *_adapters(spec, placed),
        *_draft(options, placed),
        *template_flags(placed.model),
    ]


def _limits(spec: ServeSpec, options: EngineOptions) -> list[str]:
    whole = options.has_chunked_prefill is False
    step = -1 if whole else max(spec.max_batch_tokens, spec.max_concurrency)
    flags = ["--max-running-requests", str(spec.max_concurrency)]
    flags += ["--chunked-prefill-size", str(step)]
    if spec.max_length:
        flags += ["--context-length", str(spec.max_length)]
    if options.memory_ratio is not None:
        static = min(options.memory_ratio, MOST_STATIC_RATIO)
        flags += ["--mem-fraction-static", f"{static:g}"]
    return [*flags, *(["--disable-radix-cache"] if options.has_prefix_cache is False else [])]


def _layout(options: EngineOptions) -> list[str]:
    """Return the parallel sizes; whole experts of replicas share their tensor ranks."""
    tensor, replicas = options.tensor_parallel_size, options.data_parallel_size
    sizes = {"--tp-size": tensor, "--dp-size": replicas}
    if options.has_expert_parallel:
        ranks = tensor * replicas
        sizes = {"--tp-size": ranks, "--attn-dp-size": replicas, "--ep-size": ranks}
    sizes["--pp-size"] = options.pipeline_parallel_size
    return [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]


def _adapters(spec: ServeSpec, placed: Placed) -> list[str]:
    if not placed.adapters:
        return []
    together = str(min(len(placed.adapters), spec.max_concurrency) + 1)  # and the base's own
    paths = [
        json.dumps({"lora_name": name, "lora_path": str(folder)})
        for name, folder in placed.adapters.items()
    ]
    return ["--enable-lora", "--max-loras-per-batch", together, "--lora-paths", *paths]


def _draft(options: EngineOptions, placed: Placed) -> list[str]:
    if options.draft is None or placed.draft is None:
        return []
    tokens = options.draft.tokens
    return [
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", str(placed.draft)),
        *("--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(tokens + 1)),
    ]
