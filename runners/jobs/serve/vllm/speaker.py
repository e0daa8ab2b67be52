"""A spec in vLLM's words, and what it calls its figures.

Sources: vLLM 0.33.0 (PyPI wheel): ``vllm/engine/arg_utils.py`` and
``vllm/entrypoints/common/cli_args.py`` for the arguments, ``vllm/v1/metrics/loggers.py`` for the
figures, ``vllm/entrypoints/serve/instrumentator/health.py`` for ``/health`` (200, or 503 once its
engine is dead), ``vllm/entrypoints/serve/middleware/`` for ``VLLM_API_KEY``. Of 0.32.0:
``vllm/config/kv_transfer.py`` and ``vllm/envs.py`` for the transfer between engines,
``vllm/config/speculative.py`` for guesses from the prompt.
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
from runners.jobs.serve.relayed.parts import VISIBLE, Part, Phase
from runners.jobs.serve.relayed.process import Command, Door, free_ports
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
COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main")
LOOKUP_MOST, LOOKUP_LEAST = 4, 2  # last tokens that a guess is looked up by
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
        argv = [*COMMAND, *arguments(spec, placed, door.port)]
        return Command(argv, {**QUIET, "VLLM_API_KEY": door.key})

    def part_command(self, spec: ServeSpec, placed: Placed, door: Door, part: Part) -> Command:
        """Return how one of several engines is started, on its own GPUs, with a way to the others.

        Each of its data-parallel ranks takes one port more, counted from the first.

        Raises:
            BadInputError: it does not serve this, by the field.
        """
        options = spec.engine_options or EngineOptions()
        side = free_ports(options.data_parallel_size, apart_from=door.port)
        argv = [*COMMAND, *arguments(spec, placed, door.port, part.phase)]
        way = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
        own = {VISIBLE: ",".join(part.devices), "VLLM_API_KEY": door.key}
        return Command(argv, {**QUIET, **way, **own})


def arguments(spec: ServeSpec, placed: Placed, port: int, phase: Phase | None = None) -> list[str]:
    """Return the words after ``vllm``; with a phase, of an engine that does no other.

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
        *_guesses(options, placed.draft, phase),
        *_transfer(phase),
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


def _guesses(options: EngineOptions, draft: Path | None, phase: Phase | None) -> list[str]:
    """Return who guesses ahead; an engine that only reads has nothing to guess."""
    setting: dict[str, object]
    if options.draft is not None and draft is not None:
        tokens = options.draft.tokens
        setting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": tokens}
    elif options.lookup_tokens is not None and phase != "prefill":
        window = {"prompt_lookup_max": LOOKUP_MOST, "prompt_lookup_min": LOOKUP_LEAST}
        setting = {"method": "ngram", "num_speculative_tokens": options.lookup_tokens, **window}
    else:
        return []
    return ["--speculative-config", json.dumps(setting)]


def _transfer(phase: Phase | None) -> list[str]:
    """Return how the cache of a prompt travels from the engine that reads to the one that writes.

    A cache that does not arrive fails its request: another reading would hold up the others.
    """
    if phase is None:
        return []
    role = "kv_producer" if phase == "prefill" else "kv_consumer"
    setting = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    return ["--kv-transfer-config", json.dumps(setting)]
