"""A training plan as the arguments of Megatron-LM's ``pretrain_gpt.py``."""

from planner.exports.case import ExportCase
from planner.exports.export import Format, Notes, shell_lines
from planner.exports.torchrun import torchrun_arguments
from planner.exports.training import (
    ADAPTERS,
    FUSED_UPDATES,
    is_uneven,
    layout_notes,
    optimizer_of,
    steps_of,
    train_workload,
)
from planner.specs.model import ModelSpec
from planner.workload.training_tiers import weights_share

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "lion": "lion"}
FULLY_SHARDED = 3
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_arguments(case: ExportCase) -> list[str]:
    """Return the launch with the model's shape, the batch and the layout."""
    program = torchrun_arguments(case.nodes, case.devices_per_node, "pretrain_gpt.py")
    return [
        *program,
        *_shape(case.shape),
        *_experts(case.shape),
        *_batch(case),
        *_layout(case),
        *_memory(case),
    ]


def _shape(shape: ModelSpec) -> list[str]:
    flags = _pairs(
        ("--num-layers", shape.num_hidden_layers),
        ("--hidden-size", shape.hidden_size),
        ("--ffn-hidden-size", shape.intermediate_size or shape.moe_intermediate_size),
        ("--num-attention-heads", shape.num_attention_heads),
        ("--kv-channels", shape.head_dim),
        ("--max-position-embeddings", shape.max_position_embeddings),
        ("--normalization", "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm"),
        ("--position-embedding-type", "learned_absolute" if shape.learned_positions else "rope"),
    )
    if shape.num_key_value_heads != shape.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(shape.num_key_value_heads)]
    for flag, applies in (
        ("--swiglu", shape.gated_mlp),
        ("--untie-embeddings-and-output-weights", not shape.tie_word_embeddings),
        ("--disable-bias-linear", not shape.mlp_bias),
        ("--add-qkv-bias", shape.attention_bias and not shape.mlp_bias),
        ("--qk-layernorm", shape.qk_norm),
    ):
        flags += [flag] if applies else []
    return flags


def _experts(shape: ModelSpec) -> list[str]:
    if not shape.is_moe:
        return []
    flags = _pairs(
        ("--num-experts", shape.num_experts),
        ("--moe-router-topk", shape.num_experts_per_tok),
        ("--moe-ffn-hidden-size", shape.moe_intermediate_size),
        ("--moe-token-dispatcher-type", "alltoall"),
    )
    if shape.num_shared_experts:
        width = shape.num_shared_experts * shape.moe_intermediate_size
        flags += ["--moe-shared-expert-intermediate-size", str(width)]
    return [*flags, "--moe-grouped-gemm"]


def _batch(case: ExportCase) -> list[str]:
    workload = train_workload(case)
    return _pairs(
        ("--seq-length", workload.sequence_length),
        ("--micro-batch-size", case.strategy.micro_batch_size or 1),
        ("--global-batch-size", workload.global_batch_size),
        ("--train-iters", steps_of(case)),
        ("--optimizer", OPTIMIZERS.get(optimizer_of(case))),
    )


def _layout(case: ExportCase) -> list[str]:
    sizes = (
        ("--tensor-model-parallel-size", case.size("tensor")),
        ("--pipeline-model-parallel-size", case.size("pipeline")),
        ("--context-parallel-size", case.size("context")),
        ("--expert-model-parallel-size", case.size("expert")),
        (
            "--num-virtual-stages-per-pipeline-rank",
            case.strategy.virtual_pipeline_size or 1,
        ),
    )
    flags = _pairs(*((flag, size) for flag, size in sizes if size > 1))
    if is_uneven(case):
        flags += ["--pipeline-model-parallel-layout", stage_layout(case)]
    if case.strategy.sequence_parallel and case.size("tensor") > 1:
        flags.append("--sequence-parallel")
    stage = case.strategy.zero_stage or 0
    if stage >= 1:
        flags.append("--use-distributed-optimizer")
    if stage in SHARDING:
        flags += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", SHARDING[stage]]
    return flags


def stage_layout(case: ExportCase) -> str:
    """Return the stages as Megatron-LM spells them: E embeds, t is a layer, L the loss.

    Source: Megatron-LM, docs, "Custom Pipeline Model Parallel Layout".
    """
    stages = [f"t*{held}" for held in case.plan.memory.per_stage_layers or ()]
    return f"E{'|'.join(stages)}L"


def _memory(case: ExportCase) -> list[str]:
    strategy = case.strategy
    flags = [f"--{strategy.compute_dtype}"] if strategy.compute_dtype in {"bf16", "fp16"} else []
    if strategy.activation_recomputation == "selective":
        flags += ["--recompute-granularity", "selective"]
    if strategy.activation_recomputation == "full":
        flags += ["--recompute-granularity", "full"]
        flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if strategy.attention == "flash":
        flags += ["--attention-backend", "flash"]
    if case.offload.optimizer == "cpu":
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if _moves_activations(case):
        flags += ["--cpu-offloading-num-layers", str(_layers_away(case))]
    if strategy.gradient_dtype == "bf16":
        flags.append("--grad-reduce-in-bf16")
    return flags


def _moves_activations(case: ExportCase) -> bool:
    """Return whether Megatron-LM can move the activations: one stage, nothing computed again."""
    plain = case.strategy.activation_recomputation in {None, "none"}
    return case.offload.activations_cpu > 0 and case.size("pipeline") == 1 and plain


def _layers_away(case: ExportCase) -> int:
    """Return how many layers' activations leave: the last one's are needed at once."""
    layers = case.shape.num_hidden_layers
    return min(layers - 1, round(case.offload.activations_cpu * layers))


def _pairs(*pairs: tuple[str, object]) -> list[str]:
    return [word for flag, value in pairs if value is not None for word in (flag, str(value))]


def megatron_notes(case: ExportCase) -> Notes:
    """Return what the arguments leave open or cannot say."""
    notes = ["add the data, the tokenizer (its vocabulary sets the logits) and the learning rate"]
    if steps_of(case) is None:
        notes.append("the plan does not say how long it runs: add --train-iters")
    notes += _offload_notes(case)
    method = train_workload(case).method
    if method in ADAPTERS | FUSED_UPDATES:
        notes.append(f"Megatron-LM has no method {method}: these arguments train all weights")
    if optimizer_of(case) not in OPTIMIZERS:
        notes.append(f"Megatron-LM has no optimiser {optimizer_of(case)}: its own is used")
    said = frozenset({"layers", "tensor", "pipeline", "context", "expert"})
    notes += layout_notes(case, said, "Megatron-LM")
    if case.strategy.pipeline_schedule in {"gpipe", "zero_bubble"}:
        notes.append(
            f"schedule {case.strategy.pipeline_schedule}: Megatron-LM runs 1F1B or interleaved"
        )
    return tuple(notes)


def _offload_notes(case: ExportCase) -> list[str]:
    """Return what the plan keeps off the device and Megatron-LM cannot."""
    notes = []
    if weights_share(case.offload):
        notes.append("Megatron-LM keeps the weights on the devices: they are not offloaded")
    if case.offload.optimizer == "nvme":
        notes.append("Megatron-LM offloads optimiser states to host memory only, not to NVMe")
    if case.offload.activations_cpu and not _moves_activations(case):
        notes.append(
            "Megatron-LM moves activations to the host only without pipeline and recomputation"
        )
    return notes


def megatron_text(case: ExportCase) -> str:
    """Return the command, an option a line."""
    return shell_lines(megatron_arguments(case))


MEGATRON = Format("megatron", "Megatron-LM", "train-megatron.sh", megatron_text, megatron_notes)
