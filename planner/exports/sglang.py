"""A serving plan as the command line of SGLang's server."""

from planner.exports.case import GIB, MASTER, PORT, RANK, SERVING_PORT, ExportCase
from planner.exports.export import Format, Notes, shell_lines
from planner.exports.vllm import DTYPES, LOADS_ANY_CHECKPOINT, needs_checkpoint, serving_notes
from planner.specs.workload import ServeWorkload

QUANTIZATION = {
    "fp8": "fp8",
    "int8": "w8a8_int8",
    "int4": "awq_marlin",
    "nf4": "bitsandbytes",
    "nvfp4": "modelopt_fp4",
    "mxfp4": "mxfp4",
}
NAMED = {"awq": "awq_marlin", "gptq": "gptq_marlin"}


def sglang_arguments(case: ExportCase) -> list[str]:
    """Return SGLang's server with the flags that the plan decides, and no others."""
    command = ["python", "-m", "sglang.launch_server", "--model-path", case.model]
    command += ["--port", str(SERVING_PORT)]
    return [*command, *_layout(case), *_formats(case), *_limits(case), *_extras(case)]


def _layout(case: ExportCase) -> list[str]:
    flags: list[str] = []
    for flag, size in (
        ("--tp-size", case.size("tensor")),
        ("--pp-size", case.size("pipeline")),
        ("--dp-size", case.size("data")),
        ("--ep-size", case.size("expert")),
        ("--attn-dp-size", case.strategy.attention_data_parallel_size or 1),
        ("--nnodes", case.nodes),
    ):
        if size > 1:
            flags += [flag, str(size)]
    if case.nodes > 1:
        flags += ["--node-rank", RANK, "--dist-init-addr", f"{MASTER}:{PORT}"]
    return flags


def _formats(case: ExportCase) -> list[str]:
    weight = case.strategy.weight_dtype or "bf16"
    computed = case.strategy.activation_dtype or "bf16"
    flags = ["--dtype", DTYPES.get(weight, DTYPES.get(computed, "bfloat16"))]
    if weight in QUANTIZATION:
        named = NAMED.get(case.strategy.quantization or "", QUANTIZATION[weight])
        flags += ["--quantization", named]
    if case.strategy.kv_cache_dtype == "fp8":
        flags += ["--kv-cache-dtype", "fp8_e4m3"]
    return flags


def _limits(case: ExportCase) -> list[str]:
    flags = ["--context-length", str(case.context_tokens)] if case.context_tokens else []
    if case.sequences_per_replica:
        flags += ["--max-running-requests", str(case.sequences_per_replica)]
    tokens = case.strategy.max_batch_tokens
    if case.strategy.chunked_prefill is False:
        flags += ["--chunked-prefill-size", "-1"]
    elif tokens:
        flags += ["--chunked-prefill-size", str(tokens)]
    return flags


def _extras(case: ExportCase) -> list[str]:
    flags: list[str] = []
    if isinstance(case.workload, ServeWorkload) and not case.workload.prefix_share_ratio:
        flags.append("--disable-radix-cache")
    if case.offload.weights_cpu:
        flags += ["--cpu-offload-gb", str(-(-case.offloaded_weight_bytes // GIB)).split(".")[0]]
    draft = case.strategy.speculative
    if draft:
        flags += ["--speculative-algorithm", "STANDALONE"]
        flags += ["--speculative-draft-model-path", draft.draft_model]
        flags += ["--speculative-num-steps", str(draft.tokens), "--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", str(draft.tokens + 1)]
    return flags


def sglang_notes(case: ExportCase) -> Notes:
    """Return what the command leaves open."""
    notes = list(serving_notes(case, "sglang", "SGLang"))
    weight = case.strategy.weight_dtype or "bf16"
    if needs_checkpoint(case) and weight not in LOADS_ANY_CHECKPOINT:
        notes.append(f"the model must name a checkpoint that is stored in {weight}")
    if case.strategy.attention_data_parallel_size:
        notes.append("releases before 0.5.2x write --attn-dp-size N as --enable-dp-attention")
    if case.size("context") > 1:
        notes.append("SGLang splits the context inside the tensor ranks only: it is left out")
    if case.nodes > 1:
        notes.append("run it on every node, NODE_RANK counting from 0; MASTER_ADDR is the first")
    return tuple(notes)


def sglang_text(case: ExportCase) -> str:
    """Return the command, an option a line."""
    return shell_lines(sglang_arguments(case))


SGLANG = Format("sglang", "SGLang", "serve-sglang.sh", sglang_text, sglang_notes)
