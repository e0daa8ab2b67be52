"""Final evaluation and publication of a training: model or adapter, card and figures."""

import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.artefacts import card_text, publish_model, weight_file_bytes
from runners.jobs.energy import Work
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import TORCH_DTYPES, ready
from runners.jobs.memory import Peak, PeakMeter, optimizer_bytes
from runners.jobs.model_folders import opened_model
from runners.jobs.runtime import BadInputError
from runners.jobs.train.integers import learning
from runners.jobs.train.quantized import made_plain
from runners.jobs.train.sources import Data
from runners.jobs.train.trainer import Trainer, steady
from runners.jobspec import ArtefactModel, FolderModel, TrainSpec
from runners.measured_window import TRAINING

FINAL_EVALUATION_TOKENS = 8192  # the default of the other jobs, for comparable figures


class Prepared(NamedTuple):
    """Everything that training needs; with ``lora`` the model's own weights are frozen."""

    trainer: Trainer
    tokenizer: PreTrainedTokenizerFast
    text: str
    data: Data
    meter: PeakMeter
    lora: Lora | None


def finish(prepared: Prepared, peak: Peak) -> None:
    """Evaluate the trained model, publish it and report the run's figures."""
    if prepared.data.classes:
        _finish_classifier(prepared, peak)
        return
    trainer, spec = prepared.trainer, prepared.trainer.spec
    job = trainer.job
    job.emitter.phase("Evaluating on held-out text")
    trainer.model.set_attn_implementation("sdpa")  # as it will be loaded
    trained = _trained_figures(trainer)
    if prepared.lora is not None:
        trained |= _publish_adapter(prepared, prepared.lora)
    trained |= _data_figures(prepared)
    model = prepared.lora.merge() if prepared.lora is not None else made_plain(trainer.model)
    model = ready(model, dtype=TORCH_DTYPES[spec.published_dtype])
    perplexity = evaluate(model, trainer.held_out.ids, FINAL_EVALUATION_TOKENS)
    parameters = float(sum(each.numel() for each in model.parameters()))
    perplexity_figures = perplexity.measured()
    measured = {
        **_measured(trainer, peak),
        **perplexity_figures,
        "parameters": parameters,
        **trained,
    }
    notes = {"perplexity": perplexity.note(), **_notes(prepared, peak)}
    if spec.lora is None or spec.lora.is_merged:
        job.emitter.phase("Saving the model")
        card = _card(spec, measured, notes)
        _publish_model(prepared, model, card, {"perplexity": perplexity.value})
    folder = job.output_dir("model" if spec.lora is None or spec.lora.is_merged else "adapter")
    measured["disk_bytes"] = float(weight_file_bytes(folder))
    job.emitter.result(measured, notes, Work((TRAINING,), trainer.trained_tokens))


def _finish_classifier(prepared: Prepared, peak: Peak) -> None:
    """Evaluate a classifier on the held-out samples, publish it and report its figures."""
    trainer, spec = prepared.trainer, prepared.trainer.spec
    job = trainer.job
    job.emitter.phase("Judging on held-out samples")
    trainer.model.set_attn_implementation("sdpa")  # as it will be loaded
    measured = {
        **_measured(trainer, peak),
        "parameters": float(sum(each.numel() for each in trainer.model.parameters())),
        **_trained_figures(trainer),
        **_data_figures(prepared),
    }
    notes = _notes(prepared, peak)
    job.emitter.phase("Saving the model")
    model = ready(trainer.model, dtype=TORCH_DTYPES[spec.published_dtype])
    quality = {name: measured[name] for name in ("accuracy", "f1")}
    _publish_model(prepared, model, _card(spec, measured, notes), quality)
    measured["disk_bytes"] = float(weight_file_bytes(job.output_dir("model")))
    job.emitter.result(measured, notes, Work((TRAINING,), trainer.trained_tokens))


def _trained_figures(trainer: Trainer) -> dict[str, float]:
    """Return the number of trained parameters and the optimizer's bytes."""
    trained = sum(each.numel() for each in learning(trainer.model).values())
    return {
        "trainable_parameters": float(trained),
        "optimizer_bytes": float(optimizer_bytes(trainer.optimizer)),
    }


def _data_figures(prepared: Prepared) -> dict[str, float]:
    """Return the data's figures, and the loss on its held-out part."""
    if prepared.data.judged is None:
        return prepared.data.measured
    return prepared.data.measured | prepared.data.judged.result(prepared.trainer.model)


def _publish_model(
    prepared: Prepared, model: PreTrainedModel, card: str, facts: dict[str, float]
) -> None:
    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        prepared.tokenizer.save_pretrained(str(folder))

    publish_model(prepared.trainer.job, write, card, facts)


