"""Evaluate a model on held-out text: ``python -m runners.jobs.evaluate ATTEMPT_DIR``.

Perplexity, next-token accuracy, and the divergence from the original model's distribution, each
with the 95 % interval over windows. Then the requested tasks of lm-evaluation-harness.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.jobs import evaluation_tasks
from runners.jobs.corpus import load_corpus
from runners.jobs.evaluation import (
    OWN_TEXT,
    Z_95,
    Nlls,
    Perplexity,
    Windows,
    held_out_ids,
    mean_and_error,
    perplexity_ratio,
    token_nlls,
    windows_of,
)
from runners.jobs.evaluation_tasks import Score, TaskFile, held_out_tasks, read_tasks
from runners.jobs.events import Stages
from runners.jobs.loading import (
    LoadedModel,
    load_model,
    pick_device,
    preload_library,
    require_tokenizer,
)
from runners.jobs.memory import Peak, PeakMeter
from runners.jobs.model_files import model_roots
from runners.jobs.named_text import check_long_enough, tokens_of
from runners.jobs.ratios import run_isolated
from runners.jobs.runtime import (
    BadInputError,
    Job,
    MissingModelError,
    job_telemetry,
    num_threads,
    run_job,
)
from runners.jobspec import EvaluateSpec, HostText
from runners.jobspec.compress import JUDGING, EvaluationTasks

LOADING = "Loading the models"
RUNNING_TASKS = "Running tasks"
FEWEST_TOKENS = 64  # of a data set: fewer say nothing of a model


@dataclass(frozen=True)
class TextScores:
    """Window means: of the model, and of its divergence from the original if there is one."""

    nlls: Nlls
    correct: Nlls
    divergence: Nlls | None = None
    agreement: Nlls | None = None
    original_nlls: Nlls | None = None
    original_correct: Nlls | None = None


@dataclass(frozen=True)
class Evaluation:
    """The results of one attempt."""

    text_scores: TextScores
    windows: Windows
    peak: Peak
    seconds: float  # of the held-out text evaluation
    tasks_seconds: float = 0.0
    scores: Sequence[Score] = ()
    original_scores: Sequence[Score] = ()
    harness: str = ""  # description of the harness


def work(job: Job) -> None:
    """Run one evaluation attempt."""
    spec = job.spec_of(EvaluateSpec)
    preload_library(spec.weight_dtype)
    tasks = chosen_tasks(job, spec.tasks) if spec.tasks else []
    with job_telemetry(job):
        shares = {LOADING: 1.0, JUDGING: 6.0} | ({RUNNING_TASKS: 6.0} if tasks else {})
        stages = Stages(job.emitter, shares)
        evaluation = run_isolated(job, partial(_evaluate, spec, tasks, stages))
    measured = figures(evaluation.text_scores, evaluation.windows) | {
        "peak_memory_bytes": float(evaluation.peak.bytes),
        "duration_seconds": evaluation.seconds,
    }
    if tasks:
        measured["tasks_seconds"] = evaluation.tasks_seconds
    all_notes = notes(evaluation.text_scores, evaluation.windows, measured) | {
        "peak_memory_bytes": evaluation.peak.how,
        "duration_seconds": "reading the text, without starting, loading and tasks",
    }
    score_pair = evaluation.scores, evaluation.original_scores
    all_notes |= {"tasks": evaluation.harness} if evaluation.harness else {}
    job.emitter.result(
        measured | evaluation_tasks.figures(*score_pair),
        all_notes | evaluation_tasks.notes(*score_pair),
    )


def chosen_tasks(job: Job, tasks: EvaluationTasks) -> list[TaskFile]:
    """Return the requested tasks, from a folder below a model root or of held-out text.

    Raises:
        MissingModelError: the folder or a data file does not exist.
        BadInputError: a task does not exist or cannot be read.
    """
    if tasks.folder is None:
        return read_tasks(
            held_out_tasks(load_corpus(), job.cache_dir), tasks.names, [job.cache_dir.resolve()]
        )
    roots = model_roots(job.host_dir)
    folder = (roots[0] / tasks.folder).resolve()
    if not folder.is_dir() or not any(folder.is_relative_to(root) for root in roots):
        msg = f"no task folder {folder} below this host's model folders; copy the tasks there"
        raise MissingModelError(msg)
    return read_tasks(folder, tasks.names, roots)


def _evaluate(
    spec: EvaluateSpec, tasks: Sequence[TaskFile], stages: Stages, job: Job
) -> Evaluation:
    stages = stages.via(job.emitter)
    stages.begin(LOADING)
    meter = PeakMeter(pick_device())
    loaded = load_model(job, spec.model, spec.weight_dtype)
    original = load_model(job, spec.original, None) if spec.original else None
    windows = _windows(job, spec, loaded, original)
    stages.begin(JUDGING)
    began = time.monotonic()
    judgement = _evaluate_text(job, stages, meter, windows, loaded, original)
    ended, peak = time.monotonic(), meter.read()  # without tasks, whose batches the harness sets
    if not tasks:
        return Evaluation(judgement, windows, peak, ended - began)
    scored, originals, harness = _run_harness(spec, tasks, stages, loaded, original)
    seconds = ended - began, time.monotonic() - ended
    return Evaluation(judgement, windows, peak, *seconds, scored, originals, harness)


def _evaluate_text(
    job: Job,
    stages: Stages,
    meter: PeakMeter,
    windows: Windows,
    loaded: LoadedModel,
    original: LoadedModel | None,
) -> TextScores:
    reference = original.model if original else None
    parts: list[TextScores] = []
    for at, row in enumerate(windows.ids):
        batch = torch.from_numpy(row[None])
        parts.append(evaluate_windows(loaded.model, batch, windows.stride, reference))
        so_far = float(np.exp(np.mean([part.nlls for part in parts])))
        peak_bytes = float(meter.read().bytes)
        job.emitter.metric({"perplexity": so_far, "peak_memory_bytes": peak_bytes}, step=at)
        stages.advance((at + 1) / len(windows.ids))
    return concatenate_scores(parts)


def _run_harness(
    spec: EvaluateSpec,
    tasks: Sequence[TaskFile],
    stages: Stages,
    loaded: LoadedModel,
    original: LoadedModel | None,
) -> tuple[list[Score], list[Score], str]:
    from runners.jobs.evaluation_tasks import (
        how,
        run_tasks,  # only in the harness's environment
    )

    stages.begin(RUNNING_TASKS)
    models = [each for each in (loaded, original) if each is not None]
    most = spec.tasks.documents if spec.tasks else None
    total = len(models) * len(tasks)
    results: list[list[Score]] = [[], []]
    for at, each in enumerate(models):
        tokenizer = require_tokenizer(each, "running tasks")
        tell = partial(_advance, stages, total, at * len(tasks))
        results[at] = run_tasks(each.model, tokenizer, tasks, most, tell)
    return results[0], results[1], how(loaded.model)


def _advance(stages: Stages, total: int, before: int, done: int) -> None:
    stages.advance((before + done) / total)


def _windows(
    job: Job, spec: EvaluateSpec, loaded: LoadedModel, original: LoadedModel | None
) -> Windows:
    """Return the text's windows.

    Raises:
        MissingModelError: the model has no tokenizer.
        BadInputError: the two models tokenise differently, so they cannot be compared; or a data
            set cannot be read, or is too short.
    """
    ids, text = held_out_ids(job, loaded), OWN_TEXT
    if ids is None or loaded.tokenizer is None:
        msg = "the model has no tokenizer.json, which held-out text needs; add it to the folder"
        raise MissingModelError(msg)
    if original is not None:
        theirs = original.tokenizer
        if theirs is None or theirs.get_vocab() != loaded.tokenizer.get_vocab():
            msg = "the original's vocabulary differs from the model's; choose the model's original"
            raise BadInputError(msg)
    if not isinstance(spec.text, HostText):
        named = tokens_of(job, spec.text, loaded.tokenizer)
        ids, text = named.ids, f"tokens of {named.words}"
        check_long_enough(named.name, len(ids), FEWEST_TOKENS)
    windows = windows_of(loaded.model.config, ids, spec.evaluation_tokens)
    return replace(windows, text=text)


@torch.inference_mode()
def evaluate_windows(
    model: PreTrainedModel,
    batch: torch.Tensor,
    stride: int,
    original: PreTrainedModel | None = None,
) -> TextScores:
    """Return the scores of windows [count, tokens], of which the last ``stride`` are scored."""
    logits = _logits(model, batch, stride)
    nlls, correct = _scores(logits, batch, stride)
    if original is None:
        return TextScores(nlls, correct)
    theirs = _logits(original, batch, stride)
    original_nlls, original_correct = _scores(theirs, batch, stride)
    ours = torch.log_softmax(logits[:, :-1], dim=-1)
    reference = torch.log_softmax(theirs[:, :-1], dim=-1)
    divergence = (reference.exp() * (reference - ours)).sum(dim=-1)
    same = ours.argmax(dim=-1) == reference.argmax(dim=-1)
    return TextScores(
        nlls,
        correct,
        _means(divergence),
        _means(same),
        original_nlls,
        original_correct,
    )


def concatenate_scores(parts: list[TextScores]) -> TextScores:
    """Return the concatenated scores of all windows."""

    def of(name: str) -> Nlls | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else np.concatenate(values)

    return TextScores(
        np.concatenate([part.nlls for part in parts]),
        np.concatenate([part.correct for part in parts]),
        of("divergence"),
        of("agreement"),
        of("original_nlls"),
        of("original_correct"),
    )


def figures(scores: TextScores, windows: Windows) -> dict[str, float]:
    """Return the figures under the names of a job's result."""
    own = _perplexity(scores.nlls, windows)
    measured = own.result_metrics() | {"evaluation_tokens": float(own.tokens)}
    measured |= _interval("next_token_accuracy", scores.correct)
    if scores.original_nlls is None or scores.original_correct is None:
        return measured
    original = _perplexity(scores.original_nlls, windows)
    ratio, low, high = perplexity_ratio(own, original)
    measured |= original.result_metrics("original_")
    measured |= _interval("original_next_token_accuracy", scores.original_correct)
    measured |= {
        "perplexity_ratio": ratio,
        "perplexity_ratio_low": low,
        "perplexity_ratio_high": high,
    }
    if scores.divergence is not None and scores.agreement is not None:
        measured |= _interval("kl_divergence_nats", scores.divergence)
        measured |= _interval("top_token_agreement", scores.agreement)
    return measured


