"""Training files as lines and as tables: what is read, and a sentence for what is wrong."""

import datetime as dt
import hashlib
import io
import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runners.datasets import parquet_process
from runners.datasets.conversations import ChatSample, DataError, Turn
from runners.datasets.parquet_process import rows_in_subprocess
from runners.datasets.records import (
    MAX_LINE_BYTES,
    CompletionSample,
    Reader,
    TextSample,
    check_file,
    digest_of,
    left_out_words,
)

# Training files by hand: what each format reads, and a sentence for each thing that is wrong.

QUESTION = {"instruction": "Name a colour.", "input": "", "output": "Green."}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}


def read_lines(data, name="a.jsonl", stated=None):
    reader = Reader(name, stated)
    return [each.sample for each in reader.records(io.BytesIO(data))]


def as_bytes(*documents):
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


def test_each_format_is_known_by_its_fields_or_stated():
    for document, sample in [
        ({"text": "All of it."}, TextSample("All of it.")),
        ({"prompt": "2+2=", "completion": "4"}, CompletionSample("2+2=", "4")),
        (QUESTION, ChatSample((Turn("user", "Name a colour."), Turn("assistant", "Green.")))),
        (
            {**QUESTION, "input": "Of leaves."},
            ChatSample(
                (Turn("user", "Name a colour.\n\nOf leaves."), Turn("assistant", "Green."))
            ),
        ),
        (CHAT, ChatSample((Turn("user", "Hi"), Turn("assistant", "Yes?")))),
    ]:
        assert read_lines(as_bytes(document, document)) == [sample, sample], (document, sample)

    document = {"text": "whole", "prompt": "a", "completion": "b"}
    assert read_lines(as_bytes(document), stated="text") == [TextSample("whole")]
    assert read_lines(as_bytes(document)) == [CompletionSample("a", "b")]


def test_a_text_file_is_divided_between_paragraphs():
    paragraph = "word " * 300 + "\n\n"
    found = read_lines((paragraph * 5).encode(), "a.txt")
    assert len(found) == 3
    assert "".join(each.text for each in found) == paragraph * 5


def test_blank_lines_a_byte_order_mark_and_empty_records_do_not_count():
    reader = Reader("a.jsonl")
    data = (
        b"\xef\xbb\xbf" + as_bytes({"text": "one"}) + b"\n  \n" + as_bytes({"text": " "}, QUESTION)
    )
    with pytest.raises(DataError, match="line 5"):
        list(reader.records(io.BytesIO(data)))
    assert (reader.num_empty, reader.format) == (1, "text")


def test_what_is_wrong_with_a_line_is_said_with_its_number_and_beginning():
    for line, said in [
        (
            b'{"text": "cut',
            r'line 2: it is not valid JSON \(Unterminated string.*It begins "{\\"text',
        ),
        (b'{"text": "\xff"}', "line 2: byte 11 is not valid UTF-8; save the file as UTF-8"),
        (b'{"text": "a\0b"}', "line 2: it holds a null character"),
        (rb'{"text": "a\u0000b"}', "line 2: “text” holds a null character"),
        (rb'{"text": "a\ud800b"}', "line 2: “text” holds half of a surrogate pair at character 2"),
        (b"[1]", "line 2: it is not a JSON object"),
        (b"[" * 100_000, "line 2: it is no JSON object of one line; write one object per line"),
        (b"{", "line 2: it is no JSON object of one line; write one object per line: jq -c"),
        (b'{"text": "a", "text": "b"}', "line 2: it has the key “text” twice in one object"),
        (b'{"body": "x"}', "line 2: “text” is missing; its fields are body"),
        (b'{"text": 7}', "line 2: “text” is not text but int"),
    ]:
        with pytest.raises(DataError, match=said):
            read_lines(as_bytes({"text": "fine"}) + line + b"\n")

    with pytest.raises(DataError, match="line 1 is longer than 4 MiB"):
        read_lines(b"x" * (MAX_LINE_BYTES + 2))


