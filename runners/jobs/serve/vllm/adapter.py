"""Arguments and metric names of vLLM.

Sources: vLLM 0.33.0 (PyPI wheel): ``vllm/engine/arg_utils.py`` and
``vllm/entrypoints/common/cli_args.py`` for the arguments, ``vllm/v1/metrics/loggers.py`` for the
figures, ``vllm/entrypoints/serve/instrumentator/health.py`` for ``/health`` (200, or 503 once its
engine is dead), ``vllm/entrypoints/serve/middleware/`` for ``VLLM_API_KEY``. Of 0.32.0:
``vllm/config/kv_transfer.py`` and ``vllm/envs.py`` for the transfer between engines,
``vllm/config/speculative.py`` for n-gram prompt lookup.
"""

import json
import sys
from itertools import chain
from pathlib import Path

from runners.jobs.model_files import read_config
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.relayed.backend import (
    VISIBLE,
    EngineAdapter,
    ModelPaths,
    Phase,
    SplitEngine,
)
from runners.jobs.serve.relayed.process import (
    Command,
    ListenAddress,
    MetricNames,
    dtype_flags,
    free_ports,
    loaded_format,
    template_flags,
)
from runners.jobspec import ServeSpec
from runners.jobspec.engines import ENGINES
from runners.jobspec.serve import LOOPBACK, EngineOptions
from runners.shared.timing import ENGINE_SHUTDOWN_SECONDS

# Formats it quantises plain weights to at load; our int4 is nf4, which vLLM does not have.
LOADED_AS = {"fp8": "fp8", "int8": "int8_per_channel_weight_only"}
# quant_method values that it can load (QUANTIZATION_METHODS and their older names).
STORED = frozenset({
    "awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors", "torchao", "modelopt",
    "modelopt_fp4", "mxfp4", "quark", "inc", "auto-round",
})  # fmt: skip
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks
COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main")
MAX_LOOKUP, MIN_LOOKUP = 4, 2  # n-gram length of prompt lookup
# No downloads and no telemetry; compiled kernels are kept in the user's cache folder.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
}


class Vllm(EngineAdapter):
    """vLLM's HTTP server."""

    title = ENGINES["vllm"].title
    names = MetricNames.with_prefix(
        "vllm", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds",
        "inter_token_latency_seconds",  # one value per token, as in our charts
    )  # fmt: skip

    def command(self, spec: ServeSpec, placed: ModelPaths, listen: ListenAddress) -> Command:
        """Return the start command; the key is in the environment, not in the process list.

        Raises:
            BadInputError: vLLM does not support this; the error names the field.
        """
        argv = [*COMMAND, *arguments(spec, placed, listen.port)]
        return Command(argv, {**QUIET, "VLLM_API_KEY": listen.key})

    def part_command(
        self, spec: ServeSpec, placed: ModelPaths, listen: ListenAddress, part: SplitEngine
    ) -> Command:
        """Return the start command of one engine of a split, with its GPUs and side channel.

        Each of its data-parallel ranks takes one more port, counted from the first.

        Raises:
            BadInputError: vLLM does not support this; the error names the field.
        """
        options = spec.engine_options or EngineOptions()
        side = free_ports(options.data_parallel_size, apart_from=listen.port)
        argv = [*COMMAND, *arguments(spec, placed, listen.port, part.phase)]
        channel = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
        }
        own = {VISIBLE: ",".join(part.devices), "VLLM_API_KEY": listen.key}
        return Command(argv, {**QUIET, **channel, **own})


def arguments(
    spec: ServeSpec, placed: ModelPaths, port: int, phase: Phase | None = None
) -> list[str]:
    """Return the arguments of ``vllm``; with a phase, those of a prefill or decode engine.

    Raises:
        BadInputError: vLLM does not support this; the error names the field.
    """
    options = spec.engine_options or EngineOptions()
    return [
        *("serve", str(placed.model), "--host", LOOPBACK, "--port", str(port)),
        *("--served-model-name", spec.served_name, "--seed", str(spec.seed)),
        *("--generation-config", "vllm"),  # OpenAI's sampling defaults, as in our own engine
        *("--shutdown-timeout", str(ENGINE_SHUTDOWN_SECONDS), "--disable-uvicorn-access-log"),
        *_formats(spec, placed, options),
        *_limits(spec, options),
        *_layout(options),
        *_adapters(spec, placed),
        *_speculation(options, placed.draft, phase),
        *_transfer(phase),
        *template_flags(placed.model),
    ]


