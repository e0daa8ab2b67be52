"""A serving plan as TensorRT-LLM's ``trtllm-serve`` with its file of extra options."""

from planner.exports.export import (
    ExportCase,
    Format,
    Notes,
    servers_notes,
    servers_text,
    size_flags,
)
from planner.exports.vllm import cache_notes, checkpoint_notes, serving_notes
from planner.exports.yaml_text import yaml_text
from planner.specs.base import JsonObject
from planner.specs.workload import ServeWorkload

CACHES = frozenset({"fp8"})
AT_LOAD: frozenset[str] = frozenset()
OPTIONS_FILE = "trtllm-options.yaml"


def trtllm_arguments(case: ExportCase) -> list[str]:
    """Return ``trtllm-serve`` with only the flags that the plan decides."""
    command = ["trtllm-serve", case.checkpoint(AT_LOAD), "--backend", "pytorch"]
    command += ["--trust_remote_code"] if case.runs_remote_code else []
    command += size_flags(
        ("--tp_size", case.size("tensor") * case.attention_ranks),
        ("--pp_size", case.size("pipeline")),
        ("--cp_size", case.size("context")),
        ("--ep_size", case.size("expert")),
    )
    for flag, count in (
        ("--max_batch_size", case.running_per_rank),
        ("--max_num_tokens", case.strategy.max_batch_tokens),
        ("--max_seq_len", case.accepted_tokens),
    ):
        if count:
            command += [flag, str(count)]
    if trtllm_options(case):
        command += ["--extra_llm_api_options", OPTIONS_FILE]
    return command


def trtllm_options(case: ExportCase) -> JsonObject:
    """Return the options without a flag, by TensorRT-LLM's argument names."""
    options: JsonObject = {}
    if case.attention_ranks > 1:
        options["enable_attention_dp"] = True
    chunked, step = case.strategy.chunked_prefill, case.strategy.max_batch_tokens
    if chunked is None and step and (case.accepted_tokens or 0) > step:
        chunked = True  # off by default, where a prompt longer than a step is refused
    if chunked is not None:
        options["enable_chunked_prefill"] = chunked
    cache: JsonObject = {}
    if case.strategy.kv_cache_dtype in CACHES:
        cache["dtype"] = case.strategy.kv_cache_dtype
    if isinstance(case.workload, ServeWorkload) and case.workload.prefix_share_ratio:
        cache["enable_block_reuse"] = True
    share = case.memory_share("tensorrt_llm")
    if share:
        cache["free_gpu_memory_fraction"] = share
    if cache:
        options["kv_cache_config"] = cache
    draft = case.strategy.speculative
    if draft:  # names of TensorRT-LLM 1.3, tensorrt_llm/llmapi/llm_args.py
        options["speculative_config"] = {
            "decoding_type": "Draft_Target",
            "max_draft_len": draft.tokens,
            "speculative_model": draft.draft_model,
        }
    return options


def trtllm_text(case: ExportCase) -> str:
    """Return a script that writes the options and starts the server."""
    command = servers_text(case, trtllm_arguments(case), case.size("data"))
    options = trtllm_options(case)
    if not options:
        return command
    return f"cat > {OPTIONS_FILE} <<'END'\n{yaml_text(options)}END\n{command}"


def trtllm_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the command leaves to the user."""
    notes = list(serving_notes(case, "tensorrt_llm", "TensorRT-LLM"))
    notes += cache_notes(case, CACHES, "TensorRT-LLM")
    notes += checkpoint_notes(case, AT_LOAD)
    if case.attention_ranks > 1 and case.size("tensor") > 1:
        notes.append(
            "TensorRT-LLM holds attention whole on every rank: the plan splits it over "
            f"{case.size('tensor')}"
        )
    if case.offload.weights_cpu:
        notes.append("TensorRT-LLM keeps all weights on the device: the plan's offload is lost")
    notes += servers_notes(case, case.size("data"))
    if case.nodes > 1 and case.size("data") < case.nodes:
        notes.append("several nodes: start it under trtllm-llmapi-launch, a task per device")
    return tuple(notes)


TENSORRT_LLM = Format(
    "tensorrt_llm",
    "TensorRT-LLM",
    "serve-tensorrt-llm.sh",
    trtllm_text,
    trtllm_notes,
    at_load=AT_LOAD,
)
