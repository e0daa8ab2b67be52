"""A serving plan as ``trtllm-serve`` with the file of further options that it reads."""

from planner.exports.case import ExportCase
from planner.exports.export import Format, Notes, shell_lines
from planner.exports.vllm import needs_checkpoint, serving_notes
from planner.exports.yaml_text import yaml_text
from planner.specs.base import JsonObject
from planner.specs.workload import ServeWorkload

OPTIONS_FILE = "trtllm-options.yaml"


def trtllm_arguments(case: ExportCase) -> list[str]:
    """Return ``trtllm-serve`` with the flags that the plan decides, and no others."""
    command = ["trtllm-serve", case.model, "--backend", "pytorch"]
    for flag, size in (
        ("--tp_size", case.size("tensor")),
        ("--pp_size", case.size("pipeline")),
        ("--cp_size", case.size("context")),
        ("--ep_size", case.size("expert")),
    ):
        if size > 1:
            command += [flag, str(size)]
    for flag, count in (
        ("--max_batch_size", case.sequences_per_replica),
        ("--max_num_tokens", case.strategy.max_batch_tokens),
        ("--max_seq_len", case.context_tokens),
    ):
        if count:
            command += [flag, str(count)]
    if trtllm_options(case):
        command += ["--extra_llm_api_options", OPTIONS_FILE]
    return command


def trtllm_options(case: ExportCase) -> JsonObject:
    """Return the options that have no flag, under the names of TensorRT-LLM's arguments."""
    options: JsonObject = {}
    if case.strategy.attention_data_parallel_size:
        options["enable_attention_dp"] = True
    if case.strategy.chunked_prefill is not None:
        options["enable_chunked_prefill"] = case.strategy.chunked_prefill
    cache: JsonObject = {}
    if case.strategy.kv_cache_dtype == "fp8":
        cache["dtype"] = "fp8"
    if isinstance(case.workload, ServeWorkload):
        cache["enable_block_reuse"] = case.workload.prefix_share_ratio > 0
    if cache:
        options["kv_cache_config"] = cache
    draft = case.strategy.speculative
    if draft:
        options["speculative_config"] = {
            "decoding_type": "DraftTarget",
            "max_draft_len": draft.tokens,
            "speculative_model_dir": draft.draft_model,
        }
    return options


def trtllm_text(case: ExportCase) -> str:
    """Return a script that writes the options and starts the server."""
    command = shell_lines(trtllm_arguments(case))
    options = trtllm_options(case)
    if not options:
        return command
    return f"cat > {OPTIONS_FILE} <<'END'\n{yaml_text(options)}END\n{command}"


def trtllm_notes(case: ExportCase) -> Notes:
    """Return what the command leaves open."""
    notes = list(serving_notes(case, "tensorrt_llm", "TensorRT-LLM"))
    weight = case.strategy.weight_dtype or "bf16"
    if needs_checkpoint(case):
        notes.append(f"the model must name a checkpoint that is stored in {weight}")
    if case.offload.weights_cpu:
        notes.append("TensorRT-LLM keeps all weights on the device: the plan's offload is lost")
    if case.size("data") > 1:
        notes.append(f"{case.size('data')} replicas: start as many servers behind a balancer")
    if case.nodes > 1:
        notes.append("several nodes: start it under trtllm-llmapi-launch, a task per device")
    return tuple(notes)


TENSORRT_LLM = Format(
    "tensorrt_llm", "TensorRT-LLM", "serve-tensorrt-llm.sh", trtllm_text, trtllm_notes
)
