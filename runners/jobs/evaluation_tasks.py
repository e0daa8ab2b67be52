"""Evaluation tasks: their files, lm-evaluation-harness, and scores."""

import difflib
import importlib
import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.datasets.text import TextError, read_json, read_lines, read_text
from runners.jobs.corpus import Corpus, Document, cached_folder
from runners.jobs.evaluation import Z_95
from runners.jobs.model_files import open_file
from runners.jobs.runtime import BadInputError, MissingModelError

# ---------------------------------------------------------------------------
# Task files of lm-evaluation-harness: read without executing, or built of held-out text.
# ---------------------------------------------------------------------------


MAX_FILES = 4096
MAX_TASK_BYTES = 2**20
MAX_DATA_BYTES = 2**28
MAX_VALUES = 100_000
OUTPUT_TYPES = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
FIELDS = frozenset({
    "task", "task_alias", "tag", "dataset_path", "dataset_kwargs", "training_split",
    "validation_split", "test_split", "fewshot_split", "doc_to_text", "doc_to_target",
    "doc_to_choice", "description", "target_delimiter", "fewshot_delimiter", "num_fewshot",
    "metric_list", "output_type", "generation_kwargs", "repeats", "filter_list", "gen_prefix",
    "metadata",
})  # fmt: skip
MERGE_TAG = "tag:yaml.org,2002:merge"
WHERE_DATA_IS = frozenset({"dataset_path", "dataset_kwargs"})
JsonObject = dict[str, Any]


@dataclass(frozen=True)
class TaskFile:
    """One task: the harness's config and the documents by split."""

    name: str
    config: Mapping[str, Any]
    documents: Mapping[str, Sequence[JsonObject]]


class _CodeTag:
    """Placeholder of a code tag in a file."""


class _Loader(yaml.SafeLoader):
    """YAML loader that replaces every custom tag with a ``_CodeTag``, and takes no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - yaml's own signature
        """Return a mapping; a key that stands twice is refused with its line."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE_TAG:
                if (key.tag, key.value) in seen:
                    what = f"the key “{key.value[:80]}” stands twice; keep one"
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


_Loader.add_multi_constructor("!", lambda _loader, _suffix, _node: _CodeTag())


def read_tasks(folder: Path, names: Sequence[str], roots: Sequence[Path]) -> list[TaskFile]:
    """Return the named tasks of a folder's YAML files; all tasks if no name is given.

    Raises:
        BadInputError: a task does not exist, or has unsupported content.
        MissingModelError: a data file is missing, or outside of ``roots``.
    """
    known: dict[str, tuple[Path, JsonObject]] = {}
    for name, found in _find_tasks(folder, roots):
        if name in known:
            raise BadInputError(
                f"task {name} is in {known[name][0]} and in {found[0]}; rename one of them"
            )
        known[name] = found
    if not known:
        msg = f"{folder} has no task: give a folder of YAML files that each say 'task: NAME'"
        raise BadInputError(msg)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:8]
            msg = f"there is no task {name} in {folder}; near it are {', '.join(near)}"
            raise BadInputError(msg)
    return [_task(name, *known[name], roots) for name in dict.fromkeys(names or sorted(known))]


def _find_tasks(
    folder: Path, roots: Sequence[Path]
) -> Iterator[tuple[str, tuple[Path, JsonObject]]]:
    paths = sorted(folder.rglob("*.yaml"))
    if len(paths) > MAX_FILES:
        raise BadInputError(f"{folder} has {len(paths)} YAML files; the limit is {MAX_FILES}")
    for path in paths:
        text = _read(path, roots, MAX_TASK_BYTES)
        try:
            document = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a SafeLoader
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInputError(f"{path} is not valid YAML: {reason}") from None
        if isinstance(document, dict) and isinstance(document.get("task"), str):
            yield document["task"], (path, document)


