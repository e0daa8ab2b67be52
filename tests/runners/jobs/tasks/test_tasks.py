"""Task files are read as data alone, and their figures are held to the formulas."""

import json
import math

import numpy as np
import pytest
import yaml

from runners.jobs.corpus import Corpus, Document
from runners.jobs.evaluation_tasks import (
    CHOICE,
    TEXT,
    Score,
    change,
    figures,
    held_out_tasks,
    notes,
    read_tasks,
    weighted_mean,
)
from runners.jobs.runtime import BadInputError, MissingModelError
from tests.runners.jobs.cases import refused

GOOD = {
    "task": "capitals",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "capitals.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}
ROWS = [{"question": f"q{at}", "choices": ["a", "b"], "answer": at % 2} for at in range(3)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


def write(folder, more: str = "", rows: str = "", **changes) -> None:
    config = {key: value for key, value in (GOOD | changes).items() if value is not None}
    (folder / f"{config['task']}.yaml").write_text(yaml.safe_dump(config) + more)
    text = rows or "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "capitals.jsonl").write_text(text)


def read(folder, *names):
    return read_tasks(folder, names, [folder.parent])


def test_a_task_is_read_with_its_documents_and_without_where_they_came_from(folder):
    write(folder)
    write(folder, task="rivers")
    (task,) = read(folder, "capitals")
    assert (task.name, task.documents) == ("capitals", {"test": ROWS})
    assert not {"dataset_path", "dataset_kwargs"} & set(task.config)
    assert [each.name for each in read(folder)] == ["capitals", "rivers"]
    write(folder, rows=json.dumps(ROWS, indent=1))
    assert read(folder)[0].documents == {"test": ROWS}


def test_what_is_no_plain_data_is_refused_by_name(folder):
    for changes, message in (
        ({"more": "process_docs: !function utils.load\n"}, "has a !function: code from a folder"),
        ({"more": "include: ../other.yaml\n"}, "capitals: include is not supported here"),
        ({"unsafe_code": True}, "unsafe_code is not supported here"),
        ({"output_type": "guess"}, "output_type is 'guess'; it can be multiple_choice"),
        ({"dataset_path": "cais/mmlu"}, "nothing is fetched, so its data must be a file"),
        ({"dataset_kwargs": {"data_files": 5}}, "data must be a file"),
        (
            {"dataset_kwargs": {"data_files": {"test": "capitals.jsonl"}, "num_proc": 9}},
            "data must be a file",
        ),
        ({"test_split": "best"}, "test_split is 'best'; its data_files have test"),
        ({"test_split": None}, "test_split and validation_split are not set; set test_split"),
        (
            {"rows": '{"a": 1}\n{"b":\n'},
            r"capitals.jsonl, line 2: it is not valid JSON .Expecting value.; write",
        ),
        ({"rows": "[1, 2]"}, "must hold JSON objects, one a line"),
        ({"rows": "\n"}, "must hold JSON objects"),
        ({"rows": '{"a": 1, "a": 2}'}, "line 1: it has the key “a” twice in one object"),
        ({"rows": '{"a": NaN}'}, "line 1: it holds the number NaN, which is not finite"),
        ({"more": "test_split: other\n"}, "the key “test_split” stands twice; keep one"),
        ({"more": "metadata: [\n"}, "is not valid YAML"),
        ({"more": "metadata: " + "[" * 2000 + "\n"}, "is not valid YAML"),
    ):
        write(folder, **changes)

        with refused(BadInputError, message, (changes, message)):
            read(folder)


def test_a_data_file_that_is_absent_or_outside_of_the_roots_is_not_read(folder, tmp_path_factory):
    write(folder)
    (folder / "capitals.jsonl").unlink()
    with pytest.raises(MissingModelError, match=r"capitals\.jsonl is not on this host; copy it"):
        read(folder)

    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.jsonl"
    elsewhere.write_text(json.dumps(ROWS[0]))
    write(folder)
    (folder / "capitals.jsonl").unlink()
    (folder / "capitals.jsonl").symlink_to(elsewhere)
    with pytest.raises(MissingModelError, match="is outside"):
        read(folder)


def test_an_empty_folder_or_an_unknown_task_is_told_what_there_is(folder):
    with pytest.raises(BadInputError, match="give a folder of YAML files that each say 'task"):
        read(folder)
    write(folder)
    (folder / "copy.yaml").write_text((folder / "capitals.yaml").read_text())
    with pytest.raises(
        BadInputError, match=r"capitals is in .*capitals\.yaml and in .*copy\.yaml"
    ):
        read(folder)
    (folder / "copy.yaml").unlink()
    with pytest.raises(BadInputError, match=r"no task capitols in .*; near it are capitals"):
        read(folder, "capitols")


def test_tasks_of_held_out_text_are_the_same_twice_and_ask_what_comes_next(tmp_path):
    lines = "\n".join(f"line {at} of a text with some length" for at in range(200))
    texts = [f"{number}\n{lines}" for number in range(40)]
    corpus = Corpus(tuple(Document(f"python/{at}.py", text) for at, text in enumerate(texts)))
    caches = [tmp_path / name for name in "ab"]
    for cache in caches:
        cache.mkdir()

    first, second = (
        read_tasks(held_out_tasks(corpus, each), (), [each.resolve()]) for each in caches
    )

    assert first == second
    choice, text = first
    assert (choice.name, text.name) == (CHOICE, TEXT)
    for row in choice.documents["test"]:
        before = int(row["context"].splitlines()[-1].split()[1])
        assert row["choices"][row["answer"]].startswith(f"line {before + 1} ")
        assert len(set(row["choices"])) == 4


# Figures of tasks held to their formulas, and changes called changes only beyond chance.

RIGHT = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
WRONG = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])


