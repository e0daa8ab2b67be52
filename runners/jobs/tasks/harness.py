"""lm-evaluation-harness on a model that this job loaded; only its environment has the harness.

The harness asks the questions and counts the answers. The model is ours, in whatever form its
weights are held, and the documents were read before: the harness opens no file and no socket.
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
from runners.jobs.tasks.files import Document, TaskFile
from runners.jobs.tasks.scores import AGGREGATIONS, Score, Values

BATCH_SIZE = 8
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_NONE = "none"  # the harness's name of no filter
PAIR = ("sum", "weight")
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, TemplateError)


class _Built(Protocol):
    """A task as the harness builds it, as far as it is used here."""

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
    """Return every metric of every task; ``on_done`` hears how many tasks are.

    Raises:
        BadInputError: a task does not agree with its data, or asks for what is not here.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a line for each text that it cuts
    _use_sandbox()
    evaluator = importlib.import_module("lm_eval.evaluator")
    asked = _asked(model, tokenizer)
    scores: list[Score] = []
    for done, task in enumerate(tasks, start=1):
        try:
            built = _task(task)
            found = evaluator.evaluate(
                lm=asked, task_dict={"tasks": {task.name: built}, "groups": {}},
                limit=most, bootstrap_iters=0, log_samples=True,
            )  # fmt: skip
        except ImportError as error:
            msg = f"task {task.name} needs {error.name}, which the environment does not have; "
            raise BadInputError(f"{msg}choose a metric that the harness counts itself") from error
        except _WRONG as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise BadInputError(f"task {task.name} does not run: {told}") from error
        scores += _scores(task.name, built, found)
        on_done(done)
    return scores


def how(model: PreTrainedModel) -> str:
    """Return in words what ran, and what it does with long texts."""
    positions = int(model.config.max_position_embeddings)
    return (
        f"lm-evaluation-harness {version('lm_eval')}; texts longer than the model's {positions} "
        "positions lose their beginning."
    )


def _use_sandbox() -> None:
    """Have templates rendered in a sandbox: they come from a folder, and may say no code."""
    utils: Any = importlib.import_module("lm_eval.utils")
    filters = utils.env.filters
    utils.env = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    utils.env.filters |= filters


def _asked(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> object:
    huggingface = importlib.import_module("lm_eval.models.huggingface")
    found = huggingface.HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=BATCH_SIZE,
        max_length=int(model.config.max_position_embeddings),
        softmax_dtype=torch.float32,
    )
    for name in REQUESTS:  # a bar would fill the job's log
        setattr(found, name, partial(getattr(found, name), disable_tqdm=True))
    return found


def _task(task: TaskFile) -> _Built:
    datasets = importlib.import_module("datasets")
    api = importlib.import_module("lm_eval.api.task")

    def documents(**_where: object) -> dict[str, Any]:
        return {
            split: datasets.Dataset.from_list(list(rows)) for split, rows in task.documents.items()
        }

    built: _Built = api.ConfigurableTask(config={**task.config, "custom_dataset": documents})
    if built.get_config("num_fewshot") is None:
        built.set_config(key="num_fewshot", value=0)
    return built


def _scores(name: str, built: _Built, found: Document) -> list[Score]:
    higher, rules = built.higher_is_better(), built.aggregation()
    samples = found["samples"][name]
    scores = []
    for key, value in found["results"][name].items():
        metric, _, kept = key.partition(",")
        if metric not in rules or not isinstance(value, int | float):
            continue
        given = [each[metric] for each in samples if each["filter"] == kept]
        sums, weights = _sums(given)
        scores.append(
            Score(
                task=name,
                metric=metric if kept == _NONE else f"{metric}.{kept}",
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


def _sums(given: Sequence[object]) -> tuple[Values | None, Values | None]:
    """Return what each document gave: (sum, weight) pairs, or plain values of weight 1."""
    if all(isinstance(each, tuple | list) and len(each) == len(PAIR) for each in given):
        pairs = np.asarray(given, dtype=np.float64)
        return pairs[:, 0], pairs[:, 1]
    if all(isinstance(each, int | float | np.number | np.bool_) for each in given):
        return np.asarray(given, dtype=np.float64), np.ones(len(given))
    return None, None
