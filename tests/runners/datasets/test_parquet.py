"""Tables of Parquet: the same records as lines of JSON, and a sentence for what is wrong."""

import datetime as dt
import io
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runners.datasets import parquet_process
from runners.datasets.records import MAX_LINE_BYTES, DataError, Reader, checked

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]}
    for n in range(5)
]
ASKED = [
    {"instruction": f"Count to {n}.", "input": None, "output": f"… {n}", "stars": n}
    for n in range(600)
]


def table(rows, **options):
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), written, **options)
    return io.BytesIO(written.getvalue())


def read(file, name="a.parquet", stated=None):
    return list(Reader(name, stated).records(file))


def as_lines(rows):
    return io.BytesIO("".join(f"{json.dumps(row)}\n" for row in rows).encode())


def test_a_table_holds_the_records_that_lines_of_json_would():
    """However its rows are grouped and compressed."""
    for rows, options in [
        (CHATS, {}),
        (ASKED, {}),
        ([{"text": "één"}, {"text": "twee"}], {}),
        (ASKED, {"row_group_size": 7, "compression": "zstd"}),
        (ASKED, {"row_group_size": 1000, "compression": "none"}),
    ]:
        from_table, from_lines = read(table(rows, **options)), read(as_lines(rows), "a.jsonl")
        assert from_table == from_lines
        assert [each.line for each in from_table] == list(range(1, len(rows) + 1))


def test_a_table_is_read_by_its_known_columns_or_a_stated_format():
    when = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [{"text": "first", "seen": when}, {"text": "second", "seen": when}]
    assert [each.sample.text for each in read(table(rows))] == ["first", "second"]
    found = checked(table([{"text": "a"}, {"text": "  "}, {"text": "b"}]), "a.parquet")
    assert (found.num_records, found.num_empty, found.errors) == (2, 1, ())
    assert found.format == "text"
    rows = [{"text": "whole", "prompt": "a", "completion": "b"}]
    assert read(table(rows), stated="text")[0].sample.text == "whole"
    assert read(table(rows))[0].sample.completion == "b"


def test_what_is_wrong_with_a_table_is_named_by_row_and_column():
    [error] = checked(table([{"body": "a", "title": "b"}]), "a.parquet").errors[:1]
    assert error.startswith("a.parquet: row 1: it has the fields of no known format")
    assert "its fields are body, title" in error
    rows = [{"text": "a"}, {"text": None}, {"text": "b"}]
    found = checked(table(rows), "a.parquet")
    assert [each.partition(". It begins")[0] for each in found.errors] == [
        "a.parquet: row 2: “text” is no text but NoneType; its fields are text"
    ]
    with pytest.raises(DataError, match=r"row 1 holds what is no text.*text: bytes"):
        read(table([{"text": b"\xff\xfe"}]))
    with pytest.raises(DataError, match="row 2 is longer than 4 MiB"):
        read(table([{"text": "a"}, {"text": "b" * MAX_LINE_BYTES}]))


def test_what_is_no_parquet_or_damaged_ends_in_words():
    for content, words in [
        (b"", "cannot be read as Parquet"),
        (b"PAR1", "cannot be read as Parquet"),
        (b'{"text": "lines under a wrong name"}\n' * 10, "cannot be read as Parquet"),
        (table(ASKED).getvalue()[:-20], "cannot be read as Parquet"),
    ]:
        with pytest.raises(DataError, match=words) as caught:
            read(io.BytesIO(content))
        assert str(caught.value).startswith("a.parquet: "), (content, words)

    content = bytearray(table(ASKED, compression="zstd").getvalue())
    content[40:400] = bytes(360)
    with pytest.raises(DataError, match=r"a\.parquet: "):
        read(io.BytesIO(bytes(content)))


def test_a_row_group_too_large_for_memory_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(parquet_process, "MAX_GROUP_BYTES", 1024)
    with pytest.raises(DataError, match="smaller row groups"):
        read(table(ASKED))
    assert len(read(table(ASKED, row_group_size=10))) == 600


CRASHING = """
import os, signal
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_library_that_crashes_ends_its_own_process_only(monkeypatch, tmp_path):
    """And a row that its reader did not finish is no row."""
    reader = tmp_path / "reader.py"
    monkeypatch.setattr(parquet_process, "READER", reader)
    for source, status in ((CRASHING, -11), (DYING, -9)):
        reader.write_text(source)
        with pytest.raises(DataError, match=rf"a\.parquet: its reader ended with status {status}"):
            read(table(ASKED))


DYING = """
import os
os.write(1, b'{"text": "whole"}\\n{"text": "ha')
os.kill(os.getpid(), 9)
"""


SPEAKING = """
import json, os
print(json.dumps({"text": " ".join(os.environ)}))
"""


def test_a_reader_is_given_no_secret_of_the_server(monkeypatch, tmp_path):
    reader = tmp_path / "speaking.py"
    reader.write_text(SPEAKING)
    monkeypatch.setattr(parquet_process, "READER", reader)
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:secret@here/db")
    [found] = read(table(ASKED))
    assert "DATABASE_URL" not in found.sample.text


def test_a_table_that_takes_too_much_memory_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(parquet_process, "MAX_BYTES", 512 * 1024**2)
    options = {"use_dictionary": False, "compression": "zstd", "row_group_size": 400}
    row = {"text": "a" * 1024**2}
    assert len(read(table([row], **options))) == 1
    with pytest.raises(DataError, match=r"a\.parquet: .*(malloc|memory)"):
        read(table([row] * 110, **options))


def test_whoever_has_seen_enough_leaves_no_reader_behind(monkeypatch):
    started = []
    begin = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(begin(*a, **k)) or started[-1]
    )
    records = Reader("a.parquet").records(table(ASKED))
    assert next(records).line == 1
    records.close()
    assert [one.poll() is not None for one in started] == [True]


def test_a_server_that_checks_a_table_does_not_load_the_library(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(table(ASKED).getvalue())
    code = (
        "import sys; from runners.datasets.records import checked; "
        f"found = checked(open({str(path)!r}, 'rb'), 'a.parquet'); "
        "print(found.num_records, 'pyarrow' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.split() == ["600", "False"]