def test_what_is_wrong_with_a_first_record():
    for document, said in [
        ({"body": "x", "title": "y"}, "no known format.*its fields are body, title"),
        (
            {"question": "q", "chosen": "a", "rejected": "b"},
            "“question” stands beside “chosen”; write the prompt as “prompt”",
        ),
        ({"conversation": [{"from": "human", "value": "q"}]}, "“conversation”: write the turns"),
        ({"messages": "hi"}, "“messages” is not a list of .*; its fields are messages"),
        ({"messages": [1]}, "message 1 is not an object"),
        ({"messages": [{"role": "bot", "content": "1"}]}, "role 'bot'; known are system, user"),
        ({"messages": [{"role": "user", "content": "1"}]}, "no message has the role “assistant”"),
        ({"messages": [{"role": "assistant", "content": None}]}, "“content” is not text but None"),
    ]:
        with pytest.raises(DataError, match=f"a.jsonl: line 1: .*{said}"):
            read_lines(as_bytes(document))


def test_an_unknown_kind_of_file_or_a_chat_of_text_is_refused_by_its_name():
    for name, said in [
        ("a.xls", r"end in \.jsonl, \.json, \.parquet, \.csv or \.txt, not '\.xls'"),
        ("noending", r"not 'in nothing'"),
    ]:
        with pytest.raises(DataError, match=said):
            Reader(name)
    with pytest.raises(DataError, match="chat needs JSON lines"):
        Reader("a.txt", "chat")


def test_equal_records_have_equal_digests():
    found = read_lines(as_bytes(QUESTION, QUESTION | {"id": 7}, QUESTION | {"output": "Red."}))
    digests = [digest_of(each) for each in found]
    assert digests[0] == digests[1] != digests[2]
    plain = [[["user", "Name a colour."], ["assistant", "Green."]]]  # as older versions had it
    assert digests[0] == hashlib.sha256(json.dumps(plain).encode()).digest()


def test_a_check_counts_shows_the_first_three_and_stops_after_five_errors():
    found = check_file(
        io.BytesIO(as_bytes(*[{**QUESTION, "output": str(n)} for n in range(9)])), "a.jsonl"
    )
    assert (found.format, found.num_records, found.errors) == ("instruction", 9, ())
    assert [sample[1].text for sample in found.samples] == ["0", "1", "2"]
    assert found.samples[0][0] == ("user", "Name a colour.")
    bad = b"{\n" * 9
    found = check_file(io.BytesIO(as_bytes(QUESTION) + bad + as_bytes(CHAT)), "a.jsonl")
    assert len(found.errors) == 5
    assert [f"line {n}" in error for n, error in enumerate(found.errors, 2)] == [True] * 5


def test_a_set_that_leaves_nothing_to_judge_by_is_refused():
    for documents, said in [
        ([], "no record"),
        ([QUESTION], "only one record"),
        ([QUESTION, QUESTION], "one record, again"),
    ]:
        found = check_file(io.BytesIO(as_bytes(*documents)), "a.jsonl")
        assert found.errors == (
            f"a.jsonl holds {said}; give at least two that differ: one is held out for evaluation",
        )


# Fields beside those of the format: honoured, refused by name, or counted.


def chat(*messages, **fields):
    return {"messages": [{"role": "user", "content": "q"}, *messages], **fields}


def user(content):
    return {"role": "user", "content": content}


