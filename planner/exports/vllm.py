"""A serving plan as the command line of vLLM."""

import shlex

from planner.specs.plan import PlannedStrategy
from planner.specs.strategy import Strategy
from planner.specs.workload import ServeWorkload, Workload

# What vLLM calls a weight format when it quantises at load time; other formats name a checkpoint.
QUANTIZATION = {"fp8": "fp8", "int4": "awq_marlin", "nf4": "bitsandbytes"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def vllm_arguments(model: str, strategy: Strategy, workload: Workload) -> list[str]:
    """Return ``vllm serve`` with the flags that the plan decides, and no others."""
    command = ["vllm", "serve", model]
    for flag, size in (
        ("--tensor-parallel-size", strategy.tensor_parallel_size),
        ("--pipeline-parallel-size", strategy.pipeline_parallel_size),
        ("--data-parallel-size", strategy.data_parallel_size),
    ):
        if size and size > 1:
            command += [flag, str(size)]
    if (strategy.expert_parallel_size or 1) > 1:
        command.append("--enable-expert-parallel")
    weight = strategy.weight_dtype or "bf16"
    command += ["--dtype", DTYPES.get(weight, "bfloat16")]
    if weight in QUANTIZATION:
        command += ["--quantization", strategy.quantization or QUANTIZATION[weight]]
    if strategy.kv_cache_dtype == "fp8":
        command += ["--kv-cache-dtype", "fp8"]
    if isinstance(workload, ServeWorkload):
        command += _limits(workload, strategy.data_parallel_size or 1)
    if strategy.max_batch_tokens:
        command += ["--max-num-batched-tokens", str(strategy.max_batch_tokens)]
    return command


def _limits(workload: ServeWorkload, replicas: int) -> list[str]:
    flags = ["--max-model-len", str(workload.input_tokens + workload.output_tokens)]
    if workload.concurrency:
        flags += ["--max-num-seqs", str(-(-workload.concurrency // replicas))]
    return flags


def export_vllm(model: str, plan: PlannedStrategy, workload: Workload) -> str:
    """Return the command as one line of shell."""
    return shlex.join(vllm_arguments(model, plan.strategy, workload)) + "\n"