def _task(name: str, path: Path, config: JsonObject, roots: Sequence[Path]) -> TaskFile:
    if any(isinstance(value, _CodeTag) for value in _values(config)):
        msg = f"task {name} has a !function: code from a folder never runs; write a template"
        raise BadInputError(msg)
    if unknown := sorted(set(map(str, config)) - FIELDS):
        msg = f"task {name}: {', '.join(unknown)} is not supported here; remove it from {path}"
        raise BadInputError(msg)
    if config.get("output_type") not in OUTPUT_TYPES:
        msg = (
            f"task {name}: output_type is {config.get('output_type')!r}; it can be "
            f"{', '.join(OUTPUT_TYPES)}"
        )
        raise BadInputError(msg)
    files = _data_files(name, path, config)
    documents = {split: _documents(name, file, roots) for split, file in files.items()}
    for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if (split := config.get(key)) is not None and split not in documents:
            known = ", ".join(documents)
            raise BadInputError(f"task {name}: {key} is {split!r}; its data_files have {known}")
    if not (config.get("test_split") or config.get("validation_split")):
        known = ", ".join(documents)
        raise BadInputError(
            f"task {name}: test_split and validation_split are not set; set test_split in {path} "
            f"to one of its data_files: {known}"
        )
    harness_config = {key: value for key, value in config.items() if key not in WHERE_DATA_IS}
    return TaskFile(name, harness_config, documents)


def _values(value: object) -> Iterator[object]:
    """Yield every value of a document; bounded even for recursive YAML aliases."""
    pending, count = [value], 0
    while pending:
        each = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise BadInputError(f"a task file has more than {MAX_VALUES} values")
        yield each
        if isinstance(each, dict):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            pending += each


def _data_files(name: str, path: Path, config: JsonObject) -> dict[str, Path]:
    kwargs = config.get("dataset_kwargs") or {}
    files = kwargs.get("data_files") if isinstance(kwargs, dict) and len(kwargs) == 1 else None
    files = {"train": files} if isinstance(files, str) else files
    is_local = config.get("dataset_path") == "json" and isinstance(files, dict) and files != {}
    if not isinstance(files, dict) or not is_local or not all(map(_is_text, files.values())):
        msg = (
            f"task {name}: nothing is fetched, so its data must be a file: in {path} say "
            "'dataset_path: json' and 'dataset_kwargs: {data_files: {test: FILE.jsonl}}'"
        )
        raise BadInputError(msg)
    return {str(split): path.parent / each for split, each in files.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _documents(name: str, path: Path, roots: Sequence[Path]) -> list[JsonObject]:
    """Return the objects of a file: JSON lines, or one JSON list."""
    if not path.is_file():
        msg = f"task {name}: its data file {path} is not on this host; copy it there"
        raise MissingModelError(msg)
    data = _read_bytes(path, roots, MAX_DATA_BYTES)
    is_list = _text_of(path, data).lstrip().startswith("[")
    lines = [(1, data)] if is_list else read_lines(BytesIO(data), MAX_DATA_BYTES)
    objects: list[JsonObject] = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            value = read_json(read_text(line).rstrip("\r\n"))
        except TextError as error:
            msg = f"task {name}: {path}, line {number - 1 + max(error.line, 1)}: {error}"
            raise BadInputError(f"{msg}; write one JSON object a line") from None
        objects += value if is_list else [value]
    if not objects or not all(isinstance(each, dict) for each in objects):
        raise BadInputError(f"task {name}: {path} must hold JSON objects, one a line")
    return objects


def _read(path: Path, roots: Sequence[Path], limit: int) -> str:
    return _text_of(path, _read_bytes(path, roots, limit))


def _read_bytes(path: Path, roots: Sequence[Path], limit: int) -> bytes:
    handle = open_file(path, roots)
    with os.fdopen(handle, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise BadInputError(f"{path} is longer than {limit} bytes; give fewer documents")
    return data


def _text_of(path: Path, data: bytes) -> str:
    try:
        return read_text(data)
    except TextError as error:
        raise BadInputError(f"{path}: {error}") from None


# Builds two task files from the host's held-out text.
#
# ``held_out_choice`` is multiple choice of a file's next line out of four, ``held_out_text`` is
# the likelihood of text excerpts. Both are the same on every run of the same Python.


VERSION = 1
CHOICE, TEXT = "held_out_choice", "held_out_text"
NUM_CHOICES = 4
NUM_LINES_BEFORE = 5
PER_DOCUMENT = 8  # questions per file, so that long files do not dominate the task
LINE_CHARACTERS = range(16, 81)
PIECE_CHARACTERS = 1000
MAX_DOCUMENTS = 400  # documents per task
_COMMON = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
_CONFIGS = {
    CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "\n",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    TEXT: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name, "aggregation": aggregation, "higher_is_better": False}
            for name, aggregation in (
                ("byte_perplexity", "weighted_perplexity"),
                ("bits_per_byte", "bits_per_byte"),
            )
        ],
    },
}


