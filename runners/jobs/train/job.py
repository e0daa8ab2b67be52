"""The training job, from tokens to the published model."""

import hashlib
import shutil
import sys

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.compress_options import WeightDtype
from runners.jobs.adapters import Lora
from runners.jobs.corpus import Corpus, load_corpus
from runners.jobs.loading import (
    demo_config,
    fresh_model,
    load_folder,
    load_tokenizer,
    pick_device,
    ready,
    stored_quantisation,
)
from runners.jobs.memory import Peak, PeakMeter, map_large_blocks, model_bytes
from runners.jobs.model_folders import opened_model
from runners.jobs.ranks import RankFailedError, Ranks, joined_ranks
from runners.jobs.runtime import (
    BadInputError,
    Job,
    MissingModelError,
    checkpoint_on_sigterm,
    end_by_sigterm,
)
from runners.jobs.telemetry import job_telemetry
from runners.jobs.tokenizer import TokenIds, demo_tokenizer, tokenized
from runners.jobs.train.attending import JUDGED, attend
from runners.jobs.train.classifying import classifier, read_labelled
from runners.jobs.train.evaluator import HeldOut
from runners.jobs.train.mixture import mixture_of
from runners.jobs.train.outcome import Prepared, finish
from runners.jobs.train.quantized import quantize_for_training
from runners.jobs.train.sources import Data, OwnText, read_data
from runners.jobs.train.text_samples import Sampler, prompts_of
from runners.jobs.train.trainer import Trainer
from runners.jobspec import ArtefactModel, DemoModel, FolderModel, RandomModel, TrainSpec
from runners.measured_window import TRAINING

LEAST_VOCABULARY = 257  # every byte, and the end of text
BASE_DTYPES: dict[str, WeightDtype] = {"nf4": "int4"}  # an adapter's base_dtype -> load dtype


def work(job: Job) -> None:
    """Run one training attempt, from text to published model."""
    checkpoint_on_sigterm(job)
    map_large_blocks()
    spec = job.spec_of(TrainSpec)
    with job_telemetry(job):
        try:
            with joined_ranks(job, spec.parallel) as ranks:
                trained = _train(job, spec, ranks)
        except RankFailedError as error:
            sys.exit(f"RANK_LOST: {error}")
        if trained is None:
            end_by_sigterm(job)
            return
        if ranks.is_lead:
            finish(*trained)
    if ranks.local_rank == 0:  # the lead reads its host's folder until it has finished
        shutil.rmtree(job.checkpoint_dir, ignore_errors=True)


def _train(job: Job, spec: TrainSpec, ranks: Ranks) -> tuple[Prepared, Peak] | None:
    """Train; return the result, or None if it was stopped after a checkpoint."""
    prepared = _prepare(job, spec, ranks)
    trainer = prepared.trainer
    job.emitter.phase(TRAINING)
    if not trainer.run():
        return None
    peak = prepared.meter.read()
    trainer.layout.synchronise()
    whole = trainer.layout.whole()
    if whole is not None:
        if trainer.blocks is not None:
            whole.set_attn_implementation(JUDGED)
        trainer.model = _widened(whole) if spec.compute_dtype == "fp8" else whole
        trainer.evaluator.finish(trainer.model, trainer.state)
    return prepared, peak


def _prepare(job: Job, spec: TrainSpec, ranks: Ranks) -> Prepared:
    """Build everything that training needs; the corpus itself is freed."""
    _check_share(ranks, spec)
    job.emitter.phase("Reading text")
    corpus = load_corpus()
    job.emitter.phase("Preparing tokens")
    tokenizer = _tokenizer(job, spec, corpus)
    data, held_out = _data(job, spec, tokenizer, corpus)
    _check_same_text(ranks, corpus.digest + data.digest)
    text = f"corpus {corpus.digest[:16]}, {len(corpus.train)} training documents"
    del corpus
    device = pick_device()
    job.emitter.phase("Building the model")
    meter = PeakMeter(device)
    torch.manual_seed(spec.seed)
    if data.classes:
        model = classifier(job, spec, data.classes, tokenizer, device)
    else:
        model = _model(job, spec, tokenizer, device)
    blocks = attend(model, spec.attention, device)
    if spec.quantized is not None:
        quantize_for_training(model, spec.quantized)
    weights = model_bytes(model)
    lora = _adapter(job, spec, model, device)
    held_out_rows = HeldOut(held_out, data.judged)
    trainer = Trainer(job, spec, model, data.batches, held_out_rows, device, ranks, blocks)
    trainer.meter = meter
    trainer.evaluator.mixture = mixture_of(data, spec)
    if spec.text_samples is not None:
        prompts = prompts_of(spec.text_samples, tokenizer, data.judged, held_out)
        longest = spec.sequence_length
        trainer.evaluator.sampler = Sampler(job, spec.text_samples, tokenizer, prompts, longest)
    trainer.resume()
    if lora is None:
        weights = trainer.layout.weight_bytes()
    adapters = {"adapters": lora.bytes} if lora else {}
    trainer.report_held(weights=weights, runtime_overhead=meter.read().start_bytes, **adapters)
    return Prepared(trainer, tokenizer, text, data, meter, lora)


