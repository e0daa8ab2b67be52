"""Runs lm-evaluation-harness on a loaded model; only its environment has the harness.

The harness builds the requests and scores the answers. The job loads the model, with any weight
dtype, and the documents: the harness opens no file and no socket.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import torch
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.runtime import BadInputError
from runners.jobs.tasks.files import JsonObject, TaskFile
from runners.jobs.tasks.scores import AGGREGATIONS, Score, Values

BATCH_SIZE = 8
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_NONE = "none"  # the harness's name for no filter
PAIR = ("sum", "weight")
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, TemplateError)


class _HarnessTask(Protocol):
    """The used part of the harness's task interface."""

    def get_config(self, key: str) -> object: ...
    def set_config(self, *, key: str, value: object) -> None: ...
    def higher_is_better(self) -> dict[str, bool]: ...
    def aggregation(self) -> dict[str, Callable[..., object]]: ...


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[TaskFile],
    most: int | None,
    on_done: Callable[[int], None],
) -> list[Score]:
    """Return every metric of every task; ``on_done`` is called with the number of done tasks.

    Raises:
        BadInputError: a task does not match its data, or needs something unavailable.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it logs a line per truncated text
    _use_sandbox()
    evaluator = importlib.import_module("lm_eval.evaluator")
    language_model = _language_model(model, tokenizer)
    scores: list[Score] = []
    for done, task in enumerate(tasks, start=1):
        try:
            harness_task = _task(task)
            results = evaluator.evaluate(
                lm=language_model, task_dict={"tasks": {task.name: harness_task}, "groups": {}},
                limit=most, bootstrap_iters=0, log_samples=True,
            )  # fmt: skip
        except ImportError as error:
            msg = f"task {task.name} needs {error.name}, which the environment does not have; "
            raise BadInputError(f"{msg}choose a metric that the harness counts itself") from error
        except _WRONG as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise BadInputError(f"task {task.name} does not run: {reason}") from error
        scores += _scores(task.name, harness_task, results)
        on_done(done)
    return scores


def how(model: PreTrainedModel) -> str:
    """Return a text on the harness version and its handling of long texts."""
    positions = int(model.config.max_position_embeddings)
    return (
        f"lm-evaluation-harness {version('lm_eval')}; texts longer than the model's {positions} "
        "positions lose their beginning."
    )


def _use_sandbox() -> None:
    """Make the harness render templates in a sandbox, since they are untrusted."""
    utils: Any = importlib.import_module("lm_eval.utils")
    filters = utils.env.filters
    utils.env = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    utils.env.filters |= filters


def _language_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> object:
    huggingface = importlib.import_module("lm_eval.models.huggingface")
    language_model = huggingface.HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=BATCH_SIZE,
        max_length=int(model.config.max_position_embeddings),
        softmax_dtype=torch.float32,
    )
    for name in REQUESTS:  # progress bars would fill the job's log
        setattr(language_model, name, partial(getattr(language_model, name), disable_tqdm=True))
    return language_model


def _task(task: TaskFile) -> _HarnessTask:
    datasets = importlib.import_module("datasets")
    api = importlib.import_module("lm_eval.api.task")

    def documents(**_where: object) -> dict[str, Any]:
        return {
            split: datasets.Dataset.from_list(list(rows)) for split, rows in task.documents.items()
        }

    harness_task: _HarnessTask = api.ConfigurableTask(
        config={**task.config, "custom_dataset": documents}
    )
    if harness_task.get_config("num_fewshot") is None:
        harness_task.set_config(key="num_fewshot", value=0)
    return harness_task


def _scores(name: str, harness_task: _HarnessTask, results: JsonObject) -> list[Score]:
    higher, rules = harness_task.higher_is_better(), harness_task.aggregation()
    samples = results["samples"][name]
    scores = []
    for key, value in results["results"][name].items():
        metric, _, filter_name = key.partition(",")
        if metric not in rules or not isinstance(value, int | float):
            continue
        given = [each[metric] for each in samples if each["filter"] == filter_name]
        sums, weights = _document_values(given)
        scores.append(
            Score(
                task=name,
                metric=metric if filter_name == _NONE else f"{metric}.{filter_name}",
                value=float(value),
                aggregation=_aggregation(rules[metric]),
                is_higher_better=bool(higher[metric]),
                documents=len(given),
                values=sums,
                weights=weights,
            )
        )
    return scores


def _aggregation(rule: Callable[..., object]) -> str:
    registry = importlib.import_module("lm_eval.api.registry")
    return next(
        (name for name in AGGREGATIONS if registry.get_aggregation(name) is rule), "another"
    )


def _document_values(values: Sequence[object]) -> tuple[Values | None, Values | None]:
    """Return each document's (sum, weight) pairs; plain values have weight 1."""
    if all(isinstance(each, tuple | list) and len(each) == len(PAIR) for each in values):
        pairs = np.asarray(values, dtype=np.float64)
        return pairs[:, 0], pairs[:, 1]
    if all(isinstance(each, int | float | np.number | np.bool_) for each in values):
        return np.asarray(values, dtype=np.float64), np.ones(len(values))
    return None, None
