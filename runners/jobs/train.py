"""Train a model on the host's own text: ``python -m runners.jobs.train ATTEMPT_DIR``."""

import shutil
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.artefacts import card_text, publish_model, weight_file_bytes
from runners.jobs.corpus import Corpus, load_corpus
from runners.jobs.evaluation import Perplexity, evaluate
from runners.jobs.loading import (
    TORCH_DTYPES,
    demo_config,
    fresh_model,
    load_folder,
    load_tokenizer,
    opened_model,
    pick_device,
    ready,
    stored_quantisation,
)
from runners.jobs.memory import Peak, PeakMeter, model_bytes, optimizer_bytes
from runners.jobs.ranks import RankLostError, Ranks, joined_ranks
from runners.jobs.runtime import (
    BadInputError,
    Job,
    MissingModelError,
    checkpoint_on_sigterm,
    end_by_sigterm,
    run_job,
)
from runners.jobs.telemetry import gpu_telemetry
from runners.jobs.tokenizer import demo_tokenizer, tokenized
from runners.jobs.trainer import Trainer, steady
from runners.jobspec import ArtefactModel, DemoModel, FolderModel, RandomModel, TrainSpec

FINAL_EVALUATION_TOKENS = 8192  # as the other jobs take by default: their figures then compare


def work(job: Job) -> None:
    """Run one training attempt from text to published model."""
    checkpoint_on_sigterm(job)
    spec = job.spec_of(TrainSpec)
    with gpu_telemetry(job.emitter):
        try:
            with joined_ranks(job, spec.parallel) as ranks:
                trained = _train(job, spec, ranks)
        except RankLostError as error:
            sys.exit(f"RANK_LOST: {error}")
        if trained is None:
            end_by_sigterm(job)
            return
        if ranks.is_lead:
            _finish(*trained)
    shutil.rmtree(job.checkpoint_dir, ignore_errors=True)


class Prepared(NamedTuple):
    """What training needs; with an adapter the model's own weights stay as they are."""

    trainer: Trainer
    tokenizer: PreTrainedTokenizerFast
    text: str
    meter: PeakMeter
    lora: Lora | None


def _train(job: Job, spec: TrainSpec, ranks: Ranks) -> tuple[Prepared, Peak] | None:
    """Return what training made, or None when it was stopped and a checkpoint stands."""
    prepared = _prepare(job, spec, ranks)
    job.emitter.phase("Training")
    return (prepared, prepared.meter.read()) if prepared.trainer.run() else None


def _prepare(job: Job, spec: TrainSpec, ranks: Ranks) -> Prepared:
    """Return what training needs, and a note of the text: the text itself is let go."""
    _check_share(ranks, spec)
    job.emitter.phase("Reading text")
    corpus = load_corpus()
    job.emitter.phase("Preparing tokens")
    tokenizer = _tokenizer(job, spec, corpus)
    train_ids = tokenized(tokenizer, corpus.train, f"{corpus.digest}/train", job.cache_dir)
    held_out = tokenized(tokenizer, corpus.held_out, f"{corpus.digest}/held-out", job.cache_dir)
    _check_same_text(ranks, corpus.digest)
    text = f"corpus {corpus.digest[:16]}, {len(corpus.train)} training documents"
    del corpus
    device = pick_device()
    job.emitter.phase("Building the model")
    meter = PeakMeter(device)
    torch.manual_seed(spec.seed)
    model = _model(job, spec, tokenizer, device)
    if device.type == "cpu":
        # For short sequences the plain product was 20-45 % faster per step than torch's flash
        # kernel for CPUs (192 wide, 4 layers, bf16, AVX-512).
        model.set_attn_implementation("eager")
    weights = model_bytes(model)
    lora = Lora(model, spec.lora) if spec.lora else None
    trainer = Trainer(job, spec, model, train_ids, held_out, device, ranks)
    trainer.resume()
    adapters = {"adapters": lora.bytes} if lora else {}
    trainer.tell_held(weights=weights, runtime_overhead=meter.read().start_bytes, **adapters)
    return Prepared(trainer, tokenizer, text, meter, lora)


