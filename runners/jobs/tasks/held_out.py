"""Two tasks made of the host's held-out text, as files that the harness reads like any other.

``held_out_choice`` asks which of four lines of a file comes next, ``held_out_text`` how likely
whole pieces of text are. Both are the same on every run of the same Python.
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
PER_DOCUMENT = 8  # questions of one file, so that long files do not make up the task
LINE_CHARACTERS = range(16, 81)
PIECE_CHARACTERS = 1000
MOST = 400  # documents of a task
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
    """Return the folder of both tasks, made where it is not there."""
    name = f"tasks-{VERSION}-{corpus.digest[:24]}"
    return cached_folder(cache_dir, name, lambda target: _write(corpus.held_out, target))


def _write(documents: Sequence[Document], target: Path) -> None:
    made = {CHOICE: _most(_questions(documents)), TEXT: _most(_pieces(documents))}
    for name, objects in made.items():
        lines = "".join(json.dumps(each) + "\n" for each in objects)
        (target / f"{name}.jsonl").write_text(lines)
        kwargs = {"data_files": {"test": f"{name}.jsonl"}}
        config = {"task": name, **_COMMON, "dataset_kwargs": kwargs, **_CONFIGS[name]}
        (target / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def _most(objects: Iterator[dict[str, object]]) -> list[dict[str, object]]:
    """Return at most ``MOST`` of them in an order in which the first few are any of them."""
    found = list(objects)
    random.Random(VERSION).shuffle(found)  # noqa: S311 - the same on every run, nothing secret
    return found[:MOST]


def _questions(documents: Sequence[Document]) -> Iterator[dict[str, object]]:
    for document in documents:
        chance = random.Random(document.digest)  # noqa: S311 - as above
        lines = [line.rstrip() for line in document.text.splitlines() if line.strip()]
        usual = [line for line in lines if len(line) in LINE_CHARACTERS]
        places = range(NUM_LINES_BEFORE, len(lines))
        for at in sorted(chance.sample(places, min(PER_DOCUMENT, len(places)))):
            right = lines[at]
            others = sorted(set(usual) - {right})
            if right not in usual or len(others) < NUM_CHOICES:
                continue
            choices = [right, *chance.sample(others, NUM_CHOICES - 1)]
            chance.shuffle(choices)
            context = "\n".join(lines[at - NUM_LINES_BEFORE : at])
            yield {"context": context, "choices": choices, "answer": choices.index(right)}


def _pieces(documents: Sequence[Document]) -> Iterator[dict[str, object]]:
    for document in documents:
        text = document.text
        middle = max(0, len(text) // 2 - PIECE_CHARACTERS // 2)
        yield {"text": text[middle : middle + PIECE_CHARACTERS]}