def _formats(spec: ServeSpec, placed: ModelPaths, options: EngineOptions) -> list[str]:
    quantization = loaded_format(Vllm.title, placed.config, spec.weight_dtype, STORED, LOADED_AS)
    return [
        *dtype_flags(spec.weight_dtype),
        *quantization,
        "--kv-cache-dtype",
        options.kv_cache_dtype,
    ]


def _limits(spec: ServeSpec, options: EngineOptions) -> list[str]:
    step = max(spec.max_batch_tokens, spec.max_concurrency)  # fits one token per sequence
    if options.has_chunked_prefill is False:
        step = max(step, spec.max_length or 0)  # prompts are not chunked
    flags = ["--max-num-seqs", str(spec.max_concurrency), "--max-num-batched-tokens", str(step)]
    if spec.max_length:
        flags += ["--max-model-len", str(spec.max_length)]
    if options.memory_ratio is not None:
        flags += ["--gpu-memory-utilization", f"{options.memory_ratio:g}"]
    for name, is_enabled in (
        ("enable-chunked-prefill", options.has_chunked_prefill),
        ("enable-prefix-caching", options.has_prefix_cache),
    ):
        if is_enabled is not None:
            flags.append(f"--{'' if is_enabled else 'no-'}{name}")
    return flags


def _layout(options: EngineOptions) -> list[str]:
    sizes = {
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--data-parallel-size": options.data_parallel_size,
    }
    flags = chain.from_iterable((name, str(size)) for name, size in sizes.items() if size > 1)
    return [*flags, *(["--enable-expert-parallel"] if options.has_expert_parallel else [])]


def _adapters(spec: ServeSpec, placed: ModelPaths) -> list[str]:
    if not placed.adapters:
        return []
    rank = max(_rank(name, folder) for name, folder in placed.adapters.items())
    max_loras = str(min(len(placed.adapters), spec.max_concurrency))
    modules = [
        json.dumps({"name": name, "path": str(folder), "base_model_name": spec.served_name})
        for name, folder in placed.adapters.items()
    ]
    flags = ["--enable-lora", "--max-loras", max_loras, "--max-cpu-loras", str(len(modules))]
    return [*flags, "--max-lora-rank", str(rank), "--lora-modules", *modules]


def _rank(name: str, folder: Path) -> int:
    """Return the smallest of vLLM's supported ranks that fits an adapter."""
    rank = read_config(folder / "adapter_config.json").get("r")
    ranks = [each for each in LORA_RANKS if isinstance(rank, int) and 0 < rank <= each]
    if not ranks:
        msg = f"adapter {name}: its rank r is {str(rank)[:40]}; vLLM takes 1 to {LORA_RANKS[-1]}"
        raise BadInputError(msg)
    return ranks[0]


def _speculation(options: EngineOptions, draft: Path | None, phase: Phase | None) -> list[str]:
    """Return the speculative decoding flags; a prefill engine has no n-gram lookup."""
    setting: dict[str, object]
    if options.draft is not None and draft is not None:
        tokens = options.draft.tokens
        setting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": tokens}
    elif options.lookup_tokens is not None and phase != "prefill":
        window = {"prompt_lookup_max": MAX_LOOKUP, "prompt_lookup_min": MIN_LOOKUP}
        setting = {"method": "ngram", "num_speculative_tokens": options.lookup_tokens, **window}
    else:
        return []
    return ["--speculative-config", json.dumps(setting)]


def _transfer(phase: Phase | None) -> list[str]:
    """Return the flags that transfer a prompt's KV cache from the prefill to the decode engine.

    A failed transfer fails the request: recomputing the prompt would delay other requests.
    """
    if phase is None:
        return []
    role = "kv_producer" if phase == "prefill" else "kv_consumer"
    setting = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    return ["--kv-transfer-config", json.dumps(setting)]