def _check_share(ranks: Ranks, spec: TrainSpec) -> None:
    """Refuse more ranks than a step has micro-batches.

    Raises:
        BadInputError: some ranks would have nothing to do.
    """
    if spec.gradient_accumulation_steps < ranks.size:
        msg = (
            f"{ranks.size} ranks share {spec.gradient_accumulation_steps} micro-batches a step; "
            "ask for at least as many, with a larger batch or smaller micro-batches"
        )
        raise BadInputError(msg)


def _check_same_text(ranks: Ranks, digest: str) -> None:
    """Refuse to train on texts that differ from rank to rank: one step would be several.

    Raises:
        BadInputError: the lead's text is another one.
    """
    mine = float(int(digest[:12], 16))  # 48 bits: exact as a float
    (lead,) = ranks.total([mine if ranks.is_lead else 0.0])
    if mine != lead:
        msg = (
            "this host's text is not the first host's: it comes with Python, so install the same "
            "Python version on every host of the pool"
        )
        raise BadInputError(msg)


def _tokenizer(job: Job, spec: TrainSpec, corpus: Corpus) -> PreTrainedTokenizerFast:
    if isinstance(spec.model, DemoModel):
        return demo_tokenizer(corpus, spec.model.vocab_size, job.cache_dir)
    if isinstance(spec.model, RandomModel):
        msg = "training needs a tokenizer, and random weights have none: choose the demo model"
        raise BadInputError(msg)
    folder = opened_model(spec.model, job.host_dir)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        msg = f"{folder} lacks tokenizer.json, which training needs; add it to the folder"
        raise MissingModelError(msg)
    return tokenizer


