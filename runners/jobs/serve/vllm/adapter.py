"""Arguments and metric names of vLLM.

Sources: vLLM 0.33.0 (PyPI wheel): ``vllm/engine/arg_utils.py`` and
``vllm/entrypoints/common/cli_args.py`` for the arguments, ``vllm/v1/metrics/loggers.py`` for the
figures, ``vllm/entrypoints/serve/instrumentator/health.py`` for ``/health`` (200, or 503 once its
engine is dead), ``vllm/entrypoints/serve/middleware/`` for ``VLLM_API_KEY``. Of 0.32.0:
``vllm/config/kv_transfer.py`` and ``vllm/envs.py`` for the transfer between engines,
``vllm/config/speculative.py`` for n-gram prompt lookup.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runners.jobs.model_files import code_flags, read_config
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.relayed.backend import (
    VISIBLE,
    EngineAdapter,
    ModelPaths,
    SplitEngine,
    calls_of,
    checked,
)
from runners.jobs.serve.relayed.process import (
    Command,
    ListenAddress,
    MetricNames,
    free_ports,
    loaded_format,
    template_flags,
)
from runners.jobspec import ServeSpec
from runners.jobspec.engines import ENGINES
from runners.jobspec.serve import LOOPBACK, EngineOptions
from runners.shared import engine_commands
from runners.shared.engine_commands import EngineFiles, Phase, vllm_arguments

LOADED_AS = engine_commands.LOADED_AS["vllm"]
# quant_method values that it can load (QUANTIZATION_METHODS and their older names).
STORED = frozenset({
    "awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors", "torchao", "modelopt",
    "modelopt_fp4", "mxfp4", "quark", "inc", "auto-round",
})  # fmt: skip
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks
COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main")
CPU_COMMAND = (sys.executable, "-m", "runners.jobs.serve.vllm.server")
# The agent decides how many threads a job has (OMP_NUM_THREADS). By default vLLM binds its own to
# the first cores but the last one, which every other vLLM and job of the host would share.
CPU_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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
        program, env = program_of(spec.engine_options or EngineOptions())
        argv = [*program, *arguments(spec, placed, listen.port)]
        return Command(argv, {**env, "VLLM_API_KEY": listen.key})

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
        program, env = program_of(options)
        argv = [*program, *arguments(spec, placed, listen.port, part.phase)]
        channel = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
        }
        own = {VISIBLE: ",".join(part.devices), "VLLM_API_KEY": listen.key}
        return Command(argv, {**env, **channel, **own})


def program_of(options: EngineOptions) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return vLLM's program on a kind of device, and its environment variables."""
    return (CPU_COMMAND, QUIET | CPU_THREADS) if options.device == "cpu" else (COMMAND, QUIET)


def arguments(
    spec: ServeSpec, placed: ModelPaths, port: int, phase: Phase | None = None
) -> list[str]:
    """Return the arguments of ``vllm``; with a phase, those of a prefill or decode engine.

    Raises:
        BadInputError: vLLM does not support this; the error names the field.
    """
    found = EngineFiles(
        str(placed.model),
        {name: str(folder) for name, folder in placed.adapters.items()},
        str(placed.draft) if placed.draft else None,
        tuple(loaded_format(Vllm.title, placed.config, spec.weight_dtype, STORED, LOADED_AS)),
        (*template_flags(placed.model), *code_flags(placed.model)),
        str(max((_rank(name, folder) for name, folder in placed.adapters.items()), default=0)),
        calls_of(spec, placed).flags,
    )
    return vllm_arguments(checked(spec), found, str(port), phase)


def _rank(name: str, folder: Path) -> int:
    """Return the smallest of vLLM's supported ranks that fits an adapter."""
    rank = read_config(folder / "adapter_config.json").get("r")
    ranks = [each for each in LORA_RANKS if isinstance(rank, int) and 0 < rank <= each]
    if not ranks:
        msg = f"adapter {name}: its rank r is {str(rank)[:40]}; vLLM takes 1 to {LORA_RANKS[-1]}"
        raise BadInputError(msg)
    return ranks[0]