def _publish_adapter(prepared: Prepared, lora: Lora) -> dict[str, float]:
    """Publish the adapter in peft's format; return its figures, evaluated unmerged."""
    trainer = prepared.trainer
    job, spec = trainer.job, trainer.spec
    base = spec.model
    if not isinstance(base, FolderModel | ArtefactModel) or spec.lora is None:
        raise BadInputError("an adapter needs a base with trained weights")
    perplexity = evaluate(trainer.model, trainer.held_out.ids, FINAL_EVALUATION_TOKENS)
    digest = weights_digest(opened_model(base, job.host_dir))
    measured = {"adapter_perplexity": perplexity.value, **_trained_figures(trainer)}
    card = _card(spec, measured, {"adapter_perplexity": perplexity.note()}, "Adapter")
    facts = {**spec.lora.model_dump(), "base": base.model_dump(), "perplexity": perplexity.value}
    publish_model(job, lambda folder: lora.save(folder, base, digest), card, facts, "adapter")
    measured["adapter_disk_bytes"] = float(weight_file_bytes(job.output_dir("adapter")))
    return measured


def _measured(trainer: Trainer, peak: Peak) -> dict[str, float]:
    step_seconds = statistics.median(steady(trainer.step_seconds or [0.0]))
    state, best = trainer.state, trainer.evaluator.best.exported
    tokens = state.tokens / max(1, state.step)
    return {
        "tokens_per_second": tokens / step_seconds if step_seconds else 0.0,
        "step_seconds": step_seconds,
        "peak_memory_bytes": float(peak.bytes),
        "runtime_memory_bytes": float(peak.start_bytes),
        "final_loss": trainer.last_loss,
        "tokens": float(state.tokens),
        "steps": float(state.step),
        "training_seconds": state.elapsed_seconds,
        **trainer.writer.figures(),
        **trainer.watch.figures(),
        **({"exported_step": float(best.step)} if best else {}),
    }


def _notes(prepared: Prepared, peak: Peak) -> dict[str, str]:
    trainer, lora = prepared.trainer, prepared.trainer.spec.lora
    notes = {
        "peak_memory_bytes": peak.how,
        "runtime_memory_bytes": "held before the model was built: interpreter and libraries",
        "step_seconds": "median over the run's steps without the first two",
        "text": prepared.text,
        "device": str(trainer.device),
        "threads": str(torch.get_num_threads()),
    }
    notes |= _kernel_notes(trainer) | prepared.data.notes
    if prepared.data.judged is not None:
        notes["data_loss"] = "a label, on samples that were kept from training by their content"
    if lora is not None:
        notes["lora"] = (
            f"peft: rank {lora.rank}, alpha {lora.alpha}, {lora.targets} layers; perplexity is "
            "of the merged weights, adapter_perplexity of base and adapter side by side"
        )
    if lora is not None and lora.base_dtype == "nf4":
        notes["lora"] += (
            "; the base was held in nf4 while it trained, and the adapter is merged into the base "
            "of the full width, which its 4-bit copy does not read text exactly as"
        )
    return notes | _course_notes(trainer)


def _course_notes(trainer: Trainer) -> dict[str, str]:
    """Return notes on the ranks, checkpoints, early stop and resumption."""
    notes = {}
    if not trainer.ranks.is_alone:
        notes["ranks"] = _ranks_note(trainer)
    if trainer.writer.num_written:
        notes["checkpoint_wait_seconds"] = trainer.writer.note()
    notes |= trainer.watch.notes() | trainer.evaluator.notes(trainer.state)
    if trainer.resumed_at_step is not None:
        notes["resumed"] = f"from the checkpoint at step {trainer.resumed_at_step}"
    return notes


def _kernel_notes(trainer: Trainer) -> dict[str, str]:
    """Return notes on the kernels that training used, and the speedup of compiling."""
    kernels = {"sdpa": "torch's fused attention (SDPA)", "eager": "scores as separate products"}
    notes = {"attention": kernels.get(trainer.attention, trainer.attention)}
    if trainer.blocks is not None:
        notes["attention"] = trainer.blocks.note()
    if isinstance(trainer.optimizer, torch.optim.AdamW):
        notes["optimizer"] = "AdamW, all of a weight's update in one kernel"
    if trainer.spec.compute_dtype == "fp8":
        notes["products"] = _products_note(trainer)
    if trainer.compiled is not None:
        notes["compiled"] = trainer.compiled.note(trainer.step_seconds)
    return notes


def _products_note(trainer: Trainer) -> str:
    from runners.jobs.train.narrow_products import products_note  # torchao is large

    return products_note(trainer.device)


def _ranks_note(trainer: Trainer) -> str:
    """Return a note on how the ranks shared the work."""
    size, layout = trainer.ranks.size, trainer.spec.layout
    if layout is None:
        return f"{size}, each with its share of every step's micro-batches"
    if trainer.spec.parallel.on_lost_rank == "shrink":
        layout = layout.restaged(size)  # the size after ranks were lost
    sizes = layout.model_dump(exclude_defaults=True)
    return f"{size}, laid out as {', '.join(f'{name} {value}' for name, value in sizes.items())}"


def _card(
    spec: TrainSpec, measured: dict[str, float], notes: dict[str, str], what: str = "Model"
) -> str:
    own = {name: getattr(spec, name).model_dump_json() for name in ("model", "data")}
    settings = {**spec.model_dump(exclude=set(own)), **own}
    return card_text(
        f"{what} trained by Slipway",
        {"Settings": settings, "Evaluation": measured, "How it was measured": notes},
    )