def notes(scores: TextScores, windows: Windows, measured: dict[str, float]) -> dict[str, str]:
    """Return texts on how the figures were measured and whether a difference is significant."""
    texts = {
        "perplexity": _perplexity(scores.nlls, windows).note(),
        "device": str(pick_device()),
        "threads": str(num_threads()),
    }
    if "perplexity_ratio" in measured:
        texts["perplexity_ratio"] = significance(measured)
        texts["kl_divergence_nats"] = "KL(original ‖ model) per token; 0 where they are one"
    return texts


def significance(measured: dict[str, float]) -> str:
    """Return whether the difference from the original is significant, as a text."""
    low, high = measured["perplexity_ratio_low"], measured["perplexity_ratio_high"]
    paired = "same windows pair by pair, 95 % interval"
    if low > 1.0:
        return f"worse than the original beyond chance: {low:.4f} to {high:.4f}; {paired}"
    if high < 1.0:
        return f"better than the original beyond chance: {low:.4f} to {high:.4f}; {paired}"
    return f"no difference that this much text can show: {low:.4f} to {high:.4f}; {paired}"


def _logits(model: PreTrainedModel, batch: torch.Tensor, stride: int) -> torch.Tensor:
    batch = batch.to(next(model.parameters()).device)
    output = model(input_ids=batch, use_cache=False, logits_to_keep=stride + 1)
    logits: torch.Tensor = output.logits.float()
    return logits


def _scores(logits: torch.Tensor, batch: torch.Tensor, stride: int) -> tuple[Nlls, Nlls]:
    nlls: Nlls = token_nlls(logits, batch, stride).mean(dim=1).numpy()
    hits = logits[:, :-1].argmax(dim=-1).cpu() == batch[:, -stride:]
    return nlls, _means(hits)


def _means(values: torch.Tensor) -> Nlls:
    means: Nlls = values.double().mean(dim=1).cpu().numpy()
    return means


def _perplexity(nlls: Nlls, windows: Windows) -> Perplexity:
    return Perplexity(nlls, len(nlls) * windows.stride, windows.length, windows.text)


def _interval(name: str, values: Nlls) -> dict[str, float]:
    mean, error = mean_and_error(values)
    return {name: mean, f"{name}_low": mean - Z_95 * error, f"{name}_high": mean + Z_95 * error}


if __name__ == "__main__":
    run_job("evaluate", work)