def answer(content="a", **fields):
    return {"role": "assistant", "content": content, **fields}


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"in": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_system_history_weight_and_tool_calls_are_honoured():
    for document, turns in [
        (
            {**QUESTION, "system": "In French.", "history": [["Who?", "A bot"]]},
            [
                ("system", "In French."),
                ("user", "Who?"),
                ("assistant", "A bot"),
                ("user", "Name a colour."),
                ("assistant", "Green."),
            ],
        ),
        (
            chat(answer(), system="Short."),
            [("system", "Short."), ("user", "q"), ("assistant", "a")],
        ),
        (chat(answer([{"type": "text", "text": "a"}])), [("user", "q"), ("assistant", "a")]),
        (
            chat(answer("WRONG", weight=0), answer()),
            [("user", "q"), Turn("assistant", "WRONG", "", False), ("assistant", "a")],
        ),
        (
            chat(answer("WRONG", train=False), answer("a", weight=1.0)),
            [("user", "q"), Turn("assistant", "WRONG", "", False), ("assistant", "a")],
        ),
        (
            chat(answer(""), answer()),
            [("user", "q"), Turn("assistant", "", "", False), ("assistant", "a")],
        ),
        (chat(answer(refusal=None, tool_calls=[], name="")), [("user", "q"), ("assistant", "a")]),
    ]:
        [sample] = read_lines(as_bytes(document))
        assert sample == ChatSample(tuple(Turn(*turn) for turn in turns)), document

    for content in ("", None):
        document = chat(
            answer(content, tool_calls=[CALL]),
            {"role": "tool", "content": "sun", "tool_call_id": "1"},
            tools=[TOOL],
        )
        [sample] = read_lines(as_bytes(document))
        assert json.loads(sample.tools) == [TOOL]
        [call] = sample.turns[1].message()["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": {"in": "Rome"}}
        assert sample.turns[2].message()["tool_call_id"] == "1"
        assert [sample] == read_lines(as_bytes({**document, "tools": json.dumps([TOOL])}))


def test_a_record_without_an_answer_to_learn_is_counted():
    reader = Reader("a.jsonl")
    lines = as_bytes(chat(answer("")), chat(answer(weight=0)), chat(answer()))
    assert len(list(reader.records(io.BytesIO(lines)))) == 1
    assert reader.num_empty == 2


def test_a_field_that_changes_what_is_learnt_is_refused_by_its_name():
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    for document, said in [
        (chat(answer(), images=["a.png"]), "“images”: jobs train on text only"),
        (chat(answer([part])), "message 2 has a part of the type 'image_url'"),
        (chat(answer(audio={"id": "1"})), "message 2: “audio”: jobs train on text only"),
        (chat(answer(function_call={"name": "f"})), "“function_call”: write the call as “tool_calls”"),
        (chat(answer(), functions=[{"name": "f"}]), "“functions”: write the functions as “tools”"),
        (chat(answer(weight=0.5)), "message 2: “weight” is 0.5; it can be 0 or 1"),
        (chat(answer(loss="no")), "message 2: “loss” is \"no\"; it can be 0 or 1"),
        (chat(answer(tool_calls=[{"id": "1"}])), "message 2: “tool_calls” is not a list"),
        (chat(answer(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "1"}}])), "“arguments” of a tool call is not a JSON object"),
        (chat(answer(), tools=[{"type": "function"}]), "“tools” is not a list"),
        (chat({"role": "system", "content": "a"}, answer(), system="b"), "“system” stands beside"),
        ({**QUESTION, "history": [["a"]]}, "“history” 1 is not a pair"),
        ({**QUESTION, "system": ["a"]}, "“system” is not text but list"),
        ({**QUESTION, "weight": 0}, "“weight” of a record is 0"),
        ({**QUESTION, "rejected": "Red."}, "“rejected”: a preference has “chosen” and “rejected”"),
        ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, "“prompt” is messages and “chosen” a text"),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}, "are a text and messages"),
        ({"chosen": [user("a"), answer()], "rejected": [user("b"), answer()]}, "begin with different messages"),
        ({"prompt": "a", "chosen": [{"role": "bot", "content": "b"}], "rejected": [answer()]}, "“chosen”: message 1 has the role 'bot'"),
        ({"prompt": "a", "chosen": 1, "rejected": "b"}, "“chosen” is not text but int"),
        ({"prompt": 1, "completion": "b", "label": True}, "“prompt” is not text but int"),
        ({"text": "a", "image": {"path": "a.png"}}, "“image”: jobs train on text only"),
    ]:  # fmt: skip
        with pytest.raises(DataError) as refusal:
            read_lines(as_bytes(document))
        assert str(refusal.value).startswith("a.jsonl: line 1: "), document
        assert said in str(refusal.value), document

    rows = [{"text": "a", "images": ["a.png"]}, {"text": "b", "images": []}]
    [error] = check_file(table(rows), "a.parquet").errors
    assert error.startswith(
        "a.parquet: column “images”: jobs train on text only; remove the field"
    )


