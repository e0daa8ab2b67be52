"""The training job, from tokens to the published model."""

import hashlib
import shutil
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.corpus import Corpus, TokenIds, demo_tokenizer, load_corpus, tokenize_documents
from runners.jobs.energy import Work
from runners.jobs.evaluation import evaluate
from runners.jobs.inputs import digest_of_model
from runners.jobs.loading import (
    TORCH_DTYPES,
    demo_config,
    fresh_model,
    load_folder,
    load_tokenizer,
    pick_device,
    ready,
    stored_quantisation,
)
from runners.jobs.memory import Peak, PeakMeter, map_large_blocks, model_bytes, optimizer_bytes
from runners.jobs.model_files import opened_model
from runners.jobs.ranks import RankFailedError, Ranks, joined_ranks
from runners.jobs.runtime import (
    BadInputError,
    Job,
    MissingModelError,
    card_text,
    checkpoint_on_sigterm,
    end_by_sigterm,
    job_telemetry,
    publish_model,
    weight_file_bytes,
)
from runners.jobs.train.classifying import classifier, read_labelled
from runners.jobs.train.evaluator import (
    FINAL_EVALUATION_TOKENS,
    HeldOutData,
    TextSampler,
    prompts_of,
)
from runners.jobs.train.kernels import evaluation_attention, set_attention
from runners.jobs.train.quantized import (
    quantize_for_training,
    trained_tensors,
    with_effective_weights,
)
from runners.jobs.train.sources import Data, OwnText, mixture_of, read_data
from runners.jobs.train.trainer import Trainer, steady
from runners.jobspec import ArtefactModel, DemoModel, FolderModel, RandomModel, TrainSpec
from runners.jobspec.compress import EVALUATING, TRAINING, WeightDtype

# Final evaluation and publication of a training: model or adapter, card and figures.


class PreparedTraining(NamedTuple):
    """Everything that training needs; with ``lora`` the model's own weights are frozen."""

    trainer: Trainer
    tokenizer: PreTrainedTokenizerFast
    text: str
    data: Data
    meter: PeakMeter
    lora: Lora | None


def finish(prepared: PreparedTraining, peak: Peak) -> None:
    """Evaluate the trained model, publish it and report the run's figures."""
    if not prepared.trainer.spec.keeps_model:
        _finish_measuring(prepared, peak)
        return
    if prepared.data.classes:
        _finish_classifier(prepared, peak)
        return
    trainer, spec = prepared.trainer, prepared.trainer.spec
    job = trainer.job
    job.emitter.phase("Evaluating on held-out text")
    trainer.report_progress()
    trainer.model.set_attn_implementation(evaluation_attention(trainer.model))
    trained = _trained_figures(trainer)
    if prepared.lora is not None:
        trained |= _publish_adapter(prepared, prepared.lora)
    trained |= _data_figures(prepared)
    model = (
        prepared.lora.merge()
        if prepared.lora is not None
        else with_effective_weights(trainer.model)
    )
    model = ready(model, dtype=TORCH_DTYPES[spec.published_dtype])
    perplexity = evaluate(model, trainer.held_out.ids, FINAL_EVALUATION_TOKENS)
    parameters = float(sum(each.numel() for each in model.parameters()))
    perplexity_figures = perplexity.result_metrics()
    measured = {
        **_measured(trainer, peak),
        **perplexity_figures,
        "parameters": parameters,
        **trained,
    }
    notes = {"perplexity": perplexity.note(), **_notes(prepared, peak)}
    if spec.lora is None or spec.lora.is_merged:
        trainer.report_saving()
        card = _card(spec, measured, notes)
        _publish_model(prepared, model, card, {"perplexity": perplexity.value})
    folder = job.output_dir("model" if spec.lora is None or spec.lora.is_merged else "adapter")
    measured["disk_bytes"] = float(weight_file_bytes(folder))
    job.emitter.result(measured, notes, Work((TRAINING, EVALUATING), trainer.trained_tokens))


def _finish_measuring(prepared: PreparedTraining, peak: Peak) -> None:
    """Report the figures of a run that keeps no model."""
    trainer = prepared.trainer
    measured = {**_measured(trainer, peak), **_trained_figures(trainer)}
    work = Work((TRAINING, EVALUATING), trainer.trained_tokens)
    trainer.job.emitter.result(measured, _notes(prepared, peak), work)


