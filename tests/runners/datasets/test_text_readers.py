"""Every reader of people's text reads it with one reader: marks, line ends, encodings, JSON."""

import inspect
import io
import json
import re
from pathlib import Path

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.forms import ValidationError
from hypothesis import given
from hypothesis import strategies as st

from runners.datasets import conversations, records
from runners.datasets.conversations import DataError
from runners.datasets.records import Reader
from runners.datasets.text import (
    MARK,
    MAX_DEPTH,
    LongLineError,
    TextError,
    read_json,
    read_lines,
    read_text,
)
from runners.jobs import evaluation_tasks
from runners.jobs.evaluation_tasks import read_tasks
from runners.jobs.generate import answering
from runners.jobs.runtime import BadInputError
from tests.runners.jobs.cases import refused
from webapp.wizard import forms
from webapp.wizard.forms import ConfigJson, read_upload

REFUSALS = (DataError, BadInputError, ValidationError)
TASK = b"""task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: loglikelihood
"""
ODD = 'é \u2028 \x85 \u00a0 "quoted" 🚢'  # what JSON may hold within a line


def samples(name):
    return lambda data, _folder: [each.sample for each in Reader(name).records(io.BytesIO(data))]


def prompts(name):
    def read(data, folder):
        (folder / name).write_bytes(data)
        return answering._file_texts(name, [folder])

    return read


def tasks(data, folder, task=TASK):
    (folder / "data.jsonl").write_bytes(data)
    (folder / "mine.yaml").write_bytes(task)
    return read_tasks(folder, [], [folder])


READERS = {  # how it reads bytes, and a file that it takes
    "training data": (samples("a.jsonl"), [{"text": ODD}, {"text": "b"}]),
    "conversations": (
        samples("a.jsonl"),
        [{"messages": [{"role": "assistant", "content": ODD}]}] * 2,
    ),
    "training text": (samples("a.txt"), "import os\ndef f\n"),
    "prompts": (prompts("a.jsonl"), [{"prompt": ODD}, {"prompt": "def f", "id": "x"}]),
    "prompt lines": (prompts("a.txt"), "import os\ndef f\n"),
    "task data": (tasks, [{"question": ODD}, {"question": "b"}]),
    "a list of task data": (tasks, json.dumps([{"question": "a"}])),
    "a task": (lambda data, folder: tasks(b'{"a": 1}\n', folder, data), TASK.decode()),
    "a pasted config": (lambda data, _: ConfigJson("c").clean(data.decode()), '{"a": "é"}'),
    "an uploaded config": (
        lambda data, _: read_upload(SimpleUploadedFile("config.json", data)),
        '{"a": "é"}',
    ),
}


def content_of(file) -> str:
    if isinstance(file, str):
        return file
    return "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in file)


def test_no_reader_takes_a_byte_order_mark_for_content(tmp_path):
    for name, (read, file) in READERS.items():
        data = content_of(file).encode()
        assert read(MARK.encode() + data, tmp_path) == read(data, tmp_path), name
    two_files = (MARK + '{"prompt": "a"}\n') * 2
    assert [each.text for each in prompts("a.jsonl")(two_files.encode(), tmp_path)] == ["a", "a"]


def test_lines_of_any_system_are_the_same_lines(tmp_path):
    for name, (read, file) in READERS.items():
        if "config" in name or "training text" in name:
            continue
        data = content_of(file).encode()
        for end in (b"\r\n", b"\r"):
            assert read(data.replace(b"\n", end), tmp_path) == read(data, tmp_path), (name, end)


def test_another_encoding_is_refused_by_its_name_with_the_way_out(tmp_path):
    for name, (read, file) in READERS.items():
        if name == "a pasted config":  # the browser sends text
            continue
        for encoding, said in (("utf-16", "UTF-16"), ("utf-32", "UTF-32"), ("latin-1", "byte")):
            data = content_of(file).replace("🚢", "é").replace("\u2028", "é")
            data = data.replace("import os", "é").replace('"a"', '"é"').replace("mine", "é")
            with refused(REFUSALS, f"{said}.*save the file as UTF-8", (name, encoding)):
                read(data.encode(encoding), tmp_path)