def held_out_tasks(corpus: Corpus, cache_dir: Path) -> Path:
    """Return the folder of both tasks; create it if missing."""
    name = f"tasks-{VERSION}-{corpus.digest[:24]}"
    return cached_folder(cache_dir, name, lambda target: _write(corpus.held_out, target))


def _write(documents: Sequence[Document], target: Path) -> None:
    objects_by_task = {
        CHOICE: _random_sample(_questions(documents)),
        TEXT: _random_sample(_excerpts(documents)),
    }
    for name, objects in objects_by_task.items():
        lines = "".join(json.dumps(each) + "\n" for each in objects)
        (target / f"{name}.jsonl").write_text(lines)
        kwargs = {"data_files": {"test": f"{name}.jsonl"}}
        config = {"task": name, **_COMMON, "dataset_kwargs": kwargs, **_CONFIGS[name]}
        (target / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def _random_sample(objects: Iterator[dict[str, object]]) -> list[dict[str, object]]:
    """Return at most ``MAX_DOCUMENTS`` objects in random order, so that any prefix is a sample."""
    sample = list(objects)
    random.Random(VERSION).shuffle(sample)  # noqa: S311 - the same on every run, nothing secret
    return sample[:MAX_DOCUMENTS]


def _questions(documents: Sequence[Document]) -> Iterator[dict[str, object]]:
    for document in documents:
        source = random.Random(document.digest)  # noqa: S311 - as above
        lines = [line.rstrip() for line in document.text.splitlines() if line.strip()]
        candidates = [line for line in lines if len(line) in LINE_CHARACTERS]
        places = range(NUM_LINES_BEFORE, len(lines))
        for at in sorted(source.sample(places, min(PER_DOCUMENT, len(places)))):
            right = lines[at]
            others = sorted(set(candidates) - {right})
            if right not in candidates or len(others) < NUM_CHOICES:
                continue
            choices = [right, *source.sample(others, NUM_CHOICES - 1)]
            source.shuffle(choices)
            context = "\n".join(lines[at - NUM_LINES_BEFORE : at])
            yield {"context": context, "choices": choices, "answer": choices.index(right)}


def _excerpts(documents: Sequence[Document]) -> Iterator[dict[str, object]]:
    for document in documents:
        text = document.text
        middle = max(0, len(text) // 2 - PIECE_CHARACTERS // 2)
        yield {"text": text[middle : middle + PIECE_CHARACTERS]}


# ---------------------------------------------------------------------------
# Task scores of a model, and paired comparison of two models over the same documents.
# ---------------------------------------------------------------------------


Values = npt.NDArray[np.float64]
Scale = Literal["difference", "ratio"]


@dataclass(frozen=True)
class Aggregation:
    """A figure as a function ``of`` the weighted mean over documents.

    ``sign`` is the factor from a change of that mean to one of the figure, or of its logarithm.
    """

    of: Callable[[float], float]
    slope: Callable[[float], float]  # derivative at the mean, for the standard error
    scale: Scale = "difference"
    sign: float = 1.0


def _exp_negative(mean: float) -> float:
    return math.exp(-mean)


_PERPLEXITY = Aggregation(_exp_negative, lambda mean: -_exp_negative(mean), "ratio", -1.0)
AGGREGATIONS: Mapping[str, Aggregation] = {
    "mean": Aggregation(lambda mean: mean, lambda _mean: 1.0),
    "perplexity": _PERPLEXITY,
    "weighted_perplexity": _PERPLEXITY,
    "bits_per_byte": Aggregation(
        lambda mean: -mean / math.log(2), lambda _mean: -1 / math.log(2), sign=-1 / math.log(2)
    ),
}


@dataclass(frozen=True)
class Score:
    """One metric of one task: the harness's figure and each document's contribution."""

    task: str
    metric: str
    value: float
    aggregation: str
    is_higher_better: bool
    documents: int
    values: Values | None = field(default=None, compare=False)  # sums per document
    weights: Values | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Return its name in a job's result."""
        return f"{self.task}/{self.metric}"

    @property
    def stderr(self) -> float | None:
        """Return its standard error over documents (delta method), or None if not defined.

        For a mean it is the harness's: sample standard deviation over the root of the number.
        """
        rule = AGGREGATIONS.get(self.aggregation)
        if rule is None or self.values is None or self.weights is None:
            return None
        mean, error = weighted_mean(self.values, self.weights)
        return abs(rule.slope(mean)) * error


def weighted_mean(values: Values, weights: Values) -> tuple[float, float]:
    """Return sum(values) / sum(weights) and its standard error, 0 for one document.

    Source: Cochran 1977, Sampling Techniques, 3rd ed., eq. 6.13, without the finite correction.
    """
    total, count = float(weights.sum()), len(values)
    mean = float(values.sum()) / total
    if count == 1:
        return mean, 0.0
    residuals = values - mean * weights
    return mean, math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total


def figures(scores: Sequence[Score], originals: Sequence[Score]) -> dict[str, float]:
    """Return the scores of the model and the original model, and their changes, by name."""
    measured: dict[str, float] = {}
    for prefix, group in (("", scores), ("original_", originals)):
        for score in group:
            measured[f"{prefix}{score.name}"] = score.value
            if score.stderr is not None:
                measured[f"{prefix}{score.name}_stderr"] = score.stderr
    for score, original in zip(scores, originals, strict=False):
        if (compared := change(score, original)) is not None:
            scale, *values = compared
            names = (f"{score.name}_{scale}{end}" for end in ("", "_low", "_high"))
            measured |= dict(zip(names, values, strict=True))
    return measured


def change(score: Score, original: Score) -> tuple[Scale, float, float, float] | None:
    """Return model - original, or model / original, with its 95 % interval over documents.

    Paired over the same documents, which cancels their difficulty. None if not defined.
    """
    rule = AGGREGATIONS.get(score.aggregation)
    if rule is None or score.values is None or original.values is None or score.weights is None:
        return None
    mean, error = weighted_mean(score.values - original.values, score.weights)
    middle, spread = rule.sign * mean, abs(rule.sign) * Z_95 * error
    low, high = middle - spread, middle + spread
    if rule.scale == "ratio":
        return rule.scale, math.exp(middle), math.exp(low), math.exp(high)
    return rule.scale, middle, low, high


def notes(scores: Sequence[Score], originals: Sequence[Score]) -> dict[str, str]:
    """Return texts on each figure, and on whether its change is significant."""
    descriptions: dict[str, str] = {}
    for score in scores:
        direction = "higher" if score.is_higher_better else "lower"
        spread = "no standard error" if score.stderr is None else "standard error over documents"
        descriptions[score.name] = f"{score.documents} documents; {spread}; {direction} is better"
    for score, original in zip(scores, originals, strict=False):
        if (compared := change(score, original)) is not None:
            scale, _middle, low, high = compared
            descriptions[f"{score.name}_{scale}"] = _verdict(score, scale, low, high)
    return descriptions


def _verdict(score: Score, scale: Scale, low: float, high: float) -> str:
    no_change = 1.0 if scale == "ratio" else 0.0
    spread = f"{low:.4g} to {high:.4g}; the same documents pair by pair, 95 % interval"
    if low <= no_change <= high:
        return f"no difference that these {score.documents} documents can show: {spread}"
    is_better = (low > no_change) == score.is_higher_better
    return f"{'better' if is_better else 'worse'} than the original beyond chance: {spread}"


# ---------------------------------------------------------------------------
# Runs lm-evaluation-harness on a loaded model; only its environment has the harness.
#
# The harness builds the requests and scores the answers. The job loads the model, with any weight
# dtype, and the documents: the harness opens no file and no socket.
# ---------------------------------------------------------------------------


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
            harness_task = _harness_task(task)
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


def _harness_task(task: TaskFile) -> _HarnessTask:
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
