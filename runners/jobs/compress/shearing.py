"""Sheared LLaMA at small scale: learn pruning masks for a target shape, prune, train further.

All layers have the same shape, so any engine loads the result. Weights and optimiser state stay in
memory in fp32. Source: Xia et al. 2023, arXiv:2310.06694, sections 2.1 and 2.2.
"""

# mypy: disable-error-code="no-untyped-call"
# Some functions of transformers have no type annotations.

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from runners.evaluate_options import window_of
from runners.jobs.artefacts import weight_file_bytes
from runners.jobs.compress.engine import Compressed
from runners.jobs.compress.folding import check_shape_known
from runners.jobs.compress.layerwise import check_disk
from runners.jobs.compress.masks import Masks, masked
from runners.jobs.compress.shear_progress import Learner, Progress
from runners.jobs.compress.structure import keep, key_value_heads, spread
from runners.jobs.compress.whole_model import held_out_of, load_whole
from runners.jobs.corpus import load_corpus
from runners.jobs.domains import Domains, Losses, domains_of
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import BASE_DTYPE, ready, require_tokenizer
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.stages import Stages
from runners.jobspec import CompressSpec
from runners.shear_options import Shape, Shear

SEQUENCES_A_STEP = 8
MASK_LEARNING_RATE = 0.1
# Disk: the model and, while a checkpoint is replaced, two checkpoints. A weight takes 2 bytes in
# the source and 12 in a checkpoint (fp32 weight and two fp32 Adam moments).
WITH_CHECKPOINTS = 1 + 2 * 6
RAMP_SHARE = 0.5  # share of the mask steps over which the target sparsity ramps up
WEIGHTS_FOLLOW_TIMES = 8  # updates of the domain weights per recovery
MAX_GRAD_NORM = 1.0
OnStep = Callable[[float], None]


def by_shearing(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> Compressed:
    """Prune to the target shape, train further and save; return the loss of each domain."""
    loaded = load_whole(source, "fp32")
    model, tokenizer = loaded.model, require_tokenizer(loaded, "the text to learn from")
    held_out = held_out_of(job, loaded, source)
    length, _scored = window_of(int(model.config.max_position_embeddings))
    torch.manual_seed(spec.seed)
    domains = domains_of(load_corpus(), tokenizer, job.cache_dir, length, spec.seed)
    stages, steps = stages.via(job.emitter), spec.shear.mask_steps + spec.shear.recovery_steps
    reference, before = domains.losses(model), model.num_parameters()
    matrices = matrix_count(model)
    shape = spec.shear.target(shape_of(model.config), spec.sparsity)
    progress, done = Progress(job.checkpoint_dir), spec.shear.mask_steps
    masks = learn(
        model, domains, shape, spec.shear, lambda at: stages.advance(at / steps), progress
    )
    cut(model, masks.kept(shape), shape)
    pruned: Losses = progress.document.get("pruned") or domains.losses(model)
    recovery = Recovery(masks, reference, pruned, progress)
    recover(model, domains, recovery, spec.shear, lambda at: stages.advance((done + at) / steps))
    losses = domains.losses(model)
    ready(model, dtype=BASE_DTYPE)
    model.config.dtype = BASE_DTYPE
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    progress.clear()
    perplexity = evaluate(model, held_out, spec.evaluation_tokens)
    figures = {
        "removed_parameters_share": 1.0 - model.num_parameters() / before,
        "compressed_bytes": 2.0 * matrix_count(model),
        "original_matrix_bytes": 2.0 * matrices,
    }
    for name, weight in domains.weights.items():
        figures |= {
            f"{name}_loss": losses[name],
            f"pruned_{name}_loss": pruned[name],
            f"original_{name}_loss": reference[name],
            f"{name}_weight": weight,
        }
    return Compressed(perplexity, figures)


def check_shearable(source: Path, spec: CompressSpec, job: Job) -> None:
    """Check that the model can be pruned to the target shape.

    Raises:
        BadInputError: the model type is not supported, the target is larger than or equal to the
            model, or the disk is too small.
    """
    check_disk(job.attempt_dir, WITH_CHECKPOINTS * weight_file_bytes(source))
    config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    check_shape_known(config.model_type, "sheared_llama prunes")
    full = shape_of(config)
    target = spec.shear.target(full, spec.sparsity)
    for name, size, wanted in zip(Shape._fields, full, target, strict=True):
        if wanted > size:
            msg = f"shear.{name} is {wanted} and the model has {size}; choose at most as many"
            raise BadInputError(msg)
    if target == full:
        msg = f"sparsity {spec.sparsity:g} removes nothing of {full}; choose a larger share"
        raise BadInputError(msg)


def shape_of(config: PretrainedConfig) -> Shape:
    """Return the shape of a model config."""
    return Shape(
        int(config.num_hidden_layers),
        int(config.hidden_size),
        key_value_heads(config),
        int(config.intermediate_size),
    )


def matrix_count(model: PreTrainedModel) -> int:
    """Return the number of weights in the layers' matrices."""
    return sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))


