"""Export a serving plan as the command line of vLLM."""

import json
from collections.abc import Container, Mapping

from planner.exports.export import (
    MASTER,
    PORT,
    RANK,
    ExportCase,
    Format,
    Notes,
    shell_lines,
    size_flags,
)
from planner.specs.units import GIB
from planner.specs.workload import ServeWorkload

# vLLM's names of formats that it makes of a 16-bit checkpoint while loading. A quantised
# checkpoint names its format itself, and another flag is refused.
# Source: vllm/config/model.py _verify_quantization, config/quantization.py (0.20.0 to 0.33.0).
AT_LOAD = {"fp8": "fp8_per_tensor", "nf4": "bitsandbytes"}
# vLLM dropped bitsandbytes in 0.28: vllm-project/vllm, pull request 43529, merged before 2026-08.
OWN_NF4 = (
    "nf4 through bitsandbytes is vLLM's own up to 0.27; from 0.28 on install the package "
    "vllm-bnb-plugin beside it, in its image too, or pin int4 or fp8 instead"
)
# vLLM's own up to 0.23: docs/features/quantization/gguf.md, pull request 39612.
OWN_GGUF = (
    "GGUF needs the package vllm-gguf-plugin beside vLLM from 0.24 on, in its image too; vLLM "
    "calls it highly experimental and under-optimized: int4 (AWQ, GPTQ) or fp8 is its usual way"
)
# Source: vLLM 0.33, vllm/config/cache.py.
CACHES = {"fp8": "fp8", "int8": "int8_per_token_head", "int4": "int4_per_token_head"}
# Engines that keep prefixes by default, and whose option is --trust-remote-code.
# Source: vLLM 0.33, vllm/config/cache.py enable_prefix_caching; sglang 0.5.23 server_args.py
# disable_radix_cache; TensorRT-LLM 1.3 llmapi/llm_args.py enable_block_reuse.
PREFIX_CACHING = frozenset({"vllm", "sglang", "tensorrt_llm"})
FULL_CACHES = frozenset({"fp32", "bf16", "fp16"})  # formats that a server takes from the model
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def vllm_arguments(case: ExportCase) -> list[str]:
    """Return ``vllm serve`` with only the flags that the plan decides."""
    return [
        *("vllm", "serve", case.checkpoint(AT_LOAD)),
        *loading_flags(case, AT_LOAD, "--tokenizer"),
        *_layout(case),
        *format_flags(case, AT_LOAD, CACHES),
        *_limits(case),
        *_extras(case),
    ]


def loading_flags(case: ExportCase, at_load: Container[str], tokenizer: str) -> list[str]:
    """Return what a GGUF file and a repository with Python of its own need, by flags.

    Source: vLLM docs/features/quantization/gguf.md (the tokenizer of the base model, because its
    conversion from a GGUF file is slow and unstable).
    """
    is_file = case.checkpoint(at_load).endswith(".gguf")
    flags = [tokenizer, case.model] if is_file else []
    return [*flags, *(["--trust-remote-code"] if case.runs_remote_code else [])]


def _layout(case: ExportCase) -> list[str]:
    # vLLM counts attention data-parallel ranks in addition to tensor ranks.
    replicas = case.attention_ranks
    flags = size_flags(
        ("--tensor-parallel-size", case.size("tensor")),
        ("--pipeline-parallel-size", case.size("pipeline")),
        ("--data-parallel-size", case.size("data") * replicas),
    )
    if case.nodes > 1:
        flags += _rendezvous_flags(case)
    if case.size("expert") > 1 or replicas > 1:
        flags.append("--enable-expert-parallel")
    return flags


def replicas_per_node(case: ExportCase) -> int:
    """Return how many whole data-parallel replicas run on each node.

    The result is 0 if one replica spans nodes, or if there is only one replica.
    """
    replica = case.size("tensor") * case.size("pipeline")
    replicas = case.size("data") * case.attention_ranks
    return case.devices_per_node // replica if replicas > 1 else 0


