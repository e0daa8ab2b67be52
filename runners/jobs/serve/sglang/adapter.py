"""SGLang's command line and metric names.

Sources: SGLang 0.5.23 (PyPI wheel): ``sglang/srt/arg_groups/fields`` for the arguments,
``sglang/srt/observability/metrics_collector.py`` for the figures, its HTTP server for
``/health`` (200 once it wrote a token, 503 before) and ``/v1/models``, and
``sglang/srt/entrypoints/openai/serving_base.py`` for the adapter syntax in requests.
"""

import sys

from runners.jobs.model_files import code_flags
from runners.jobs.serve.relayed.backend import EngineAdapter, ModelPaths, calls_of, checked
from runners.jobs.serve.relayed.process import (
    Command,
    ListenAddress,
    MetricNames,
    loaded_format,
    template_flags,
)
from runners.jobs.serve.sglang.server import KEY
from runners.jobspec import ServeSpec
from runners.jobspec.engines import ENGINES
from runners.shared import engine_commands
from runners.shared.engine_commands import EngineFiles, sglang_arguments

LOADED_AS = engine_commands.LOADED_AS["sglang"]
# quant_method values that it can load (QUANTIZATION_CHOICES that a folder can name).
STORED = frozenset({
    "awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "modelopt", "modelopt_fp4",
    "mxfp4", "quark", "auto-round", "w8a8_int8", "w8a8_fp8",
})  # fmt: skip
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
    found = EngineFiles(
        str(placed.model),
        {name: str(folder) for name, folder in placed.adapters.items()},
        str(placed.draft) if placed.draft else None,
        tuple(loaded_format(Sglang.title, placed.config, spec.weight_dtype, STORED, LOADED_AS)),
        (*template_flags(placed.model), *code_flags(placed.model)),
        parsers=calls_of(spec, placed).flags,
    )
    return sglang_arguments(checked(spec), found, str(port))
