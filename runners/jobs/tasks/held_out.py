"""Builds two task files from the host's held-out text.

``held_out_choice`` is multiple choice of a file's next line out of four, ``held_out_text`` is
the likelihood of text excerpts. Both are the same on every run of the same Python.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from runners.jobs.corpus import Corpus, Document
from runners.jobs.tokenizer import cached_folder

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