def _widened(model: PreTrainedModel) -> PreTrainedModel:
    from runners.jobs.train.narrow_products import widened  # torchao is large

    return widened(model)


def _data(
    job: Job, spec: TrainSpec, tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> tuple[Data, TokenIds]:
    """Return the training data, and the host's held-out text; classification uses none."""
    if spec.objective == "classification":
        return read_labelled(job, spec, tokenizer, corpus), np.zeros(0, dtype=np.int32)
    train_ids = tokenized(tokenizer, corpus.train, f"{corpus.digest}/train", job.cache_dir)
    held_out = tokenized(tokenizer, corpus.held_out, f"{corpus.digest}/held-out", job.cache_dir)
    return read_data(job, spec, tokenizer, OwnText(train_ids, held_out)), held_out


def _adapter(
    job: Job, spec: TrainSpec, model: PreTrainedModel, device: torch.device
) -> Lora | None:
    """Return the LoRA adapter, if requested; a 4-bit base also gets the original weights."""
    base = spec.model
    if spec.lora is None or not isinstance(base, FolderModel | ArtefactModel):
        return None
    if spec.lora.base_dtype == "compute":
        return Lora(model, spec.lora)
    folder = opened_model(base, job.host_dir)
    return Lora(model, spec.lora, lambda: load_folder(folder, spec.compute_dtype, device))


def _check_share(ranks: Ranks, spec: TrainSpec) -> None:
    """Check that a step has at least one micro-batch per rank.

    Raises:
        BadInputError: some ranks would have nothing to do.
    """
    if spec.layout is None and spec.gradient_accumulation_steps < ranks.size:
        msg = (
            f"{ranks.size} ranks share {spec.gradient_accumulation_steps} micro-batches a step; "
            "ask for at least as many, with a larger batch or smaller micro-batches"
        )
        raise BadInputError(msg)


def _check_same_text(ranks: Ranks, digest: str) -> None:
    """Check that all ranks have the same text.

    Raises:
        BadInputError: the lead's text differs.
    """
    joined = hashlib.sha256(digest.encode()).hexdigest()
    own_number = float(int(joined[:12], 16))  # 48 bits: exact as a float
    (lead_number,) = ranks.total([own_number if ranks.is_lead else 0.0])
    if own_number != lead_number:
        msg = (
            "this host's text is not the first host's: it comes with Python, so install the same "
            "Python version on every host of the pool; files of training data must be alike too"
        )
        raise BadInputError(msg)


def _tokenizer(job: Job, spec: TrainSpec, corpus: Corpus) -> PreTrainedTokenizerFast:
    if isinstance(spec.model, DemoModel):
        return demo_tokenizer(corpus, spec.model.vocab_size, job.cache_dir)
    if isinstance(spec.model, RandomModel) and spec.objective == "classification":
        vocab_size = spec.model.config.get("vocab_size")
        if not isinstance(vocab_size, int) or vocab_size < LEAST_VOCABULARY:
            raise BadInputError(
                f"the model's vocab_size is {vocab_size!r}, and every byte needs a token of its "
                f"own; take at least {LEAST_VOCABULARY}"
            )
        return demo_tokenizer(corpus, vocab_size, job.cache_dir)
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
    """Return the model with fp32 weights for AdamW; products run in bf16.

    Frozen weights under an adapter are loaded in the dtype they are used in.
    """
    if isinstance(spec.model, DemoModel):
        positions = min(spec.model.max_position_embeddings, spec.sequence_length)
        config = demo_config(spec.model) | {
            "max_position_embeddings": positions,  # longer positions would be untrained
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
    if spec.lora is None:  # 8-bit integers need no fp32 weights first
        return load_folder(folder, "bf16" if spec.optimizer == "qft" else "fp32", device)
    return load_folder(folder, BASE_DTYPES.get(spec.lora.base_dtype, spec.compute_dtype), device)
