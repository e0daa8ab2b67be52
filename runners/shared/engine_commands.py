"""The command line of an endpoint's engine, from its spec and what its host found of the files.

The job's process starts what these functions return; the pages show the same with names in
capitals in the place of port, key and folders, before a host has looked at them. Sources: see
the adapters in ``runners/jobs/serve``.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Literal, NamedTuple

from runners.jobspec import ServeSpec
from runners.jobspec.engines import OWN, EngineName
from runners.jobspec.serve import LOOPBACK, EngineDevice, EngineOptions
from runners.shared.timing import ENGINE_SHUTDOWN_SECONDS

Phase = Literal["prefill", "decode"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Formats that an engine quantises plain weights to at load; our int4 is nf4, which neither has.
LOADED_AS: Mapping[EngineName, Mapping[str, str]] = {
    "vllm": {"fp8": "fp8", "int8": "int8_per_channel_weight_only"},
    "sglang": {"fp8": "fp8"},
}
MAX_LOOKUP, MIN_LOOKUP = 4, 2  # n-gram length of vLLM's prompt lookup
# This share of SGLang covers weights and cache only; activations and CUDA graphs need the rest.
MAX_STATIC_RATIO = 0.88


class EngineFiles(NamedTuple):
    """The files of a spec as the engine is to read them, and the flags that follow from them."""

    model: str
    adapters: Mapping[str, str]  # folders, by the name that clients request
    draft: str | None = None
    quantization: tuple[str, ...] = ()  # of plain weights that are quantised at load
    template: tuple[str, ...] = ()  # of a model without a chat template of its own
    lora_rank: str = ""
    parsers: tuple[str, ...] = ()  # of the model's tool calls and reasoning


# vLLM


def vllm_arguments(
    spec: ServeSpec, found: EngineFiles, port: str, phase: Phase | None = None
) -> list[str]:
    """Return the arguments of ``vllm``; with a phase, those of a prefill or decode engine."""
    options = spec.engine_options or EngineOptions()
    return [
        *("serve", found.model, "--host", LOOPBACK, "--port", port),
        *("--served-model-name", spec.served_name, "--seed", str(spec.seed)),
        *("--generation-config", "vllm"),  # OpenAI's sampling defaults, as in our own engine
        *("--shutdown-timeout", str(ENGINE_SHUTDOWN_SECONDS), "--disable-uvicorn-access-log"),
        "--enable-prompt-tokens-details",  # cached tokens in usage
        *_dtype_flags(spec),
        *found.quantization,
        *("--kv-cache-dtype", options.kv_cache_dtype),
        *_vllm_limits(spec, options),
        *_vllm_layout(options),
        *_vllm_adapters(spec, found),
        *_vllm_speculation(options, found.draft, phase),
        *_vllm_transfer(phase),
        *found.template,
        *found.parsers,
        *spec.engine_args,
    ]


def _dtype_flags(spec: ServeSpec) -> list[str]:
    return ["--dtype", DTYPES.get(spec.weight_dtype, "bfloat16")]


def _vllm_limits(spec: ServeSpec, options: EngineOptions) -> list[str]:
    step = max(spec.max_batch_tokens, spec.max_concurrency)  # fits one token per sequence
    if options.has_chunked_prefill is False:
        step = max(step, spec.max_length or 0)  # prompts are not chunked
    flags = ["--max-num-seqs", str(spec.max_concurrency), "--max-num-batched-tokens", str(step)]
    if spec.max_length:
        flags += ["--max-model-len", str(spec.max_length)]
    if options.memory_ratio is not None:
        flags += ["--gpu-memory-utilization", f"{options.memory_ratio:g}"]
    if options.kv_cache_bytes is not None:
        flags += ["--kv-cache-memory-bytes", str(options.kv_cache_bytes)]
    for name, is_enabled in (
        ("enable-chunked-prefill", options.has_chunked_prefill),
        ("enable-prefix-caching", options.has_prefix_cache),
    ):
        if is_enabled is not None:
            flags.append(f"--{'' if is_enabled else 'no-'}{name}")
    return flags


def _vllm_layout(options: EngineOptions) -> list[str]:
    sizes = {
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--data-parallel-size": options.data_parallel_size,
    }
    flags = chain.from_iterable((name, str(size)) for name, size in sizes.items() if size > 1)
    return [*flags, *(["--enable-expert-parallel"] if options.has_expert_parallel else [])]


def _vllm_adapters(spec: ServeSpec, found: EngineFiles) -> list[str]:
    if not found.adapters:
        return []
    max_loras = str(min(len(found.adapters), spec.max_concurrency))
    modules = [
        json.dumps({"name": name, "path": folder, "base_model_name": spec.served_name})
        for name, folder in found.adapters.items()
    ]
    flags = ["--enable-lora", "--max-loras", max_loras, "--max-cpu-loras", str(len(modules))]
    return [*flags, "--max-lora-rank", found.lora_rank, "--lora-modules", *modules]


def _vllm_speculation(options: EngineOptions, draft: str | None, phase: Phase | None) -> list[str]:
    """Return the speculative decoding flags; a prefill engine has no n-gram lookup."""
    setting: dict[str, object]
    if options.draft is not None and draft is not None:
        tokens = options.draft.tokens
        setting = {"method": "draft_model", "model": draft, "num_speculative_tokens": tokens}
    elif options.lookup_tokens is not None and phase != "prefill":
        window = {"prompt_lookup_max": MAX_LOOKUP, "prompt_lookup_min": MIN_LOOKUP}
        setting = {"method": "ngram", "num_speculative_tokens": options.lookup_tokens, **window}
    else:
        return []
    return ["--speculative-config", json.dumps(setting)]


def _vllm_transfer(phase: Phase | None) -> list[str]:
    """Return the flags that transfer a prompt's KV cache from the prefill to the decode engine.

    A failed transfer fails the request: recomputing the prompt would delay other requests.
    """
    if phase is None:
        return []
    role = "kv_producer" if phase == "prefill" else "kv_consumer"
    setting = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    return ["--kv-transfer-config", json.dumps(setting)]


# SGLang


def sglang_arguments(spec: ServeSpec, found: EngineFiles, port: str) -> list[str]:
    """Return the arguments of ``sglang.launch_server``."""
    options = spec.engine_options or EngineOptions()
    return [
        *("--model-path", found.model, "--host", LOOPBACK, "--port", port),
        *("--served-model-name", spec.served_name, "--random-seed", str(spec.seed)),
        *("--sampling-defaults", "openai", "--enable-metrics"),
        "--enable-cache-report",  # cached tokens in usage
        *_dtype_flags(spec),
        *found.quantization,
        *("--kv-cache-dtype", "fp8_e4m3" if options.kv_cache_dtype == "fp8" else "auto"),
        *_sglang_limits(spec, options),
        *_sglang_layout(options),
        *_sglang_adapters(spec, found),
        *_sglang_draft(options, found.draft),
        *found.template,
        *found.parsers,
        *spec.engine_args,
    ]


def _sglang_limits(spec: ServeSpec, options: EngineOptions) -> list[str]:
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


def _sglang_layout(options: EngineOptions) -> list[str]:
    """Return the parallel size flags; with expert parallelism, experts span all ranks."""
    tensor, replicas = options.tensor_parallel_size, options.data_parallel_size
    sizes = {"--tp-size": tensor, "--dp-size": replicas}
    if options.has_expert_parallel:
        ranks = tensor * replicas
        sizes = {"--tp-size": ranks, "--attn-dp-size": replicas, "--ep-size": ranks}
    sizes["--pp-size"] = options.pipeline_parallel_size
    return [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]


def _sglang_adapters(spec: ServeSpec, found: EngineFiles) -> list[str]:
    if not found.adapters:
        return []
    max_loras = str(min(len(found.adapters), spec.max_concurrency) + 1)  # + 1: the base model
    paths = [
        json.dumps({"lora_name": name, "lora_path": folder})
        for name, folder in found.adapters.items()
    ]
    return ["--enable-lora", "--max-loras-per-batch", max_loras, "--lora-paths", *paths]


def _sglang_draft(options: EngineOptions, draft: str | None) -> list[str]:
    if options.draft is None or draft is None:
        return []
    tokens = options.draft.tokens
    return [
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", draft),
        *("--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(tokens + 1)),
    ]


# llama.cpp


def llamacpp_arguments(
    spec: ServeSpec,
    found: EngineFiles,
    port: str,
    *,
    slots: str,
    context_tokens: str,
    threads: str,
) -> list[str]:
    """Return the settings of the endpoint's llama.cpp as arguments of ``llama-server``.

    xllamacpp takes them as fields; only ``engine_args`` are read by llama.cpp's own parser.
    """
    return [
        *("--model", found.model, "--host", LOOPBACK, "--port", port),
        *("--parallel", slots, "--ctx-size", context_tokens),
        *("--threads", threads, "--threads-batch", threads),
        *(word for each in found.adapters.values() for word in ("--lora-scaled", f"{each}:0")),
        *("--fit", "off", "--no-ui"),
        *spec.engine_args,
    ]


# What is shown before a host has looked at the files


PORT, MODEL, DRAFT, RANK, THREADS = "PORT", "MODEL_FOLDER", "DRAFT_FOLDER", "RANK", "THREADS"


def shown_command(spec: ServeSpec) -> str:
    """Return the engine's command line as far as the spec says it; "" for Slipway's own engine.

    Port, folders, the adapters' rank and the number of threads are names in capitals: the host
    fills them in. The key is in the environment and never in the command.
    """
    if spec.engine == OWN:
        return ""
    options = spec.engine_options or EngineOptions()
    adapters = {each.name: f"ADAPTER_FOLDER_{at}" for at, each in enumerate(spec.adapters, 1)}
    loaded = LOADED_AS.get(spec.engine, {}).get(spec.weight_dtype)
    files = EngineFiles(
        MODEL,
        adapters,
        DRAFT if options.draft else None,
        quantization=("--quantization", loaded) if loaded else (),
        lora_rank=RANK,
    )
    lines = _SHOWN[spec.engine](spec, files)
    return "\n".join(command_line(spec.engine, each, options.device) for each in lines)


def _shown_vllm(spec: ServeSpec, files: EngineFiles) -> list[list[str]]:
    is_split = spec.engine_options is not None and spec.engine_options.split is not None
    phases: tuple[Phase | None, ...] = ("prefill", "decode") if is_split else (None,)
    return [vllm_arguments(spec, files, PORT, phase) for phase in phases]


def _shown_sglang(spec: ServeSpec, files: EngineFiles) -> list[list[str]]:
    return [sglang_arguments(spec, files, PORT)]


def _shown_llamacpp(spec: ServeSpec, files: EngineFiles) -> list[list[str]]:
    longest = spec.max_length or 0
    cache = spec.kv_cache_tokens or spec.max_concurrency * longest
    slots = min(spec.max_concurrency, cache // longest) if longest else 0
    arguments = llamacpp_arguments(
        spec,
        files._replace(model="MODEL.gguf"),
        PORT,
        slots=str(slots) if slots else "SLOTS",
        context_tokens=str(slots * longest) if slots else "TOKENS",
        threads=THREADS,
    )
    return [arguments]


_SHOWN: Mapping[EngineName, Callable[[ServeSpec, EngineFiles], list[list[str]]]] = {
    "vllm": _shown_vllm,
    "sglang": _shown_sglang,
    "llamacpp": _shown_llamacpp,
}


def command_line(engine: EngineName, arguments: list[str], device: EngineDevice = "gpu") -> str:
    """Return an engine's program and arguments as a shell takes them."""
    vllm = "runners.jobs.serve.vllm.server" if device == "cpu" else "vllm.entrypoints.cli.main"
    program = {
        "vllm": ["python", "-m", vllm],
        "sglang": ["python", "-m", "runners.jobs.serve.sglang.server"],
    }.get(engine, ["llama-server"])
    return shlex.join([*program, *arguments])
