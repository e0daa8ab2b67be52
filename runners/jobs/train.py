"""Train a model on the host's own text: ``python -m runners.jobs.train ATTEMPT_DIR``."""

import shutil
import statistics
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
from runners.jobs.memory import Peak, PeakMeter, model_bytes
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
from runners.jobspec import DemoModel, RandomModel, TrainSpec

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


Trained = tuple[Trainer, PreTrainedTokenizerFast, str, Peak]


def _train(job: Job, spec: TrainSpec, ranks: Ranks) -> Trained | None:
    """Return what training made, or None when it was stopped and a checkpoint stands."""
    trainer, tokenizer, text, meter = _prepare(job, spec, ranks)
    job.emitter.phase("Training")
    return (trainer, tokenizer, text, meter.read()) if trainer.run() else None


def _prepare(
    job: Job, spec: TrainSpec, ranks: Ranks
) -> tuple[Trainer, PreTrainedTokenizerFast, str, PeakMeter]:
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
    trainer = Trainer(job, spec, model, train_ids, held_out, device, ranks)
    trainer.resume()
    trainer.tell_held(weights=model_bytes(model), runtime_overhead=meter.read().start_bytes)
    return trainer, tokenizer, text, meter


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
    """Return the model with fp32 weights, which AdamW updates; the products run as bf16."""
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
    return load_folder(folder, "fp32", device)


def _finish(trainer: Trainer, tokenizer: PreTrainedTokenizerFast, text: str, peak: Peak) -> None:
    job = trainer.job
    job.emitter.phase("Evaluating on held-out text")
    trainer.model.set_attn_implementation("sdpa")  # as it will be loaded
    model = ready(trainer.model, dtype=TORCH_DTYPES[trainer.spec.compute_dtype])
    perplexity = evaluate(model, trainer.held_out_ids, FINAL_EVALUATION_TOKENS)
    measured = _measured(trainer, perplexity, peak)
    notes = _notes(trainer, text, perplexity, peak)
    job.emitter.phase("Saving the model")

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))

    card = _card(trainer.spec, measured, notes)
    body = publish_model(job, write, card, {"perplexity": perplexity.value})
    measured["disk_bytes"] = float(weight_file_bytes(job.output_dir(body.name)))
    job.emitter.result(measured, notes)


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
        "parameters": float(sum(each.numel() for each in trainer.model.parameters())),
        "tokens": float(state.tokens),
        "steps": float(state.step),
        "training_seconds": state.elapsed_seconds,
        **perplexity.measured(),
    }


def _notes(trainer: Trainer, text: str, perplexity: Perplexity, peak: Peak) -> dict[str, str]:
    notes = {
        "perplexity": perplexity.note(),
        "peak_memory_bytes": peak.how,
        "runtime_memory_bytes": "held before the model was built: interpreter and libraries",
        "step_seconds": "median over the run's steps without the first two",
        "text": text,
        "device": str(trainer.device),
        "threads": str(torch.get_num_threads()),
    }
    if not trainer.ranks.is_alone:
        notes["ranks"] = f"{trainer.ranks.size}, each with its share of every step's micro-batches"
    if trainer.resumed_at_step is not None:
        notes["resumed"] = f"from the checkpoint at step {trainer.resumed_at_step}"
    return notes


def _card(spec: TrainSpec, measured: dict[str, float], notes: dict[str, str]) -> str:
    settings = {**spec.model_dump(exclude={"model"}), "model": spec.model.model_dump_json()}
    return card_text(
        "Model trained by Slipway",
        {"Settings": settings, "Evaluation": measured, "How it was measured": notes},
    )


if __name__ == "__main__":
    run_job("train", work)