def _rendezvous_flags(case: ExportCase) -> list[str]:
    local = replicas_per_node(case)
    if local:
        flags = ["--data-parallel-size-local", str(local), "--data-parallel-address", MASTER]
        return [*flags, "--data-parallel-rpc-port", str(PORT)]
    flags = ["--nnodes", str(case.nodes), "--node-rank", RANK]
    return [*flags, "--master-addr", MASTER, "--master-port", str(PORT)]


def format_flags(
    case: ExportCase, at_load: Mapping[str, str], caches: Mapping[str, str]
) -> list[str]:
    """Return the flags of weights and KV cache, which vLLM and SGLang share.

    ``at_load`` are the formats that the engine makes of a 16-bit checkpoint while loading.
    """
    weight = case.strategy.weight_dtype or "bf16"
    flags = ["--dtype", DTYPES.get(case.half, "bfloat16")]
    if not case.is_stored and case.checkpoint(at_load) == case.model and weight in at_load:
        flags += ["--quantization", at_load[weight]]
    stored = caches.get(case.strategy.kv_cache_dtype or "")
    return [*flags, *(["--kv-cache-dtype", stored] if stored else [])]


def _limits(case: ExportCase) -> list[str]:
    flags = ["--max-model-len", str(case.accepted_tokens)] if case.accepted_tokens else []
    if case.running_per_rank:
        flags += ["--max-num-seqs", str(case.running_per_rank)]
    if case.strategy.max_batch_tokens:
        flags += ["--max-num-batched-tokens", str(case.strategy.max_batch_tokens)]
    share = case.memory_share("vllm")
    return [*flags, *(["--gpu-memory-utilization", f"{share:g}"] if share else [])]


def _extras(case: ExportCase) -> list[str]:
    strategy, flags = case.strategy, []
    if strategy.chunked_prefill is not None:
        flags.append(f"--{'' if strategy.chunked_prefill else 'no-'}enable-chunked-prefill")
    if isinstance(case.workload, ServeWorkload) and case.workload.prefix_share_ratio:
        flags.append("--enable-prefix-caching")
    if case.offload.weights_cpu:
        flags += ["--cpu-offload-gb", f"{case.offloaded_weight_bytes / GIB:.1f}"]
    if strategy.speculative:
        draft = strategy.speculative
        setting = {"model": draft.draft_model, "num_speculative_tokens": draft.tokens}
        flags += ["--speculative-config", json.dumps({"method": "draft_model", **setting})]
    return flags


def serving_notes(
    case: ExportCase, engine: str, title: str, *, accepted_tokens: int | None = None
) -> Notes:
    """Return notes on settings that any server's command leaves to the user.

    ``accepted_tokens`` is the longest request that the command takes, if not the case's.
    """
    notes = []
    if case.plan.engine != engine:
        notes.append(f"the figures are for {case.plan.engine}; {title} has speeds of its own")
        share = case.strategy.gpu_memory_utilization
        if share:
            notes.append(
                f"gpu_memory_utilization {share:g} is in the meaning of {case.plan.engine}: "
                f"{title} starts with its own default"
            )
    notes += _length_notes(case, accepted_tokens or case.accepted_tokens)
    work = case.workload
    has_no_prefix = isinstance(work, ServeWorkload) and not work.prefix_share_ratio
    if engine in PREFIX_CACHING and has_no_prefix:
        notes.append(
            "prefix caching stays on, as by default; the figures count no common prefix: state "
            "workload.prefix_share_ratio if prompts share one"
        )
    if engine in PREFIX_CACHING and case.runs_remote_code:
        notes.append(
            "--trust-remote-code runs the Python of the model's repository, in which its "
            "tokenizer or configuration is: read it first"
        )
    split = case.strategy.disaggregated
    if split:
        notes.append(
            f"the plan prefills on {split.prefill_devices} and decodes on {split.decode_devices} "
            f"devices: start {title} once for each and connect the two"
        )
    if case.strategy.sparsity:
        notes.append(f"sparsity {case.strategy.sparsity:g} is a property of the checkpoint")
    if case.offload.weights_disk or case.offload.kv_cpu:
        notes.append("weights on disk and cache in host memory are not expressed here")
    return tuple(notes)


