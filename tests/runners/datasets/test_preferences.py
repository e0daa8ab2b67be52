"""Records that compare answers, and prompts alone: TRL's forms, read as their makers mean them."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runners.datasets.conversations import DataError
from runners.datasets.preferences import columns_of
from runners.datasets.records import Reader, check_file, num_characters


def message(role, text):
    return {"role": role, "content": text}


SYSTEM = message("system", "s")
ASKED, GOOD, BAD = message("user", "q"), message("assistant", "a"), message("assistant", "b")
# name: (record, format, the columns that TRL reads, fields that are left out)
FORMS = {
    "texts": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", {}, []),
    "texts without a prompt": ({"chosen": "qa", "rejected": "qb"}, "preference", {}, []),
    "messages": (
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, "preference", {}, [],
    ),
    "messages that hold the prompt": (
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "preference", {}, [],
    ),
    "UltraFeedback": (  # https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized
        {"prompt": "q", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score_chosen": 8.5,
         "messages": [ASKED, GOOD]},
        "preference", {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        ["messages", "prompt", "score_chosen"],
    ),
    "messages after a system": (
        {"system": "s", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        "preference",
        {"chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]}, [],
    ),
    "messages that begin with the system": (
        {"system": "s", "prompt": "q", "chosen": [SYSTEM, ASKED, GOOD],
         "rejected": [SYSTEM, ASKED, BAD]},
        "preference",
        {"chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]}, ["prompt"],
    ),
    "a prompt": ({"prompt": "q", "answer": "4", "level": 2}, "prompt",
        {"prompt": "q", "record": '{"answer": "4"}'}, ["level"]),
    "a prompt of messages": ({"prompt": [ASKED], "system": "s"}, "prompt",
        {"prompt": [SYSTEM, ASKED], "record": "{}"}, []),
    "KTO": ({"prompt": "q", "completion": "a", "label": False}, "kto", {}, []),
    "KTO as messages": (
        {"prompt": [ASKED], "completion": [GOOD], "label": True}, "kto", {}, [],
    ),
}  # fmt: skip


def test_every_form_is_read_from_lines_and_tables_in_the_columns_that_trl_reads():
    for name, (record, form, columns, left_out) in FORMS.items():
        table = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([record]), table)
        files = {"jsonl": f"{json.dumps(record)}\n".encode(), "parquet": table.getvalue()}
        for ending, data in files.items():
            reader = Reader(f"a.{ending}")
            [found] = reader.records(io.BytesIO(data))
            assert (reader.format, columns_of(found.sample)) == (form, columns or record), name
            assert sorted(reader.left_out) == left_out, (name, ending)
            assert num_characters(found.sample) >= 2, name


def test_the_check_of_a_file_shows_prompts_and_answers_and_counts_empty_ones():
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": " ", "rejected": "b"},
        {"prompt": "r", "chosen": "c", "rejected": "d"},
    ]
    found = check_file(io.BytesIO("\n".join(map(json.dumps, rows)).encode()), "a.jsonl")

    assert (found.errors, found.format) == ((), "preference")
    assert (found.num_records, found.num_empty) == (2, 1)
    assert found.samples[0] == (("prompt", "q"), ("chosen", "a"), ("rejected", "b"))


def test_a_class_beside_a_completion_is_no_judgement():
    reader = Reader("a.jsonl")
    record = {"prompt": "q", "completion": "a", "label": "x"}
    list(reader.records(io.BytesIO(json.dumps(record).encode())))

    assert (reader.format, dict(reader.left_out)) == ("completion", {"label": 1})


def test_a_system_beside_texts_and_a_rating_in_another_format_are_refused_by_line():
    rated = {"prompt": "q", "completion": "a", "label": False}
    talk = {"prompt": [ASKED], "completion": [GOOD], "label": False}
    for form, record, said in [
        (None, {"system": "s", "chosen": "a", "rejected": "b"}, "write it into “prompt”"),
        (None, {"system": "s", "prompt": "", "completion": "a", "label": True}, "write it into"),
        ("completion", rated, "which the format kto learns from"),
        ("chat", talk, "which the format kto learns from"),
    ]:
        reader = Reader("a.jsonl", form)
        with pytest.raises(DataError, match=f"line 1: .*{said}"):
            list(reader.records(io.BytesIO(json.dumps(record).encode())))