def test_any_other_field_is_counted_by_its_name_in_lines_and_in_tables():
    for rows, left_out in [
        ([{**QUESTION, "id": 1, "stars": 0}, {**QUESTION, "output": "Red.", "id": 2}], {"id": 2, "stars": 1}),
        ([chat(answer(emotion="glad")), chat(answer("b"), source="x")], {"messages.emotion": 1, "source": 1}),
        ([{"text": "a"}, {"text": "b"}], {}),
        ([{"text": "a", "meta": None}, {"text": "b", "meta": {}}], {}),
    ]:  # fmt: skip
        found = check_file(io.BytesIO(as_bytes(*rows)), "a.jsonl")
        assert (found.errors, found.left_out) == ((), left_out), rows
    assert check_file(table(ASKED), "a.parquet").left_out == {"stars": 600}
    assert left_out_words({"id": 2, "stars": 1200}) == (
        "fields that are left out, with their records: “stars” (1,200), “id” (2)"
    )


def test_a_preview_shows_tools_calls_and_answers_that_are_not_learnt():
    first = chat(answer(None, tool_calls=[CALL]), answer("WRONG", weight=0), tools=[TOOL])
    found = check_file(io.BytesIO(as_bytes(first, chat(answer()))), "a.jsonl")
    assert [part.who for part in found.samples[0]] == [
        "tools",
        "user",
        "assistant",
        "assistant, not learnt",
    ]
    assert '"name": "weather"' in found.samples[0][2].text


def test_a_preview_says_where_it_ends():
    long = chat(answer("x" * 301), *[answer(str(n)) for n in range(9)])
    [sample, _] = check_file(io.BytesIO(as_bytes(long, CHAT)), "a.jsonl").samples
    assert [len(part.text) for part in sample[:3]] == [1, 301, 1]
    assert sample[1].text.endswith("x…")
    assert (len(sample), sample[-1]) == (8, ("more", "4 more messages"))


# Tables of Parquet: the same records as lines of JSON, and a sentence for what is wrong.

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
    calls = [chat(answer(f"{n}"), answer("", tool_calls=[{**CALL, "id": str(n)}])) for n in (1, 2)]
    for rows, options in [
        (CHATS, {}),
        (calls, {}),
        (ASKED, {}),
        ([{"text": "één"}, {"text": "twee"}], {}),
        (ASKED, {"row_group_size": 7, "compression": "zstd"}),
        (ASKED, {"row_group_size": 1000, "compression": "none"}),
    ]:
        from_table, from_lines = read(table(rows, **options)), read(as_lines(rows), "a.jsonl")
        assert from_table == from_lines
        assert [each.line for each in from_table] == list(range(1, len(rows) + 1))


def test_named_columns_alone_are_read_and_under_the_name_of_a_field():
    rows = [{"question": "2+2", "answer": "4", "images": "a.png", "text": "no"}] * 2
    written = "question,answer,images,text\n" + "2+2,4,a.png,no\n" * 2
    columns = {"question": "prompt", "answer": "completion"}
    for name, file in (
        ("a.parquet", table(rows)),
        ("a.jsonl", as_lines(rows)),
        ("a.json", io.BytesIO(json.dumps(rows).encode())),
        ("a.csv", io.BytesIO(written.encode())),
    ):
        reader = Reader(name, None, columns)
        assert [each.sample for each in reader.records(file)] == [CompletionSample("2+2", "4")] * 2
        assert reader.left_out == {"images": 2, "text": 2}, name
        file.seek(0)
        other = Reader(name, None, {"questions": "prompt"})
        with pytest.raises(DataError, match=r"no column “questions”.*answer, images, question"):
            list(other.records(file))
    with pytest.raises(DataError, match="has no columns"):
        Reader("a.txt", None, columns)


