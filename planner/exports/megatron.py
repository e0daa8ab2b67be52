"""Export a training plan as the arguments of Megatron-LM's ``pretrain_gpt.py``."""

from dataclasses import replace

from planner.catalog.models import rotary_embedding
from planner.exports.export import ExportCase, Format, Notes, shell_lines, size_flags
from planner.exports.train_script import (
    ADAPTERS,
    FUSED_UPDATES,
    layout_notes,
    optimizer_of,
    steps_of,
    torchrun_arguments,
    train_workload,
)
from planner.specs.base import PlannerError
from planner.specs.estimate import EstimateRequest
from planner.specs.model import LatentLayers, ModelSpec
from planner.workload.costing import estimate_request
from planner.workload.training_exchange import SHARDED_GRADIENTS

# Convert a model's shape to Megatron-LM arguments: widths, attention, experts.


def pairs(*flags: tuple[str, object]) -> list[str]:
    """Return flags with a value as words; None values are skipped."""
    return [word for flag, value in flags if value is not None for word in (flag, str(value))]


def _widths(shape: ModelSpec, sequence_length: int) -> list[str]:
    """Return the widths, without that of the vocabulary, which comes from the tokenizer.

    Megatron-LM rejects sequences longer than its position limit even for rotary embeddings, so the
    limit is raised to the sequence length.
    """
    positions = shape.learned_positions or shape.max_position_embeddings
    return pairs(
        ("--num-layers", shape.num_hidden_layers),
        ("--hidden-size", shape.hidden_size),
        ("--ffn-hidden-size", shape.intermediate_size or shape.moe_intermediate_size),
        ("--num-attention-heads", shape.num_attention_heads),
        ("--max-position-embeddings", max(positions, sequence_length)),
        ("--normalization", "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm"),
        ("--position-embedding-type", "learned_absolute" if shape.learned_positions else "rope"),
    )


def _blocks(shape: ModelSpec) -> list[str]:
    flags = {
        "--swiglu": shape.gated_mlp,
        "--untie-embeddings-and-output-weights": not shape.tie_word_embeddings,
        "--disable-bias-linear": not shape.mlp_bias,
    }
    return [flag for flag, applies in flags.items() if applies]


def _latent(shape: ModelSpec) -> LatentLayers | None:
    """Return the layers of a model that uses latent attention in every layer, or None."""
    groups = [group for group in shape.layers_by_attention if group.kind != "index"]
    first = groups[0]
    return first if len(groups) == 1 and isinstance(first, LatentLayers) else None


def _attention(shape: ModelSpec) -> list[str]:
    """Return the attention arguments; latent attention has its own widths and latent norms.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (``_add_mla_args``).
    """
    latent = _latent(shape)
    if latent:
        return [
            "--multi-latent-attention",
            *pairs(
                ("--q-lora-rank", latent.q_lora_rank),
                ("--kv-lora-rank", latent.kv_lora_rank),
                ("--qk-head-dim", latent.qk_nope_head_dim),
                ("--qk-pos-emb-head-dim", latent.qk_rope_head_dim),
                ("--v-head-dim", latent.v_head_dim),
            ),
            "--qk-layernorm",
        ]
    flags = pairs(("--kv-channels", shape.head_dim))
    if shape.num_key_value_heads != shape.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(shape.num_key_value_heads)]
    flags += ["--add-qkv-bias"] if shape.attention_bias and not shape.mlp_bias else []
    return [*flags, *(["--qk-layernorm"] if shape.qk_norm else [])]


def _experts(shape: ModelSpec) -> list[str]:
    if not shape.is_moe:
        return []
    flags = pairs(
        ("--num-experts", shape.num_experts),
        ("--moe-router-topk", shape.num_experts_per_tok),
        ("--moe-ffn-hidden-size", shape.moe_intermediate_size),
        ("--moe-token-dispatcher-type", "alltoall"),
    )
    if shape.num_dense_layers:  # in published mixtures the dense layers come first
        flags += ["--moe-layer-freq", f"([0]*{shape.num_dense_layers}+[1]*{shape.num_moe_layers})"]
    if shape.num_shared_experts:
        width = str(shape.shared_intermediate_size)
        flags += ["--moe-shared-expert-intermediate-size", width]
        flags += ["--moe-shared-expert-gate"] if shape.shared_expert_gate else []
    return [*flags, "--moe-grouped-gemm"]