def _finish_classifier(prepared: PreparedTraining, peak: Peak) -> None:
    """Evaluate a classifier on the held-out samples, publish it and report its figures."""
    trainer, spec = prepared.trainer, prepared.trainer.spec
    job = trainer.job
    job.emitter.phase("Judging on held-out samples")
    trainer.report_progress()
    trainer.model.set_attn_implementation(evaluation_attention(trainer.model))
    measured = {
        **_measured(trainer, peak),
        "parameters": float(sum(each.numel() for each in trainer.model.parameters())),
        **_trained_figures(trainer),
        **_data_figures(prepared),
    }
    notes = _notes(prepared, peak)
    trainer.report_saving()
    model = ready(trainer.model, dtype=TORCH_DTYPES[spec.published_dtype])
    quality = {name: measured[name] for name in ("accuracy", "f1")}
    _publish_model(prepared, model, _card(spec, measured, notes), quality)
    measured["disk_bytes"] = float(weight_file_bytes(job.output_dir("model")))
    job.emitter.result(measured, notes, Work((TRAINING, EVALUATING), trainer.trained_tokens))


def _trained_figures(trainer: Trainer) -> dict[str, float]:
    """Return the number of trained parameters and the optimizer's bytes."""
    trained = sum(each.numel() for each in trained_tensors(trainer.model).values())
    return {
        "trainable_parameters": float(trained),
        "optimizer_bytes": float(optimizer_bytes(trainer.optimizer)),
    }


def _data_figures(prepared: PreparedTraining) -> dict[str, float]:
    """Return the data's figures, and the loss on its held-out part."""
    if prepared.data.evaluated_on is None:
        return prepared.data.measured
    return prepared.data.measured | prepared.data.evaluated_on.result(prepared.trainer.model)


def _publish_model(
    prepared: PreparedTraining, model: PreTrainedModel, card: str, facts: dict[str, float]
) -> None:
    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        prepared.tokenizer.save_pretrained(str(folder))

    publish_model(prepared.trainer.job, write, card, facts)


def _publish_adapter(prepared: PreparedTraining, lora: Lora) -> dict[str, float]:
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


def _notes(prepared: PreparedTraining, peak: Peak) -> dict[str, str]:
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
    if prepared.data.evaluated_on is not None:
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
    notes = {}
    if not trainer.ranks.is_alone:
        notes["ranks"] = _ranks_note(trainer)
    if trainer.writer.num_written:
        notes["checkpoint_wait_seconds"] = trainer.writer.note()
    notes |= trainer.watch.notes() | trainer.evaluator.notes(trainer.state)
    if trainer.resumed_at_step is not None:
        remark = f"; {trainer.resumed_remark}" if trainer.resumed_remark else ""
        notes["resumed"] = f"from the checkpoint at step {trainer.resumed_at_step}{remark}"
    return notes


def _kernel_notes(trainer: Trainer) -> dict[str, str]:
    kernels = {"sdpa": "torch's fused attention (SDPA)", "eager": "scores as separate products"}
    notes = {"attention": kernels.get(trainer.attention, trainer.attention)}
    if trainer.blocks is not None:
        notes["attention"] = trainer.blocks.note()
    if isinstance(trainer.optimizer, torch.optim.AdamW):
        notes["optimizer"] = "AdamW, all of a weight's update in one kernel"
    if trainer.spec.compute_dtype == "fp8":
        from runners.jobs.train.kernels import products_note  # torchao is large

        notes["products"] = products_note(trainer.device)
    if trainer.compiled is not None:
        notes["compiled"] = trainer.compiled.note(trainer.step_seconds)
    return notes


def _ranks_note(trainer: Trainer) -> str:
    size, layout = trainer.ranks.size, trainer.spec.layout
    if layout is None:
        return f"{size}, each with its share of every step's micro-batches"
    if trainer.spec.parallel.on_lost_rank == "shrink":
        layout = layout.with_pipeline_ranks(size)  # the size after ranks were lost
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
    if (
        ranks.local_rank == 0 and job.owns_folder
    ):  # the lead reads its host's folder until it has finished
        shutil.rmtree(job.checkpoint_dir, ignore_errors=True)