def learn(
    model: PreTrainedModel,
    domains: Domains,
    target: Shape,
    shear: Shear,
    on_step: OnStep,
    progress: Progress | None = None,
) -> Masks:
    """Learn masks of the target shape together with the model's weights; return the masks.

    If ``progress`` is already in the recovery phase, only load the masks; ``recover`` loads the
    weights.
    """
    masks = Masks(shape_of(model.config), seed=0)
    if progress and progress.document.get("phase") == "recovery":
        progress.fill({"masks": masks})
        return masks
    weights = torch.optim.AdamW(model.parameters(), lr=shear.learning_rate / 5)
    logits = torch.optim.Adam(masks.logits.parameters(), lr=MASK_LEARNING_RATE)
    multiplier_parameters = [*masks.linear.parameters(), *masks.quadratic.parameters()]
    multipliers = torch.optim.Adam(multiplier_parameters, lr=MASK_LEARNING_RATE, maximize=True)
    optimizers = {"weights": weights, "logits": logits, "multipliers": multipliers}
    learner = Learner({"model": model, "masks": masks}, optimizers, domains.random)
    first = progress.resume("masks", learner) if progress else 0
    model.train()
    for step in range(first, shear.mask_steps):
        ids = domains.batch(SEQUENCES_A_STEP)
        ramp = min(1.0, (step + 1) / max(1.0, RAMP_SHARE * shear.mask_steps))
        with torch.enable_grad(), masked(model, masks.draw()):
            loss = model(ids, labels=ids, use_cache=False).loss + masks.penalty(target, ramp)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        on_step(step + 1)
        if progress:
            progress.keep("masks", step + 1, learner, {})
    torch.nn.Module.eval(model)
    return masks


class Recovery(NamedTuple):
    """Inputs of a recovery: the masks, and the losses before and after pruning."""

    masks: Masks
    reference: Losses
    pruned: Losses
    progress: Progress | None = None