def shape_notes(shape: ModelSpec) -> Notes:
    """Return the parts of the model's attention that have no argument."""
    kinds = {group.kind for group in shape.layers_by_attention}
    if kinds <= {"full"} or (_latent(shape) and "index" not in kinds):
        return ()
    return (f"attention layers ({', '.join(sorted(kinds))}) are written as full attention",)


OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "lion": "lion"}
FULLY_SHARDED = 3
OTHER_SCHEDULES = frozenset({"gpipe", "zero_bubble"})
SHARDED_OPTIMIZERS = frozenset({"adam", "sgd"})
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_arguments(case: ExportCase) -> list[str]:
    """Return the launch command with the model's shape, the batch and the layout."""
    program = torchrun_arguments(case.nodes, case.devices_per_node, "pretrain_gpt.py")
    return [
        *program,
        *_widths(case.shape, train_workload(case).sequence_length),
        *_attention(case.shape),
        *_rotary(case),
        *_blocks(case.shape),
        *_experts(case.shape),
        *_start(case),
        *_batch(case),
        *_layout(case),
        *_memory(case),
    ]


CHECKPOINT = "checkpoint"


def _start(case: ExportCase) -> list[str]:
    """Return the flags of a run that goes on from weights, which pre-training does not.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (--finetune loads the weights
    alone, and leaves optimiser, data and iteration).
    """
    is_new = train_workload(case).method == "pretrain"
    return [] if is_new else ["--load", CHECKPOINT, "--finetune"]


def _rotary(case: ExportCase) -> list[str]:
    """Return the base and the scaling of the rotary embedding, where the catalog knows them.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (--use-rope-scaling is Llama 3's,
    of factor 8 by default).
    """
    rotary = rotary_embedding(case.model)
    if rotary is None or case.shape.learned_positions:
        return []
    flags = ["--rotary-base", str(rotary.base)]
    if rotary.factor > 1:
        flags += ["--use-rope-scaling", "--rope-scaling-factor", f"{rotary.factor:g}"]
    return flags


def _overlap(case: ExportCase) -> list[str]:
    """Return the overlap of gradients and parameters with computation, where the plan has it.

    A pipeline reduces whole gradients after its last micro-batch.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (parameters are gathered beside
    gradients, and by the distributed optimiser alone).
    """
    ranks = case.size("data") * case.size("context")
    overlaps = case.size("pipeline") == 1 or (case.strategy.zero_stage or 0) >= SHARDED_GRADIENTS
    if ranks == 1 or not overlaps:
        return []
    gathers = (case.strategy.zero_stage or 0) >= 1 or _moves_states(case)
    return ["--overlap-grad-reduce", *(["--overlap-param-gather"] if gathers else [])]


def rotary_note(case: ExportCase) -> Notes:
    """Return what the user adds of the rotary embedding, which the plan does not know.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (--rotary-base 10000 by default).
    """
    if case.shape.learned_positions or _rotary(case):
        return ()
    note = (
        "add --rotary-base with the rope_theta of the model's config.json: Megatron-LM's default "
        "is 10000, Llama 3 has 500000; for Llama 3.1 and later also --use-rope-scaling"
    )
    return (note,)


def _batch(case: ExportCase) -> list[str]:
    workload = train_workload(case)
    return pairs(
        ("--seq-length", workload.sequence_length),
        ("--micro-batch-size", case.strategy.micro_batch_size or 1),
        ("--global-batch-size", workload.global_batch_size),
        ("--train-iters", steps_of(case)),
        ("--optimizer", OPTIMIZERS.get(optimizer_of(case))),
    )


def _layout(case: ExportCase) -> list[str]:
    flags = size_flags(
        ("--tensor-model-parallel-size", case.size("tensor")),
        ("--pipeline-model-parallel-size", case.size("pipeline")),
        ("--context-parallel-size", case.size("context")),
        ("--expert-model-parallel-size", case.size("expert")),
    )
    flags += _expert_tensor(case)
    chunks = case.strategy.virtual_pipeline_size or 1
    # Only one of the two flags: the layout also states the chunks per rank.
    if needs_layout(case):
        flags += ["--pipeline-model-parallel-layout", stage_layout(case)]
    elif chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    if case.strategy.sequence_parallel and case.size("tensor") > 1:
        flags.append("--sequence-parallel")
    if (case.strategy.zero_stage or 0) >= 1 or _moves_states(case):
        flags.append("--use-distributed-optimizer")
    flags += _overlap(case)
    if is_sharded(case):
        strategy = SHARDING[case.strategy.zero_stage or 0]
        flags += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
        flags += ["--ckpt-format", "fsdp_dtensor"]
    return flags


