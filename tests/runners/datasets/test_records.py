"""Training files by hand: what each format reads, and a sentence for each thing that is wrong."""

import io
import json

import pytest

from runners.datasets.records import (
    MAX_LINE_BYTES,
    ChatSample,
    CompletionSample,
    DataError,
    Reader,
    TextSample,
    Turn,
    checked,
    digest_of,
)

ASKED = {"instruction": "Name a colour.", "input": "", "output": "Green."}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}


def read(data, name="a.jsonl", stated=None):
    reader = Reader(name, stated)
    return [each.sample for each in reader.records(io.BytesIO(data))]


def lines(*documents):
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


def test_each_format_is_known_by_its_fields_or_stated():
    for document, sample in [
        ({"text": "All of it."}, TextSample("All of it.")),
        ({"prompt": "2+2=", "completion": "4"}, CompletionSample("2+2=", "4")),
        (ASKED, ChatSample((Turn("user", "Name a colour."), Turn("assistant", "Green.")))),
        (
            {**ASKED, "input": "Of leaves."},
            ChatSample(
                (Turn("user", "Name a colour.\n\nOf leaves."), Turn("assistant", "Green."))
            ),
        ),
        (CHAT, ChatSample((Turn("user", "Hi"), Turn("assistant", "Yes?")))),
    ]:
        assert read(lines(document, document)) == [sample, sample], (document, sample)

    document = {"text": "whole", "prompt": "a", "completion": "b"}
    assert read(lines(document), stated="text") == [TextSample("whole")]
    assert read(lines(document)) == [CompletionSample("a", "b")]


def test_a_text_file_is_divided_between_paragraphs():
    paragraph = "word " * 300 + "\n\n"
    found = read((paragraph * 5).encode(), "a.txt")
    assert len(found) == 3
    assert "".join(each.text for each in found) == paragraph * 5


def test_blank_lines_a_byte_order_mark_and_empty_records_do_not_count():
    reader = Reader("a.jsonl")
    data = b"\xef\xbb\xbf" + lines({"text": "one"}) + b"\n  \n" + lines({"text": " "}, ASKED)
    with pytest.raises(DataError, match="line 5"):
        list(reader.records(io.BytesIO(data)))
    assert (reader.num_empty, reader.format) == (1, "text")


def test_what_is_wrong_with_a_line_is_said_with_its_number_and_beginning():
    for line, said in [
        (b'{"text": "cut', r'line 2: it is no JSON \(Unterminated string.*It begins "{\\"text'),
        (b'{"text": "\xff"}', "line 2: byte 11 is no UTF-8; save the file as UTF-8"),
        (b'{"text": "a\0b"}', "line 2: it holds a null character"),
        (rb'{"text": "a\u0000b"}', "line 2: “text” holds a null character"),
        (rb'{"text": "a\ud800b"}', "line 2: “text” holds half of a surrogate pair at character 2"),
        (b"[1]", "line 2: it is no JSON object"),
        (b"[" * 100_000, "line 2: it is no JSON"),
        (b'{"body": "x"}', "line 2: “text” is missing; its fields are body"),
        (b'{"text": 7}', "line 2: “text” is no text but int"),
    ]:
        with pytest.raises(DataError, match=said):
            read(lines({"text": "fine"}) + line + b"\n")

    with pytest.raises(DataError, match="line 1 is longer than 4 MiB"):
        read(b"x" * (MAX_LINE_BYTES + 2))


def test_what_is_wrong_with_a_first_record():
    for document, said in [
        ({"body": "x", "title": "y"}, "no known format.*its fields are body, title"),
        ({"messages": "hi"}, "“messages” is no list"),
        ({"messages": [1]}, "message 1 is no object"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "role 'tool'; known are system, user"),
        ({"messages": [{"role": "user", "content": "1"}]}, "no message has the role assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "“content” is no text but None"),
    ]:
        with pytest.raises(DataError, match=f"a.jsonl: line 1: .*{said}"):
            read(lines(document))


def test_an_unknown_kind_of_file_or_a_chat_of_text_is_refused_by_its_name():
    for name, said in [
        ("a.csv", r"end in \.jsonl, \.parquet or \.txt, not '\.csv'"),
        ("noending", r"not 'in nothing'"),
    ]:
        with pytest.raises(DataError, match=said):
            Reader(name)
    with pytest.raises(DataError, match="chat needs JSON lines"):
        Reader("a.txt", "chat")


def test_equal_records_have_equal_digests():
    found = read(lines(ASKED, ASKED | {"id": 7}, ASKED | {"output": "Red."}))
    digests = [digest_of(each) for each in found]
    assert digests[0] == digests[1] != digests[2]


def test_a_check_counts_shows_the_first_three_and_stops_after_five_errors():
    found = checked(io.BytesIO(lines(*[{**ASKED, "output": str(n)} for n in range(9)])), "a.jsonl")
    assert (found.format, found.num_records, found.errors) == ("instruction", 9, ())
    assert [sample[1].text for sample in found.samples] == ["0", "1", "2"]
    assert found.samples[0][0] == ("user", "Name a colour.")
    bad = b"{\n" * 9
    found = checked(io.BytesIO(lines(ASKED) + bad + lines(CHAT)), "a.jsonl")
    assert len(found.errors) == 5
    assert [f"line {n}" in error for n, error in enumerate(found.errors, 2)] == [True] * 5


def test_a_set_that_leaves_nothing_to_judge_by_is_refused():
    for documents, said in [
        ([], "no record"),
        ([ASKED], "only one record"),
        ([ASKED, ASKED], "one record, again"),
    ]:
        found = checked(io.BytesIO(lines(*documents)), "a.jsonl")
        assert found.errors == (
            f"a.jsonl holds {said}; give at least two that differ: one is held out for evaluation",
        )