def _model(
    job: Job, spec: TrainSpec, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> PreTrainedModel:
    """Return the model with fp32 weights, which AdamW updates; the products run as bf16.

    Weights that stay as they are under an adapter are held as they will be used.
    """
    if isinstance(spec.model, DemoModel):
        positions = min(spec.model.max_position_embeddings, spec.sequence_length)
        config = demo_config(spec.model) | {
            "max_position_embeddings": positions,  # beyond what it saw, it knows nothing
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        return ready(fresh_model(config, torch.float32), device=device)
    if isinstance(spec.model, RandomModel):
        msg = "random weights have no tokenizer to train with"
        raise BadInputError(msg)
    folder = opened_model(spec.model, job.host_dir)
    if stored_quantisation(folder) is not None:
        msg = f"{folder} holds quantised weights, which do not train; take its original"
        raise BadInputError(msg)
    return load_folder(folder, spec.compute_dtype if spec.lora else "fp32", device)


def _finish(prepared: Prepared, peak: Peak) -> None:
    trainer, spec = prepared.trainer, prepared.trainer.spec
    job = trainer.job
    job.emitter.phase("Evaluating on held-out text")
    trainer.model.set_attn_implementation("sdpa")  # as it will be loaded
    trained = _trained_figures(trainer)
    if prepared.lora is not None:
        trained |= _publish_adapter(prepared, prepared.lora)
    model = prepared.lora.merge() if prepared.lora is not None else trainer.model
    model = ready(model, dtype=TORCH_DTYPES[spec.compute_dtype])
    perplexity = evaluate(model, trainer.held_out_ids, FINAL_EVALUATION_TOKENS)
    parameters = float(sum(each.numel() for each in model.parameters()))
    measured = {**_measured(trainer, perplexity, peak), "parameters": parameters, **trained}
    notes = _notes(prepared, perplexity, peak)
    if spec.lora is None or spec.lora.is_merged:
        job.emitter.phase("Saving the model")
        card = _card(spec, measured, notes)
        _publish_model(prepared, model, card, perplexity)
    folder = job.output_dir("model" if spec.lora is None or spec.lora.is_merged else "adapter")
    measured["disk_bytes"] = float(weight_file_bytes(folder))
    job.emitter.result(measured, notes)


def _trained_figures(trainer: Trainer) -> dict[str, float]:
    """Return how much was trained, and what the optimiser held for it."""
    trained = sum(each.numel() for each in trainer.model.parameters() if each.requires_grad)
    return {
        "trainable_parameters": float(trained),
        "optimizer_bytes": float(optimizer_bytes(trainer.optimizer)),
    }


def _publish_model(
    prepared: Prepared, model: PreTrainedModel, card: str, perplexity: Perplexity
) -> None:
    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        prepared.tokenizer.save_pretrained(str(folder))

    publish_model(prepared.trainer.job, write, card, {"perplexity": perplexity.value})


def _publish_adapter(prepared: Prepared, lora: Lora) -> dict[str, float]:
    """Leave the adapter as peft reads it, and return its figures: it is judged unmerged."""
    trainer = prepared.trainer
    job, spec = trainer.job, trainer.spec
    base = spec.model
    if not isinstance(base, FolderModel | ArtefactModel) or spec.lora is None:
        raise BadInputError("an adapter needs a base with trained weights")
    perplexity = evaluate(trainer.model, trainer.held_out_ids, FINAL_EVALUATION_TOKENS)
    digest = weights_digest(opened_model(base, job.host_dir))
    measured = {"adapter_perplexity": perplexity.value, **_trained_figures(trainer)}
    card = _card(spec, measured, {"adapter_perplexity": perplexity.note()}, "Adapter")
    facts = {**spec.lora.model_dump(), "base": base.model_dump(), "perplexity": perplexity.value}
    publish_model(job, lambda folder: lora.save(folder, base, digest), card, facts, "adapter")
    measured["adapter_disk_bytes"] = float(weight_file_bytes(job.output_dir("adapter")))
    return measured


def _measured(trainer: Trainer, perplexity: Perplexity, peak: Peak) -> dict[str, float]:
    step_seconds = statistics.median(steady(trainer.step_seconds or [0.0]))
    spec, state = trainer.spec, trainer.state
    tokens = spec.micro_batch_size * spec.sequence_length * spec.gradient_accumulation_steps
    return {
        "tokens_per_second": tokens / step_seconds if step_seconds else 0.0,
        "step_seconds": step_seconds,
        "peak_memory_bytes": float(peak.bytes),
        "runtime_memory_bytes": float(peak.start_bytes),
        "final_loss": trainer.last_loss,
        "tokens": float(state.tokens),
        "steps": float(state.step),
        "training_seconds": state.elapsed_seconds,
        **perplexity.measured(),
    }


def _notes(prepared: Prepared, perplexity: Perplexity, peak: Peak) -> dict[str, str]:
    trainer, lora = prepared.trainer, prepared.trainer.spec.lora
    notes = {
        "perplexity": perplexity.note(),
        "peak_memory_bytes": peak.how,
        "runtime_memory_bytes": "held before the model was built: interpreter and libraries",
        "step_seconds": "median over the run's steps without the first two",
        "text": prepared.text,
        "device": str(trainer.device),
        "threads": str(torch.get_num_threads()),
    }
    if lora is not None:
        notes["lora"] = (
            f"peft: rank {lora.rank}, alpha {lora.alpha}, {lora.targets} layers; perplexity is "
            "of the merged weights, adapter_perplexity of base and adapter side by side"
        )
    if not trainer.ranks.is_alone:
        notes["ranks"] = f"{trainer.ranks.size}, each with its share of every step's micro-batches"
    if trainer.resumed_at_step is not None:
        notes["resumed"] = f"from the checkpoint at step {trainer.resumed_at_step}"
    return notes


def _card(
    spec: TrainSpec, measured: dict[str, float], notes: dict[str, str], what: str = "Model"
) -> str:
    settings = {**spec.model_dump(exclude={"model"}), "model": spec.model.model_dump_json()}
    return card_text(
        f"{what} trained by Slipway",
        {"Settings": settings, "Evaluation": measured, "How it was measured": notes},
    )


if __name__ == "__main__":
    run_job("train", work)