def accuracy(values) -> Score:
    ones = np.ones(len(values))
    return Score("t", "acc", float(values.mean()), "mean", True, len(values), values, ones)


def perplexity(sums, weights) -> Score:
    value = math.exp(-sums.sum() / weights.sum())
    return Score("t", "ppl", value, "weighted_perplexity", False, len(sums), sums, weights)


def test_errors_are_those_of_the_formula_and_of_drawing_documents_anew():
    mean, error = weighted_mean(RIGHT, np.ones(6))
    assert mean == pytest.approx(4 / 6)
    assert error == pytest.approx(RIGHT.std(ddof=1) / math.sqrt(6))
    assert accuracy(RIGHT).stderr == pytest.approx(error)

    chance = np.random.default_rng(3)
    weights = chance.integers(50, 150, 400).astype(float)
    sums = -weights * chance.normal(1.2, 0.3, 400)
    picks = chance.integers(0, 400, (2000, 400))
    drawn = np.exp(-sums[picks].sum(axis=1) / weights[picks].sum(axis=1))
    assert perplexity(sums, weights).stderr == pytest.approx(drawn.std(), rel=0.1)


def test_a_change_pairs_the_documents_and_is_a_factor_of_a_perplexity():
    scale, middle, low, high = change(accuracy(RIGHT), accuracy(WRONG))
    differences = RIGHT - WRONG
    spread = 1.96 * differences.std(ddof=1) / math.sqrt(6)
    assert (scale, middle) == ("difference", pytest.approx(differences.mean()))
    assert (low, high) == pytest.approx((middle - spread, middle + spread))

    weights = np.array([10.0, 20.0, 30.0])
    before, after = perplexity(-weights, weights), perplexity(-1.5 * weights, weights)
    assert change(after, before) == ("ratio", *[pytest.approx(math.exp(0.5))] * 3)
    told = notes([after], [before])["t/ppl_ratio"]
    assert told.startswith("worse than the original beyond chance")


def test_a_difference_is_one_only_beyond_chance():
    for better, words in (
        (40, "better than the original beyond chance"),
        (1, "no difference that"),
    ):
        before = np.zeros(100)
        after = before.copy()
        after[:better] = 1.0

        assert notes([accuracy(after)], [accuracy(before)])["t/acc_difference"].startswith(
            words
        ), (better, words)


def test_alone_or_of_another_kind_a_figure_has_a_value_and_no_change():
    assert set(figures([accuracy(RIGHT)], [])) == {"t/acc", "t/acc_stderr"}
    score = Score("t", "f1", 0.4, "another", True, 9, RIGHT, np.ones(6))
    assert figures([score], [score]) == {"t/f1": 0.4, "original_t/f1": 0.4}
    assert "no standard error" in notes([score], [score])["t/f1"]