def _train(job: Job, spec: TrainSpec, ranks: Ranks) -> tuple[PreparedTraining, Peak] | None:
    """Train; return the result, or None if it was stopped."""
    prepared = _prepare(job, spec, ranks)
    trainer = prepared.trainer
    job.emitter.phase(TRAINING)
    if not trainer.run():
        return None
    peak = prepared.meter.read()
    trainer.layout.synchronise()
    whole = trainer.layout.gathered_model()
    if whole is not None:
        if trainer.blocks is not None:
            whole.set_attn_implementation(evaluation_attention(whole))
        trainer.model = whole
        if spec.compute_dtype == "fp8":
            from runners.jobs.train.kernels import with_plain_linear_layers  # torchao is large

            trainer.model = with_plain_linear_layers(whole)
        trainer.evaluator.finish(trainer.model, trainer.state)
    return prepared, peak


def _prepare(job: Job, spec: TrainSpec, ranks: Ranks) -> PreparedTraining:
    """Build everything that training needs; the corpus itself is freed."""
    _check_share(ranks, spec)
    job.emitter.phase("Reading text")
    corpus = load_corpus()
    job.emitter.phase("Preparing tokens")
    tokenizer = _tokenizer(job, spec, corpus)
    data, held_out = _data(job, spec, tokenizer, corpus)
    _check_same_text(ranks, corpus.digest + data.digest)
    text = f"corpus {corpus.digest[:16]}, {len(corpus.train)} training documents"
    inputs = {"host's own text": corpus.digest, "training data": data.digest}
    inputs["model"] = digest_of_model(spec.model, job.host_dir)
    del corpus
    device = pick_device()
    job.emitter.phase("Building the model")
    meter = PeakMeter(device)
    torch.manual_seed(spec.seed)
    if data.classes:
        model = classifier(job, spec, data.classes, tokenizer, device)
    else:
        model = _model(job, spec, tokenizer, device)
    blocks = set_attention(model, spec.attention, device)
    if spec.quantized is not None:
        quantize_for_training(model, spec.quantized)
    weights = model_bytes(model)
    lora = _adapter(job, spec, model, device)
    held_out_rows = HeldOutData(held_out, data.evaluated_on)
    trainer = Trainer(job, spec, model, data.batches, held_out_rows, device, ranks, blocks)
    trainer.meter = meter
    trainer.evaluator.mixture = mixture_of(data, spec)
    if spec.text_samples is not None:
        prompts = prompts_of(spec.text_samples, tokenizer, data.evaluated_on, held_out)
        longest = spec.sequence_length
        trainer.evaluator.sampler = TextSampler(
            job, spec.text_samples, tokenizer, prompts, longest
        )
    trainer.inputs = {name: digest for name, digest in inputs.items() if digest}
    trainer.resume()
    if lora is None:
        weights = trainer.layout.weight_bytes()
    adapters = {"adapters": lora.bytes} if lora else {}
    trainer.report_held_bytes(
        weights=weights, runtime_overhead=meter.read().start_bytes, **adapters
    )
    return PreparedTraining(trainer, tokenizer, text, data, meter, lora)


def _data(
    job: Job, spec: TrainSpec, tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> tuple[Data, TokenIds]:
    """Return the training data and the host's held-out text, unused by classification."""
    if spec.objective == "classification":
        return read_labelled(job, spec, tokenizer, corpus), np.zeros(0, dtype=np.int32)
    train_ids = tokenize_documents(
        tokenizer, corpus.train, f"{corpus.digest}/train", job.cache_dir
    )
    held_out = tokenize_documents(
        tokenizer, corpus.held_out, f"{corpus.digest}/held-out", job.cache_dir
    )
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
            f"choose at least {ranks.size}, with a larger batch or smaller micro-batches"
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
                f"the model's vocab_size is {vocab_size!r}, but a byte-level tokenizer needs one "
                f"token per byte; choose at least {LEAST_VOCABULARY}"
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
        msg = f"{folder} holds quantised weights, which do not train; use the unquantised model"
        raise BadInputError(msg)
    if spec.lora is None:  # 8-bit integers need no fp32 weights first
        return load_folder(folder, "bf16" if spec.optimizer == "qft" else "fp32", device)
    return load_folder(folder, BASE_DTYPES.get(spec.lora.base_dtype, spec.compute_dtype), device)