def recover(
    model: PreTrainedModel, domains: Domains, begun: Recovery, shear: Shear, on_step: OnStep
) -> None:
    """Train the pruned model; sample more from the domains with the largest loss gap."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=shear.learning_rate)
    modules = {"model": model, "masks": begun.masks}
    learner = Learner(modules, {"weights": optimizer}, domains.random)
    first = _resume_or_start(learner, domains, begun)
    every = max(1, shear.recovery_steps // WEIGHTS_FOLLOW_TIMES)
    model.train()
    for step in range(first, shear.recovery_steps):
        if step % every == 0:
            torch.nn.Module.eval(model)
            domains.follow(domains.losses(model), begun.reference)
            model.train()
        share = step / shear.recovery_steps
        for group in optimizer.param_groups:
            group["lr"] = shear.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
        ids = domains.batch(SEQUENCES_A_STEP)
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step + 1)
        if begun.progress:
            figures = {"pruned": begun.pruned, "weights": domains.weights}
            begun.progress.keep("recovery", step + 1, learner, figures)
    torch.nn.Module.eval(model)


def _resume_or_start(learner: Learner, domains: Domains, begun: Recovery) -> int:
    """Resume a recovery or save its first checkpoint; return the number of finished steps."""
    if begun.progress is None:
        return 0
    first = begun.progress.resume("recovery", learner)
    if begun.progress.document.get("phase") == "recovery":
        domains.weights = dict(begun.progress.document["weights"])
        return first
    figures = {"pruned": begun.pruned, "weights": domains.weights}
    begun.progress.keep("recovery", 0, learner, figures, is_due=True)
    return 0


@torch.no_grad()
def cut(model: PreTrainedModel, kept: Mapping[str, torch.Tensor], shape: Shape) -> None:
    """Prune a model and its config to the indices of ``Masks.kept``, in place."""
    config, inner = model.config, model.get_submodule("model")
    groups, heads = key_value_heads(config), int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    layers = list(inner.get_submodule("layers").children())
    for layer, own_heads, channels in zip(layers, kept["heads"], kept["channels"], strict=True):
        shared, own = spread(own_heads, head_dim), spread(own_heads, heads // groups * head_dim)
        cut_layer(layer, {"q": own, "k": shared, "v": shared}, channels, kept["hidden"])
    stay = kept["layers"].tolist()
    inner.layers = torch.nn.ModuleList([layers[at] for at in stay])
    for at, layer in enumerate(inner.layers):
        vars(layer.get_submodule("self_attn"))["layer_idx"] = at  # index in the KV cache
    _cut_embeddings(model, kept["hidden"])
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[at] for at in stay]
    config.num_hidden_layers, config.hidden_size = shape.layers, shape.hidden_size
    config.intermediate_size, config.head_dim = shape.intermediate_size, head_dim
    config.num_key_value_heads = shape.key_value_heads
    config.num_attention_heads = shape.key_value_heads * (heads // groups)


def cut_layer(
    layer: torch.nn.Module,
    heads: Mapping[str, torch.Tensor],
    channels: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Keep only the given heads, channels and hidden units of one layer."""
    for name, places in heads.items():
        keep(layer, f"self_attn.{name}_proj", places, 0)
        keep(layer, f"self_attn.{name}_proj", hidden, 1)
    keep(layer, "self_attn.o_proj", heads["q"], 1)
    keep(layer, "self_attn.o_proj", hidden, 0)
    for name in ("gate", "up"):
        keep(layer, f"mlp.{name}_proj", channels, 0)
        keep(layer, f"mlp.{name}_proj", hidden, 1)
    keep(layer, "mlp.down_proj", channels, 1)
    keep(layer, "mlp.down_proj", hidden, 0)
    for name in ("input_layernorm", "post_attention_layernorm"):
        _cut_norm(layer.get_submodule(name), hidden)


def _cut_embeddings(model: PreTrainedModel, hidden: torch.Tensor) -> None:
    """Keep only the given hidden units of the embedding, final norm and output layer."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output.weight is embedding.weight
    kept = torch.nn.Parameter(embedding.get_parameter("weight")[:, hidden].contiguous())
    others = torch.nn.Parameter(output.get_parameter("weight")[:, hidden].contiguous())
    embedding.weight, output.weight = kept, kept if is_tied else others
    vars(embedding)["embedding_dim"] = vars(output)["in_features"] = len(hidden)
    _cut_norm(model.get_submodule("model.norm"), hidden)


def _cut_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> None:
    """Keep only the given units of a norm; rescale for the mean square over fewer units."""
    weight = norm.get_parameter("weight")
    ratio = math.sqrt(len(weight) / len(hidden))
    norm.weight = torch.nn.Parameter((weight[hidden] * ratio).contiguous())
