"""SGLang's command line and metric names.

Sources: SGLang 0.5.23 (PyPI wheel): ``sglang/srt/arg_groups/fields`` for the arguments,
``sglang/srt/observability/metrics_collector.py`` for the figures, its HTTP server for
``/health`` (200 once it wrote a token, 503 before) and ``/v1/models``, and
``sglang/srt/entrypoints/openai/serving_base.py`` for the adapter syntax in requests.
"""

import json
import sys

from runners.jobs.serve.relayed.backend import EngineAdapter, ModelPaths
from runners.jobs.serve.relayed.process import (
    Command,
    ListenAddress,
    MetricNames,
    dtype_flags,
    loaded_format,
    template_flags,
)
from runners.jobs.serve.sglang.server import KEY
from runners.jobspec import ServeSpec
from runners.jobspec.engines import ENGINES
from runners.jobspec.serve import LOOPBACK, EngineOptions

LOADED_AS = {"fp8": "fp8"}  # the only format it quantises plain weights to at load
# quant_method values that it can load (QUANTIZATION_CHOICES that a folder can name).
STORED = frozenset({
    "awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "modelopt", "modelopt_fp4",
    "mxfp4", "quark", "auto-round", "w8a8_int8", "w8a8_fp8",
})  # fmt: skip
# This share covers weights and cache only; activations and CUDA graphs need the rest.
MAX_STATIC_RATIO = 0.88
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # no downloads


class Sglang(EngineAdapter):
    """SGLang's HTTP server."""

    title = ENGINES["sglang"].title
    names = MetricNames.with_prefix(
        "sglang", "num_running_reqs", "num_queue_reqs", "token_usage", "prompt_tokens_total",
        "generation_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    )  # fmt: skip

    def command(self, spec: ServeSpec, placed: ModelPaths, listen: ListenAddress) -> Command:
        """Return the start command; the key is in the environment, not in the process list.

        Raises:
            BadInputError: SGLang does not support this; the error names the field.
        """
        argv = [sys.executable, "-m", "runners.jobs.serve.sglang.server"]
        return Command([*argv, *arguments(spec, placed, listen.port)], {**QUIET, KEY: listen.key})

    def served_name(self, spec: ServeSpec, name: str) -> str:
        """Return ``base:adapter`` for an adapter: a bare name selects the base model."""
        return name if name == spec.served_name else f"{spec.served_name}:{name}"


def arguments(spec: ServeSpec, placed: ModelPaths, port: int) -> list[str]:
    """Return the arguments of ``sglang.launch_server``.

    Raises:
        BadInputError: SGLang does not support this; the error names the field.
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
        static = min(options.memory_ratio, MAX_STATIC_RATIO)
        flags += ["--mem-fraction-static", f"{static:g}"]
    return [*flags, *(["--disable-radix-cache"] if options.has_prefix_cache is False else [])]


def _layout(options: EngineOptions) -> list[str]:
    """Return the parallel size flags; with expert parallelism, experts span all ranks."""
    tensor, replicas = options.tensor_parallel_size, options.data_parallel_size
    sizes = {"--tp-size": tensor, "--dp-size": replicas}
    if options.has_expert_parallel:
        ranks = tensor * replicas
        sizes = {"--tp-size": ranks, "--attn-dp-size": replicas, "--ep-size": ranks}
    sizes["--pp-size"] = options.pipeline_parallel_size
    return [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]


def _adapters(spec: ServeSpec, placed: ModelPaths) -> list[str]:
    if not placed.adapters:
        return []
    max_loras = str(min(len(placed.adapters), spec.max_concurrency) + 1)  # + 1: the base model
    paths = [
        json.dumps({"lora_name": name, "lora_path": str(folder)})
        for name, folder in placed.adapters.items()
    ]
    return ["--enable-lora", "--max-loras-per-batch", max_loras, "--lora-paths", *paths]


def _draft(options: EngineOptions, placed: ModelPaths) -> list[str]:
    if options.draft is None or placed.draft is None:
        return []
    tokens = options.draft.tokens
    return [
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", str(placed.draft)),
        *("--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(tokens + 1)),
    ]