def _expert_tensor(case: ExportCase) -> list[str]:
    """Return the tensor ranks of an expert, where they are not all of a layer's.

    Plans give whole experts to ranks first; by default Megatron-LM cuts them by all tensor ranks.

    Source: Megatron-LM d98e8a6, megatron/core/model_parallel_config.py.
    """
    tensor, expert = case.size("tensor"), case.size("expert")
    cut = max(tensor, expert) // expert
    return ["--expert-tensor-parallel-size", str(cut)] if cut != tensor else []


def _optimizer(case: ExportCase) -> str:
    """Return Megatron-LM's optimiser: its default if it lacks the plan's."""
    return OPTIMIZERS.get(optimizer_of(case), "adam")


def is_sharded(case: ExportCase) -> bool:
    """Return whether Megatron-FSDP shards gradients or weights: only with two optimisers.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (it rejects other optimisers, any
    other checkpoint format, and a single connection to each device).
    """
    return case.strategy.zero_stage in SHARDING and _optimizer(case) in SHARDED_OPTIMIZERS


def megatron_environment(case: ExportCase) -> dict[str, str]:
    """Return the variables that Megatron-LM requires: one device connection for split layers.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (devices before Blackwell).
    """
    split = case.size("tensor") > 1 or case.size("context") > 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if split and not is_sharded(case) else {}


def needs_layout(case: ExportCase) -> bool:
    """Return whether the number of layers differs between stages or chunks.

    Source: Megatron-LM 000c4ac, megatron/training/arguments.py (without a layout the number of
    layers must be a multiple of the stages, and of the chunks in them).
    """
    parts = case.size("pipeline") * (case.strategy.virtual_pipeline_size or 1)
    stage_layers = case.plan.memory.per_stage_layers or ()
    uneven = len(set(stage_layers)) > 1 or case.shape.num_hidden_layers % parts != 0
    return case.size("pipeline") > 1 and uneven


def stage_layout(case: ExportCase) -> str:
    """Return the stages in Megatron-LM's notation: E is the embedding, t a layer, L the loss.

    Chunks are in execution order: the first chunk of every rank, then the second.

    Source: Megatron-LM, megatron/core/transformer/pipeline_parallel_layer_layout.py.
    """
    stages, chunks = case.size("pipeline"), case.strategy.virtual_pipeline_size or 1
    stage_layers = case.plan.memory.per_stage_layers or dealt(case.shape.num_hidden_layers, stages)
    shares = [dealt(layers, chunks) for layers in stage_layers]
    parts = [f"t*{share[chunk]}" for chunk in range(chunks) for share in shares]
    return f"E{'|'.join(parts)}L".replace("t*0", "")


def dealt(layers: int, parts: int) -> tuple[int, ...]:
    """Return the number of layers per part; the first parts take the remainder.

    >>> dealt(126, 8)
    (16, 16, 16, 16, 16, 16, 15, 15)
    """
    quotient, remainder = divmod(layers, parts)
    return tuple(quotient + (index < remainder) for index in range(parts))


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
    if _moves_states(case):
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if _moves_activations(case):
        layers = case.shape.num_hidden_layers
        moved = min(layers - 1, round(case.offload.activations_cpu * layers))  # never the last
        flags += ["--cpu-offloading-num-layers", str(moved)]
    if strategy.gradient_dtype == "bf16":
        flags.append("--grad-reduce-in-bf16")
    if (found := case.plan.reliability) is not None:
        flags += ["--save", "checkpoints", "--save-interval", str(found.checkpoint_interval_steps)]
    return flags


def _moves_states(case: ExportCase) -> bool:
    """Return whether Megatron-LM can offload the optimiser states to the host: only Adam's.

    Source: Megatron-LM d98e8a6, megatron/core/optimizer (a precision-aware, sharded optimiser).
    """
    return case.offload.optimizer == "cpu" and _optimizer(case) == "adam"


