"""Task files as an operator writes them: read as data, and everything else refused by name."""

import json

import pytest
import yaml

from runners.jobs.corpus import Corpus, Document
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobs.tasks.files import CHOICE, TEXT, held_out_tasks, read_tasks

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


def test_a_json_list_is_read_like_lines(folder):
    write(folder, rows=json.dumps(ROWS, indent=1))

    assert read(folder)[0].documents == {"test": ROWS}


def test_an_unknown_task_is_named_with_those_near_it(folder):
    write(folder)

    with pytest.raises(BadInputError, match=r"no task capitols in .*; near it are capitals"):
        read(folder, "capitols")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": "process_docs: !function utils.load\n"}, "has a !function: code from a folder"),
        ({"more": "include: ../other.yaml\n"}, "capitals: include cannot be read here"),
        ({"unsafe_code": True}, "unsafe_code cannot be read here"),
        ({"output_type": "guess"}, "output_type is 'guess'; it can be multiple_choice"),
        ({"dataset_path": "cais/mmlu"}, "nothing is fetched, so its data must be a file"),
        ({"dataset_kwargs": {"data_files": 5}}, "data must be a file"),
        (
            {"dataset_kwargs": {"data_files": {"test": "capitals.jsonl"}, "num_proc": 9}},
            "data must be a file",
        ),
        ({"test_split": "best"}, "test_split is 'best'; its data_files have test"),
        ({"test_split": None}, "names no test_split"),
        ({"rows": '{"a": 1}\n{"b":\n'}, r"capitals.jsonl, line 2: Expecting value"),
        ({"rows": "[1, 2]"}, "must hold JSON objects, one a line"),
        ({"rows": "\n"}, "must hold JSON objects"),
        ({"more": "metadata: [\n"}, "is no YAML"),
        ({"more": "metadata: " + "[" * 2000 + "\n"}, "is no YAML"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_name(folder, changes, message):
    write(folder, **changes)

    with pytest.raises(BadInputError, match=message):
        read(folder)


def test_a_data_file_that_is_not_there_is_named(folder):
    write(folder)
    (folder / "capitals.jsonl").unlink()

    with pytest.raises(MissingModelError, match=r"capitals\.jsonl is not on this host; copy it"):
        read(folder)


def test_a_data_file_outside_of_the_roots_is_not_read(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.jsonl"
    elsewhere.write_text(json.dumps(ROWS[0]))
    write(folder)
    (folder / "capitals.jsonl").unlink()
    (folder / "capitals.jsonl").symlink_to(elsewhere)

    with pytest.raises(MissingModelError, match="lies outside"):
        read(folder)


def test_an_empty_folder_is_told_what_belongs_there(folder):
    with pytest.raises(BadInputError, match="give a folder of YAML files that each say 'task"):
        read(folder)


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