def test_what_no_tokenizer_takes_and_what_is_no_json_is_refused_with_its_place(tmp_path):
    for name, text, said in (
        ("a.jsonl", '{"prompt": "a\\ud800"}', "line 1: “prompt” holds half of a surrogate pair"),
        ("a.jsonl", '{"prompt": "a\\u0000"}', "line 1: “prompt” holds a null character"),
        ("a.jsonl", '{"prompt": "a", "id": "\\ud800"}', "line 1: “id” holds half"),
        ("a.txt", "fine\na\0", "line 2: “prompt” holds a null character"),
        ("a.jsonl", '{"prompt": "a", "system": "b"}', "line 1: “system” would change the answer"),
        ("a.jsonl", '\n{"prompt": "a"', "line 2: it is not valid JSON"),
    ):
        with pytest.raises(BadInputError, match=said):
            prompts(name)(text.encode(), tmp_path)
    with pytest.raises(BadInputError, match=r"data\.jsonl, line 2: it is not valid JSON"):
        tasks(b'{"a": 1}\n{"a": ', tmp_path)


def test_no_reader_decodes_or_parses_beside_the_one():
    own = ('json.loads(self.more or "{}")', 'raw.decode("utf-8", "replace")')
    for module in (conversations, records, evaluation_tasks, forms):
        text = Path(module.__file__).read_text()
        for each in own:
            text = text.replace(each, "")
        assert "json.loads(" not in text, module
        assert ".decode(" not in text, module
    reader = inspect.getsource(answering._read_line) + inspect.getsource(answering._lines)
    assert "json.loads(" not in reader
    assert ".decode(" not in reader


@given(st.text(), st.integers(1, 40))
def test_lines_are_all_of_a_file_and_end_where_lines_end(text, most):
    data = text.encode()
    try:
        found = list(read_lines(io.BytesIO(data), most))
    except LongLineError:
        assert max(map(len, data.splitlines(keepends=True))) > most
        return
    assert b"".join(line for _, line in found) == data.removeprefix(MARK.encode())
    lines = data.removeprefix(MARK.encode()).splitlines(keepends=True)
    assert [line for _, line in found if line] == lines


def test_json_is_whatever_its_standard_takes():
    for text in (
        "[1]",
        " null ",
        '"\\ud83d\\udea2"',
        "-0.0",
        '{"a": {"a": 2}}',
        '"\u2028"',
        "9" * 4000,
    ):
        assert read_json(MARK + text) == json.loads(text), text
    assert read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH + " ") == json.loads("[" * 100 + "]" * 100)
    assert read_json('["' + "[" * 200 + '"]') == ["[" * 200]
    for text in ("", "9" * 5000, "{'a': 1}", "[1,]"):
        with pytest.raises(TextError, match="it is not valid JSON"):
            read_json(text)
    with pytest.raises(TextError, match="UTF-16"):
        read_text("a".encode("utf-16"))


def test_what_json_leaves_open_is_decided_once_for_every_reader(tmp_path):
    """Keys that stand twice, depth, numbers without a value, text that nothing can store."""
    for value, said in (
        ('1, "twice": 2, "twice": 3', "it has the key “twice” twice in one object"),
        ('{"b": 1, "\\u0062": 2}', "it has the key “b” twice in one object"),
        ("NaN", "it holds the number NaN, which is not finite"),
        ("-Infinity", "it holds the number -Infinity, which is not finite"),
        ("1e999", "it holds the number 1e999, which is not finite"),
        ("[" * 100_000 + "]" * 100_000, "it is nested 100001 deep; "),
        ('"\\ud800"', "“odd” holds half of a surrogate pair"),
        ('["\\u0000"]', "“odd” holds a null character"),
        ('{"\\ud800": 1}', "“a key” holds half of a surrogate pair"),
    ):
        for name, (read, file) in READERS.items():
            if not isinstance(file, list) and "config" not in name:
                continue
            text = content_of(file).rstrip("\n")
            data = (text[:-1] + f', "odd": {value}}}').encode()
            with refused(REFUSALS, re.escape(said).replace("it\\ ", "(it|config.json) ", 1), name):
                read(data, tmp_path)


def test_a_key_that_stands_twice_is_named_with_its_line():
    with pytest.raises(TextError, match="the key “b” twice in one object, again on line 4;") as no:
        read_json('{"a": {"b": "{"},\n "c": [{"b": 1}],\n "b": 2,\n "b": 3}')
    assert (no.value.line, no.value.column) == (4, 2)
    with pytest.raises(TextError, match="the key “\\?” twice"):
        read_json('{"\\ud800": 1, "\\ud800": 2}')
