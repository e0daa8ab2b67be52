"""Sheared LLaMA at small scale: learn pruning masks for a target shape, prune, train further."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from runners.jobs.compress.layerwise import CompressionResult, check_disk
from runners.jobs.compress.pruning import group_indices, keep_slices, key_value_heads
from runners.jobs.compress.quantization import check_shape_known
from runners.jobs.compress.whole_model import held_out_of, load_whole
from runners.jobs.corpus import Domains, Losses, domains_of, load_corpus
from runners.jobs.evaluation import evaluate
from runners.jobs.events import Stages
from runners.jobs.inputs import check_unchanged, model_digest
from runners.jobs.loading import BASE_DTYPE, ready, require_tokenizer
from runners.jobs.runtime import BadInputError, Job, weight_file_bytes
from runners.jobs.train.checkpoint import checkpoints, publish_checkpoint, remove_older_checkpoints
from runners.jobs.weights import config_of
from runners.jobspec import CompressSpec
from runners.jobspec.compress import Shape, Shear, window_of

# Learnable pruning masks over layers, heads, hidden units and channels.
#
# Each mask is a hard concrete variable. Lagrange multipliers constrain the expected number of kept
# units to the target, which ramps from the full shape. Sources: Louizos et al. 2017,
# arXiv:1712.01312, section 2.2; Xia et al. 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.1.


TEMPERATURE, LOW, HIGH = 0.83, -0.1, 1.1
FIRST_LOGIT = 2.5  # initially nearly everything is kept
FIRST_NOISE = 0.01
NEARLY_ONE = 1.0 - 1e-6
DIMENSIONS = ("layers", "hidden", "heads", "channels")
Values = Mapping[str, torch.Tensor]


class Masks(torch.nn.Module):
    """Logits per layer, per hidden unit, and per key-value head and channel of each layer."""

    def __init__(self, full: Shape, seed: int) -> None:
        """Initialise the logits so that nearly everything is kept."""
        super().__init__()
        self.full = full
        random = torch.Generator().manual_seed(seed)
        sizes = {
            "layers": (full.layers,),
            "hidden": (full.hidden_size,),
            "heads": (full.layers, full.key_value_heads),
            "channels": (full.layers, full.intermediate_size),
        }
        self.logits = torch.nn.ParameterDict(
            {
                name: FIRST_LOGIT + FIRST_NOISE * torch.randn(size, generator=random)
                for name, size in sizes.items()
            }
        )
        self.linear = torch.nn.ParameterDict({name: torch.zeros(()) for name in sizes})
        self.quadratic = torch.nn.ParameterDict({name: torch.zeros(()) for name in sizes})

    def draw(self) -> Values:
        """Sample mask values in [0, 1] from the hard concrete distribution."""
        values = {}
        for name, logit in self.logits.items():
            chance = torch.rand_like(logit).clamp(1 - NEARLY_ONE, NEARLY_ONE)
            noise = chance.log() - (1 - chance).log()
            stretched = torch.sigmoid((noise + logit) / TEMPERATURE) * (HIGH - LOW) + LOW
            values[name] = stretched.clamp(0, 1)
        return values

    def shares(self) -> Values:
        """Return the expected kept share per dimension; for heads and channels, per layer."""
        shift = TEMPERATURE * math.log(-LOW / HIGH)
        return {name: torch.sigmoid(each - shift).mean(-1) for name, each in self.logits.items()}

    def penalty(self, target: Shape, ramp: float) -> torch.Tensor:
        """Return the Lagrangian penalty on the gap between expected and target shape.

        ``ramp`` from 0 to 1 moves the target from the full shape to ``target``.
        """
        total = torch.zeros(())
        for name, share in self.shares().items():
            target_share = 1.0 - ramp * (1.0 - target.size(name) / self.full.size(name))
            gap = share - target_share
            total = total + (self.linear[name] * gap + self.quadratic[name] * gap**2).sum()
        return total

    def indices_to_keep(self, target: Shape) -> dict[str, torch.Tensor]:
        """Return the sorted indices of the highest logits per dimension: the units to keep."""
        return {
            name: self.logits[name].detach().topk(target.size(name)).indices.sort(-1).values
            for name in DIMENSIONS
        }


@contextmanager
def apply_masks(model: PreTrainedModel, values: Values) -> Iterator[None]:
    """Apply mask values to a model's activations inside the block."""
    handles = [
        model.get_input_embeddings().register_forward_hook(_scaled_output(values["hidden"]))
    ]
    for at, layer in enumerate(model.get_submodule("model.layers").children()):
        outputs = values["hidden"] * values["layers"][at]
        attention = layer.get_submodule("self_attn.o_proj")
        down = layer.get_submodule("mlp.down_proj")
        width = attention.get_parameter("weight").shape[1] // len(values["heads"][at])
        inputs = (values["heads"][at].repeat_interleave(width), values["channels"][at])
        for module, scale in zip((attention, down), inputs, strict=True):
            handles.append(module.register_forward_pre_hook(_scaled_input(scale)))
            handles.append(module.register_forward_hook(_scaled_output(outputs)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaled_input(scale: torch.Tensor) -> Any:  # noqa: ANN401 - a hook's signature is torch's
    return lambda _module, given: (given[0] * scale,)


def _scaled_output(scale: torch.Tensor) -> Any:  # noqa: ANN401 - a hook's signature is torch's
    return lambda _module, _given, output: output * scale


# Atomic checkpoints of pruning by learnt masks, so that a killed job can resume.
#
# They hold weights, optimiser state and both random generators, so a resumed run takes the same
# steps as an uninterrupted one.


# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.


EVERY_SECONDS = 30.0
WRITING_SHARE = 0.05  # largest share of the time spent writing: large models are saved less often
RANDOM = "random"
Phase = Literal["masks", "recovery"]
PHASES: tuple[Phase, ...] = ("masks", "recovery")


class PruningState(NamedTuple):
    """The state that a training step changes."""

    modules: Mapping[str, torch.nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    random: np.random.Generator


@dataclass
class Progress:
    """Checkpoints of one pruning run; reads use the newest."""

    folder: Path
    every_seconds: float = EVERY_SECONDS
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests by what the run reads
    _next_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Schedule the first checkpoint."""
        self._next_at = time.monotonic() + self.every_seconds

    @property
    def document(self) -> dict[str, Any]:
        """Return phase, step and figures of the newest checkpoint; empty if there is none."""
        checkpoint = self._newest()
        if checkpoint is None:
            return {}
        document: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        return document

    def check(self) -> str:
        """Return a remark if the newest checkpoint says nothing of its inputs, else nothing.

        Raises:
            BadInputError: it is of another model or text.
        """
        document = self.document
        if not document:
            return ""
        where = f"the checkpoint at step {document['step']} of the phase {document['phase']}"
        return check_unchanged(where, document.get("inputs", {}), self.inputs)

    def resume(self, phase: Phase, learner: PruningState) -> int:
        """Load the newest checkpoint if it is of the phase; return its step, else 0."""
        document, checkpoint = self.document, self._newest()
        if checkpoint is None or document["phase"] != phase:
            return 0
        self.fill(learner.modules)
        for name, optimizer in learner.optimizers.items():
            _fill(optimizer, load_file(checkpoint / f"{name}.optimizer.safetensors"))
        torch.set_rng_state(load_file(checkpoint / f"{RANDOM}.safetensors")[RANDOM])
        learner.random.bit_generator.state = document[RANDOM]
        return int(document["step"])

    def fill(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Load the parameters of the newest checkpoint into modules."""
        checkpoint = self._newest()
        if checkpoint is None:
            return
        for name, module in modules.items():
            tensors = load_file(checkpoint / f"{name}.safetensors")
            with torch.no_grad():
                for key, parameter in module.named_parameters():
                    parameter.copy_(tensors[key])

    def keep(
        self,
        phase: Phase,
        step: int,
        learner: PruningState,
        figures: Mapping[str, Any],
        *,
        is_due: bool = False,
    ) -> None:
        """Write a checkpoint if the interval has passed or ``is_due`` is set."""
        started = time.monotonic()
        if started < self._next_at and not is_due:
            return
        document = {
            "phase": phase, "step": step, "inputs": dict(self.inputs),
            RANDOM: learner.random.bit_generator.state, **figures,
        }  # fmt: skip

        def write(building: Path) -> None:
            for name, module in learner.modules.items():
                own = module.named_parameters()
                tensors = {key: each.detach().contiguous() for key, each in own}
                save_file(tensors, building / f"{name}.safetensors")
            for name, optimizer in learner.optimizers.items():
                path = building / f"{name}.optimizer.safetensors"
                save_file(_tensors(optimizer), path)
            save_file({RANDOM: torch.get_rng_state()}, building / f"{RANDOM}.safetensors")
            (building / "state.json").write_text(json.dumps(document))

        publish_checkpoint(self.folder, PHASES.index(phase) * 10_000_000 + step, write)
        remove_older_checkpoints(self.folder)
        finished = time.monotonic()
        self._next_at = finished + max(self.every_seconds, (finished - started) / WRITING_SHARE)

    def _newest(self) -> Path | None:
        return next(iter(checkpoints(self.folder)[-1:]), None)

    def clear(self) -> None:
        """Delete every checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimiser's state tensors as ``{parameter index}.{state name}``."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().contiguous()
        for index, values in state.items()
        for name, value in values.items()
    }


def _fill(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    document = optimizer.state_dict()
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        document["state"].setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(document)


# mypy: disable-error-code="no-untyped-call"
# Some functions of transformers have no type annotations.


SEQUENCES_A_STEP = 8
MASK_LEARNING_RATE = 0.1
# Disk: the model and, while a checkpoint is replaced, two checkpoints. A weight takes 2 bytes in
# the source and 12 in a checkpoint (fp32 weight and two fp32 Adam moments).
WITH_CHECKPOINTS = 1 + 2 * 6
RAMP_SHARE = 0.5  # share of the mask steps over which the target sparsity ramps up
WEIGHTS_FOLLOW_TIMES = 8  # updates of the domain weights per recovery
MAX_GRAD_NORM = 1.0
OnStep = Callable[[float], None]


def prune_by_shearing(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> CompressionResult:
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
    inputs = {"model": model_digest(source), "host's own text": load_corpus().digest}
    progress, done = Progress(job.checkpoint_dir, inputs=inputs), spec.shear.mask_steps
    if remark := progress.check():
        job.emitter.log(f"resumed; {remark}")
    masks = train_masks(
        model, domains, shape, spec.shear, lambda at: stages.advance(at / steps), progress
    )
    prune_to_indices(model, masks.indices_to_keep(shape), shape)
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
    return CompressionResult(perplexity, figures)


def check_shearable(source: Path, spec: CompressSpec, job: Job) -> None:
    """Check that the model can be pruned to the target shape.

    Raises:
        BadInputError: the model type is not supported, the target is larger than or equal to the
            model, or the disk is too small.
    """
    check_disk(job.attempt_dir, WITH_CHECKPOINTS * weight_file_bytes(source))
    config = config_of(source)
    check_shape_known(config.model_type, "sheared_llama prunes")
    full = shape_of(config)
    target = spec.shear.target(full, spec.sparsity)
    for name, size, wanted in zip(Shape._fields, full, target, strict=True):
        if wanted > size:
            msg = f"shear.{name} is {wanted} and the model has {size}; choose at most {size}"
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


def train_masks(
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
    learner = PruningState({"model": model, "masks": masks}, optimizers, domains.random)
    first = progress.resume("masks", learner) if progress else 0
    model.train()
    for step in range(first, shear.mask_steps):
        ids = domains.batch(SEQUENCES_A_STEP)
        ramp = min(1.0, (step + 1) / max(1.0, RAMP_SHARE * shear.mask_steps))
        with torch.enable_grad(), apply_masks(model, masks.draw()):
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
    learner = PruningState(modules, {"weights": optimizer}, domains.random)
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


def _resume_or_start(learner: PruningState, domains: Domains, begun: Recovery) -> int:
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
def prune_to_indices(
    model: PreTrainedModel, indices_to_keep: Mapping[str, torch.Tensor], shape: Shape
) -> None:
    """Prune a model and its config to the indices of ``Masks.indices_to_keep``, in place."""
    config, inner = model.config, model.get_submodule("model")
    groups, heads = key_value_heads(config), int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    layers = list(inner.get_submodule("layers").children())
    for layer, own_heads, channels in zip(
        layers, indices_to_keep["heads"], indices_to_keep["channels"], strict=True
    ):
        shared, own = (
            group_indices(own_heads, head_dim),
            group_indices(own_heads, heads // groups * head_dim),
        )
        prune_layer(
            layer, {"q": own, "k": shared, "v": shared}, channels, indices_to_keep["hidden"]
        )
    stay = indices_to_keep["layers"].tolist()
    inner.layers = torch.nn.ModuleList([layers[at] for at in stay])
    for at, layer in enumerate(inner.layers):
        vars(layer.get_submodule("self_attn"))["layer_idx"] = at  # index in the KV cache
    _cut_embeddings(model, indices_to_keep["hidden"])
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[at] for at in stay]
    config.num_hidden_layers, config.hidden_size = shape.layers, shape.hidden_size
    config.intermediate_size, config.head_dim = shape.intermediate_size, head_dim
    config.num_key_value_heads = shape.key_value_heads
    config.num_attention_heads = shape.key_value_heads * (heads // groups)


def prune_layer(
    layer: torch.nn.Module,
    heads: Mapping[str, torch.Tensor],
    channels: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Keep only the given heads, channels and hidden units of one layer."""
    for name, places in heads.items():
        keep_slices(layer, f"self_attn.{name}_proj", places, 0)
        keep_slices(layer, f"self_attn.{name}_proj", hidden, 1)
    keep_slices(layer, "self_attn.o_proj", heads["q"], 1)
    keep_slices(layer, "self_attn.o_proj", hidden, 0)
    for name in ("gate", "up"):
        keep_slices(layer, f"mlp.{name}_proj", channels, 0)
        keep_slices(layer, f"mlp.{name}_proj", hidden, 1)
    keep_slices(layer, "mlp.down_proj", channels, 1)
    keep_slices(layer, "mlp.down_proj", hidden, 0)
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