def test_a_table_is_read_by_its_known_columns_or_a_stated_format():
    when = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [{"text": "first", "seen": when}, {"text": "second", "seen": when}]
    assert [each.sample.text for each in read(table(rows))] == ["first", "second"]
    found = check_file(table([{"text": "a"}, {"text": "  "}, {"text": "b"}]), "a.parquet")
    assert (found.num_records, found.num_empty, found.errors) == (2, 1, ())
    assert found.format == "text"
    rows = [{"text": "whole", "prompt": "a", "completion": "b"}]
    assert read(table(rows), stated="text")[0].sample.text == "whole"
    assert read(table(rows))[0].sample.completion == "b"


def test_what_is_wrong_with_a_table_is_named_by_row_and_column():
    [error] = check_file(table([{"body": "a", "title": "b"}]), "a.parquet").errors[:1]
    assert error.startswith("a.parquet: row 1: it has the fields of no known format")
    assert "its fields are body, title" in error
    rows = [{"text": "a"}, {"text": None}, {"text": "b"}]
    found = check_file(table(rows), "a.parquet")
    assert [each.partition(". It begins")[0] for each in found.errors] == [
        "a.parquet: row 2: “text” is not text but NoneType; its fields are text"
    ]
    with pytest.raises(DataError, match=r"row 1 has a value other than text.*text: bytes"):
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


def written(rows: pa.Table) -> io.BytesIO:
    file = io.BytesIO()
    pq.write_table(rows, file, compression="zstd", store_schema=False)
    return file


def test_a_small_file_of_endless_rows_is_refused_after_a_bounded_part_of_them(monkeypatch):
    """One string in a dictionary, or run lengths: a few hundred bytes state gigabytes of rows."""
    monkeypatch.setattr(parquet_process, "MIN_ROWS_BYTES", 3 * 1024**2)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), ["a" * 1024**2])
    nulls = pa.nulls(2_000_000, pa.string())
    wide, empty, unknown = (
        written(each)
        for each in (
            pa.table({"text": texts}), pa.table({"text": nulls}), pa.table({"other": nulls}),
        )
    )  # fmt: skip
    assert len(wide.getvalue()) < 1000
    for file, number, words in (
        (wide, 2, r"its first 3 rows take 3 MiB, 20 times the file, and there are more"),
        (empty, 0, r"it states 2,000,000 rows, and a file of its size may have 1,048,576"),
        (unknown, 0, r"it states 2,000,000 rows"),
    ):
        found: list[tuple[int, bytes]] = []
        rows = rows_in_subprocess(file, ["text"], MAX_LINE_BYTES, lambda _names: None)
        with pytest.raises(parquet_process.UnreadableTableError, match=words):
            found.extend(rows)
        assert len(found) <= number, words
    [error] = check_file(wide, "a.parquet").errors
    assert re.search("its first 3 rows take 3 MiB", error)

    monkeypatch.setattr(parquet_process, "MIN_ROWS_BYTES", 2**40)  # so many rows may be stated
    [error, *_] = check_file(unknown, "a.parquet").errors
    assert "it has the fields of no known format" in error


def test_a_reader_ends_when_nobody_reads_and_after_its_time(monkeypatch):
    rows = rows_in_subprocess(table(ASKED * 100), ["instruction"], MAX_LINE_BYTES, print)
    next(rows)
    process = rows.gi_frame.f_locals["process"]
    rows.close()
    assert process.returncode == -9

    monkeypatch.setattr(parquet_process, "START_SECONDS", 0)
    monkeypatch.setattr(parquet_process, "SLOWEST_BYTES_PER_S", 2**64)
    with pytest.raises(DataError, match="more than 0 s of processor time"):
        read(table(ASKED))


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
        "import sys; from runners.datasets.records import check_file; "
        f"found = check_file(open({str(path)!r}, 'rb'), 'a.parquet'); "
        "print(found.num_records, 'pyarrow' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.split() == ["600", "False"]