def _moves_activations(case: ExportCase) -> bool:
    """Return whether Megatron-LM can offload activations: one stage, no recomputation."""
    plain = case.strategy.activation_recomputation in {None, "none"}
    return case.offload.activations_cpu > 0 and case.size("pipeline") == 1 and plain


def megatron_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the arguments leave to the user or cannot express."""
    notes = ["add the data, the tokenizer (its vocabulary sets the logits) and the learning rate"]
    if steps_of(case) is None:
        notes.append("the plan does not say how long it runs: add --train-iters")
    notes += rotary_note(case)
    if _start(case):
        notes.append(
            f"--load {CHECKPOINT} names the weights of {case.model} in Megatron-LM's format: "
            "convert them by its tools/checkpoint/convert.py or Megatron Bridge; without --load "
            "the run starts from scratch"
        )
    notes += [*shape_notes(case.shape), *_offload_notes(case)]
    if case.strategy.zero_stage in SHARDING and not is_sharded(case):
        notes.append(
            f"Megatron-FSDP has AdamW and SGD: of {optimizer_of(case)} the states alone are "
            f"sharded, as in ZeRO 1, where the plan has ZeRO {case.strategy.zero_stage}"
        )
    method = train_workload(case).method
    if method in ADAPTERS | FUSED_UPDATES:
        notes.append(f"Megatron-LM has no method {method}: these arguments train all weights")
    if optimizer_of(case) not in OPTIMIZERS:
        notes.append(f"Megatron-LM has no optimiser {optimizer_of(case)}: its own is used")
    expressed_axes = frozenset({"layers", "tensor", "pipeline", "context", "expert"})
    notes += layout_notes(case, expressed_axes, "Megatron-LM")
    if case.strategy.pipeline_schedule in OTHER_SCHEDULES:
        notes.append(
            f"schedule {case.strategy.pipeline_schedule}: Megatron-LM runs 1F1B or interleaved"
        )
    return tuple(notes)


def as_run(case: ExportCase) -> tuple[ExportCase, Notes]:
    """Return the plan on a schedule that Megatron-LM supports, with new figures and a note.

    The plan is unchanged if the replacement schedule is rejected.
    """
    schedule = case.strategy.pipeline_schedule
    if schedule not in OTHER_SCHEDULES or case.size("pipeline") == 1:
        return case, ()
    strategy = case.strategy.model_copy(update={"pipeline_schedule": "1f1b"})
    request = EstimateRequest(
        model=case.shape,
        cluster=case.plan.cluster,
        workload=case.workload,
        strategy=strategy,
        engine=case.plan.engine,
    )
    try:
        estimate = estimate_request(request)
    except PlannerError:
        return case, ()
    figures = {
        name: getattr(estimate, name) for name in type(estimate).model_fields if name != "id"
    }
    fits = "" if estimate.fits else ", and it does not fit into memory"
    note = (
        f"the plan's schedule is {schedule}, which Megatron-LM does not run: these arguments and "
        f"figures are for 1F1B{fits}"
    )
    return replace(case, plan=case.plan.model_copy(update=figures)), (note,)


def _offload_notes(case: ExportCase) -> list[str]:
    """Return the plan's offloading that Megatron-LM does not support."""
    notes = []
    if case.offload.weights_share:
        notes.append("Megatron-LM keeps the weights on the devices: they are not offloaded")
    if case.offload.optimizer == "cpu" and not _moves_states(case):
        notes.append(f"Megatron-LM keeps the states of {optimizer_of(case)} on the devices")
    if case.offload.optimizer == "nvme":
        notes.append("Megatron-LM offloads optimiser states to host memory only, not to NVMe")
    if case.offload.activations_cpu and not _moves_activations(case):
        notes.append(
            "Megatron-LM moves activations to the host only without pipeline and recomputation"
        )
    return notes


def megatron_text(case: ExportCase) -> str:
    """Return the variables and the command, one option per line."""
    variables = (f"export {name}={value}\n" for name, value in megatron_environment(case).items())
    return "".join(variables) + shell_lines(megatron_arguments(case))


MEGATRON = Format("megatron", "Megatron-LM", "train-megatron.sh", megatron_text, megatron_notes)