def cache_notes(case: ExportCase, formats: Container[str], title: str) -> Notes:
    """Return a note if a narrow cache is stored in the model's format instead."""
    dtype = case.strategy.kv_cache_dtype
    if dtype is None or dtype in formats or dtype in FULL_CACHES:
        return ()
    return (f"{title} has no cache in {dtype}: it is kept in the model's format, and is larger",)


def _length_notes(case: ExportCase, accepted_tokens: int | None) -> list[str]:
    """Return a note on the assumed maximum request length, if none is stated."""
    context = case.shape.max_position_embeddings
    if (case.typical_tokens or 0) > context:
        return [f"the model's context is {context} tokens: longer requests are refused"]
    if not isinstance(case.workload, ServeWorkload) or case.workload.max_request_tokens:
        return []
    together = f"prompt and answer together ({case.typical_tokens} is typical)"
    limit_text = f"requests up to {accepted_tokens} tokens are taken, {together}"
    return [f"{limit_text}: state another maximum in workload.max_request_tokens"]


def checkpoint_notes(case: ExportCase, at_load: Container[str]) -> Notes:
    """Return which checkpoint to name if the plan needs another one than the model's."""
    path = case.checkpoint(at_load)
    if path == case.model:
        return ()
    if path.endswith(".gguf"):
        note = (
            f"{path} is one GGUF file of {case.model}: take a published one (merge its parts by "
            "llama-gguf-split), or make it by llama.cpp's convert_hf_to_gguf.py and llama-quantize"
        )
        return (note,)
    weight = case.strategy.weight_dtype or "bf16"
    note = (
        f"{path} is a checkpoint of {case.model} in {weight}: take a published one, or make it "
        "with llm-compressor; the server reads its format from its config.json"
    )
    return (note,)


def vllm_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the command leaves to the user."""
    notes = [*serving_notes(case, "vllm", "vLLM"), *cache_notes(case, CACHES, "vLLM")]
    notes += checkpoint_notes(case, AT_LOAD)
    if case.strategy.weight_dtype == "nf4":
        notes.append(OWN_NF4)
    if case.checkpoint(AT_LOAD).endswith(".gguf"):
        notes.append(OWN_GGUF)
    if case.strategy.weight_dtype == "fp8" and not case.is_stored:
        notes.append("vLLM before 0.20 writes --quantization fp8")
    if case.nodes > 1:
        notes.append("run it on every node, NODE_RANK counting from 0; MASTER_ADDR is the first")
        if case.size("data") * case.attention_ranks > 1 and not replicas_per_node(case):
            notes.append("a replica spans nodes: start each replica as a server of its own")
    if case.size("context") > 1:
        notes.append("vLLM splits the context inside the tensor ranks only: it is left out")
    return tuple(notes)


def vllm_text(case: ExportCase) -> str:
    """Return the command, one option per line; only the first node serves requests."""
    split = layer_partition(case)
    if case.nodes == 1:
        return split + shell_lines(vllm_arguments(case))
    first = replicas_per_node(case)
    start = f" --data-parallel-start-rank $((NODE_RANK * {first}))" if first else ""
    others = f'if [ "$NODE_RANK" != 0 ]; then set -- --headless{start}; fi\n'
    return split + others + shell_lines([*vllm_arguments(case), "$@"])


def layer_partition(case: ExportCase) -> str:
    """Return the layers of each stage as an environment variable, if they differ.

    Source: vLLM, vllm/envs.py (by default it distributes a remainder in its own order).
    """
    layers = case.plan.memory.per_stage_layers
    if not layers or len(set(layers)) == 1:
        return ""
    return f"export VLLM_PP_LAYER_PARTITION={','.join(str(count) for count in layers)}\n"


VLLM = Format("vllm", "vLLM", "serve-vllm.sh", vllm_text, vllm_notes, at_load=AT_LOAD)
