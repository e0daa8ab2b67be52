"""Task files of lm-evaluation-harness: read without executing, or built of held-out text."""

import difflib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runners.jobs.corpus import Corpus, Document, cached_folder
from runners.jobs.model_files import open_file
from runners.jobs.runtime import BadInputError, MissingModelError

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
    """YAML loader that replaces every custom tag with a ``_CodeTag``."""


_Loader.add_multi_constructor("!", lambda _loader, _suffix, _node: _CodeTag())


def read_tasks(folder: Path, names: Sequence[str], roots: Sequence[Path]) -> list[TaskFile]:
    """Return the named tasks of a folder's YAML files; all tasks if no name is given.

    Raises:
        BadInputError: a task does not exist, or has unsupported content.
        MissingModelError: a data file is missing, or outside of ``roots``.
    """
    known = dict(_find_tasks(folder, roots))
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
        raise BadInputError(f"{folder} has {len(paths)} YAML files; {MAX_FILES} are read")
    for path in paths:
        text = _read(path, roots, MAX_TASK_BYTES)
        try:
            document = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a SafeLoader
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInputError(f"{path} is no YAML: {reason}") from None
        if isinstance(document, dict) and isinstance(document.get("task"), str):
            yield document["task"], (path, document)


def _task(name: str, path: Path, config: JsonObject, roots: Sequence[Path]) -> TaskFile:
    if any(isinstance(value, _CodeTag) for value in _values(config)):
        msg = f"task {name} has a !function: code from a folder never runs; say it as a template"
        raise BadInputError(msg)
    if unknown := sorted(set(map(str, config)) - FIELDS):
        msg = f"task {name}: {', '.join(unknown)} cannot be read here; leave it out of {path}"
        raise BadInputError(msg)
    if config.get("output_type") not in OUTPUT_TYPES:
        msg = (
            f"task {name}: output_type is {config.get('output_type')!r}; it can be "
            f"{', '.join(OUTPUT_TYPES)}"
        )
        raise BadInputError(msg)
    files = _data_files(name, path, config)
    documents = {split: _documents(name, file, roots) for split, file in files.items()}
    for field in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if (split := config.get(field)) is not None and split not in documents:
            known = ", ".join(documents)
            raise BadInputError(f"task {name}: {field} is {split!r}; its data_files have {known}")
    if not (config.get("test_split") or config.get("validation_split")):
        raise BadInputError(f"task {name} names no test_split of its data_files; add it to {path}")
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
    text = _read(path, roots, MAX_DATA_BYTES)
    is_list = text.lstrip().startswith("[")
    objects: list[JsonObject] = []
    for number, line in enumerate([text] if is_list else text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"task {name}: {path}, line {number}: {error}") from None
        objects += value if is_list else [value]
    if not objects or not all(isinstance(each, dict) for each in objects):
        raise BadInputError(f"task {name}: {path} must hold JSON objects, one a line")
    return objects


def _read(path: Path, roots: Sequence[Path], limit: int) -> str:
    handle = open_file(path, roots)
    with os.fdopen(handle, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise BadInputError(f"{path} is longer than {limit} bytes; give fewer documents")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is no UTF-8 text: {error.reason}") from None


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
MOST = 400  # documents per task
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
    """Return at most ``MOST`` objects in random order, so that any prefix is a sample."""
    sample = list(objects)
    random.Random(VERSION).shuffle(sample)  # noqa: S311 - the same on every run, nothing secret
    return sample[:MOST]


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
