"""Data sets in public formats, a few records each: what is read of them, and what is refused.

The records are made here after the formats' own pages, which each row names.
"""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runners.datasets import parquet, records
from runners.datasets.conversations import MEDIA, ChatSample, DataError
from runners.datasets.parquet_process import UnreadableTableError
from runners.datasets.records import FIELDS, READ_FIELDS, Reader, check_file, part_words
from runners.jobs.data_files import open_source
from runners.jobs.runtime import MissingModelError
from runners.jobspec.base import FileData


def turns(*pairs):
    """Return messages of alternating roles, the user's first."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(pairs)]


def said(*pairs):
    """Return the same as turns of ShareGPT."""
    return [
        {"from": {"user": "human", "assistant": "gpt"}[each["role"]], "value": each["content"]}
        for each in turns(*pairs)
    ]


HUB = "https://huggingface.co/datasets/"
TRL = "https://huggingface.co/docs/trl/dataset_formats"
OPENAI = "https://platform.openai.com/docs/guides/supervised-fine-tuning"
FACTORY = "https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"in": "Rome"}'},
}

# name: (source of the format, records, format, what is learnt of each record, left out, empty)
USED = {
    "Alpaca": (
        HUB + "tatsu-lab/alpaca",
        [
            {"instruction": "Add.", "input": "1 1", "output": "2", "text": "### Instruction: Add."},
            {"instruction": "Name a colour.", "input": "", "output": "Red.", "text": "###"},
        ],
        "instruction", [["2"], ["Red."]], {"text": 2}, 0,
    ),
    "ShareGPT of Vicuna": (
        "https://github.com/lm-sys/FastChat/blob/main/data/dummy_conversation.json",
        [
            {"id": "a", "conversations": said("Who?", "A bot.", "Why?", "Because.")},
            {"id": "b", "conversations": [{"from": "gpt", "value": "Hello."}, *said("Hi", "Yes?")]},
            {"id": "c", "conversations": []},
            {"id": "d", "conversations": said("Nobody answers.")},
        ],
        "sharegpt", [["A bot.", "Because."], ["Hello.", "Yes?"]], {"id": 2}, 2,
    ),
    "ShareGPT with tools, of LLaMA-Factory": (
        FACTORY,
        [
            {
                "conversations": [
                    {"from": "human", "value": "Rain in Rome?"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"in": "Rome"}}'},
                    {"from": "observation", "value": '{"rain": false}'},
                    {"from": "gpt", "value": "No.", "markdown": True},
                ],
                "system": "Be short.",
                "tools": json.dumps([WEATHER["function"]]),
            },
            {"conversations": said("Rain?", "Where?"), "system": "", "tools": "[]"},
        ],
        "sharegpt", [["weather(Rome)", "No."], ["Where?"]], {"conversations.markdown": 1}, 0,
    ),
    "ChatML in text": (
        "https://github.com/openai/openai-python/blob/v0.28.1/chatml.md",
        [{"text": f"<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\n"} for n in "ab"],
        "text", [["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"],
                 ["<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"]], {}, 0,
    ),
    "OpenAI's fine-tuning, with weights": (
        OPENAI,
        [
            {"messages": [*turns("q", "WRONG", "again", "right")[:1], {"role": "assistant", "content": "WRONG", "weight": 0}, *turns("again", "right")]},
            {"messages": [{"role": "system", "content": "Be short."}, *turns("q", "a")]},
        ],
        "chat", [["right"], ["a"]], {}, 0,
    ),
    "OpenAI's fine-tuning, with tool calls": (
        OPENAI,
        [
            {
                "messages": [
                    *turns("Rain in Rome?"),
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
                    {"role": "assistant", "content": "No."},
                ],
                "parallel_tool_calls": False, "tools": [WEATHER],
            },
            {"messages": turns("Rain?", "Where?"), "tools": [WEATHER]},
        ],
        "chat", [["weather(Rome)", "No."], ["Where?"]], {"parallel_tool_calls": 1}, 0,
    ),
    "several turns with a system message": (
        HUB + "HuggingFaceH4/no_robots",
        [
            {"prompt": "p", "prompt_id": "1", "category": "Chat", "messages": [
                {"role": "system", "content": "You are Klaus."}, *turns("a", "b", "c", "d")]},
            {"prompt": "q", "prompt_id": "2", "category": "Chat", "messages": turns("e", "f")},
        ],
        "chat", [["b", "d"], ["f"]], {"prompt": 2, "prompt_id": 2, "category": 2}, 0,
    ),
    "prompt and completion as messages": (
        TRL,
        [
            {"prompt": turns("a", "not learnt", "c"), "completion": [{"role": "assistant", "content": "d"}]},
            {"prompt": turns("e"), "completion": [{"role": "assistant", "content": "f"}]},
        ],
        "chat", [["d"], ["f"]], {}, 0,
    ),
    "prompt and completion as text": (
        TRL,
        [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "1+1=", "completion": "2"}],
        "completion", [[" blue."], ["2"]], {}, 0,
    ),
    "classes": (
        HUB + "stanfordnlp/imdb",
        [{"text": "Good.", "label": 1}, {"text": "Bad.", "label": 0}],
        "classification", [["1"], ["0"]], {}, 0,
    ),
}  # fmt: skip

# name: (source of the format, first record, what the refusal says)
REFUSED = {
    "OpenAI's preferences": (
        "https://platform.openai.com/docs/guides/direct-preference-optimization",
        {"input": {"messages": turns("q")}, "preferred_output": turns("", "a")[1:],
         "non_preferred_output": turns("", "b")[1:]},
        "“preferred_output”: write it as “chosen”, and the other one as “rejected”",
    ),
    "steps with labels": (
        TRL, {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]},
        "“completions”: a record has one “completion”",
    ),
    "other names": (
        HUB + "databricks/databricks-dolly-15k",
        {"instruction": "q", "context": "", "response": "a", "category": "open_qa"},
        "it has the fields of no known format; rename them to those of one",
    ),
    "an unknown speaker": (
        FACTORY, {"conversations": [{"from": "bot", "value": "a"}]},
        "message 1 is from 'bot'; known are system, human",
    ),
    "a call that is no JSON": (
        FACTORY, {"conversations": [{"from": "function_call", "value": "weather(Rome)"}]},
        "message 1: the function_call in “value”: it is not valid JSON",
    ),
    "images in ShareGPT": (
        FACTORY, {"conversations": said("<image>What?", "A cat."), "images": ["a.png"]},
        "“images”: jobs train on text only; remove the field",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Read tables without a process for each; ``test_datasets`` has those."""

    def rows(file, fields, _max_bytes, skip):
        try:
            (_, names), *found = parquet.rows_of(file, fields, 2**20, 2**20)
        except parquet.ParquetError as error:
            raise UnreadableTableError(str(error)) from None
        skip(json.loads(names))
        yield from found

    monkeypatch.setattr(records, "rows_in_subprocess", rows)


def as_lines(rows):
    return io.BytesIO("".join(f"{json.dumps(each)}\n" for each in rows).encode())


def as_table(rows):
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), written)
    return io.BytesIO(written.getvalue())


def learnt(sample):
    """Return the texts of a sample that have a loss."""
    if not isinstance(sample, ChatSample):
        return [sample[-1]]
    answers = [
        each.message() for each in sample.turns if each.role == "assistant" and each.is_learnt
    ]
    calls = [each.get("tool_calls", [{}])[0].get("function", {}) for each in answers]
    return [
        each["content"] or f"{call['name']}({call['arguments']['in']})"
        for each, call in zip(answers, calls, strict=True)
    ]


def test_data_sets_of_public_formats_are_read_as_their_makers_mean_them():
    """From lines and, with their nested columns, from Parquet."""
    for name, (source, rows, form, texts, left_out, num_empty) in USED.items():
        assert source.startswith("https://"), name
        lines, reader = as_lines(rows), Reader("a.jsonl")
        samples = [each.sample for each in reader.records(lines)]
        assert (reader.format, [learnt(each) for each in samples]) == (form, texts), name
        assert (dict(reader.left_out), reader.num_empty) == (left_out, num_empty), name

        found = check_file(lines_again(lines), "a.jsonl")
        assert (found.errors, found.left_out, found.num_empty) == ((), left_out, num_empty), name
        table = Reader("a.parquet")
        assert [each.sample for each in table.records(as_table(rows))] == samples, name
        assert set(left_out) <= set(table.left_out), name  # a table has each column in every row


def lines_again(file):
    file.seek(0)
    return file


def test_data_sets_of_other_public_formats_are_refused_by_name_with_the_way_out():
    for name, (source, record, words) in REFUSED.items():
        assert source.startswith("https://"), name
        for file, ending in ((as_lines, "jsonl"), (as_table, "parquet")):
            [error, *_] = check_file(file([record, record]), f"a.{ending}").errors
            assert words in error or f"column {words}" in error, (name, error)


def test_a_tool_s_conversation_of_sharegpt_is_the_same_as_in_messages():
    _, [record, _], *_ = USED["ShareGPT with tools, of LLaMA-Factory"]
    [sample] = [each.sample for each in Reader("a.jsonl").records(as_lines([record]))]
    assert [turn.role for turn in sample.turns] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert json.loads(sample.tools) == [WEATHER["function"]]
    assert sample.turns[2].message()["tool_calls"] == [
        {"type": "function", "function": {"name": "weather", "arguments": {"in": "Rome"}}}
    ]


def test_a_data_set_of_the_hub_is_taken_file_by_file_and_says_that_it_has_more(tmp_path):
    """The layout of https://huggingface.co/docs/hub/datasets-manual-configuration."""
    folder = tmp_path / "models" / "alpaca"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: data/train-*\n---\n# Alpaca\n"
    )
    (folder / "dataset_infos.json").write_text("{}")
    names = [f"data/train-0000{at}-of-00002.parquet" for at in range(2)]
    for name in names:
        (folder / name).write_bytes(as_table(USED["Alpaca"][1]).getvalue())
    job = type("Job", (), {"host_dir": tmp_path, "attempt_dir": tmp_path})

    with pytest.raises(MissingModelError) as refusal, open_source(job, FileData(path="alpaca")):
        pass
    assert (
        f"alpaca is a folder; give one of its files, or several as sources by weight: {names[0]}, {names[1]}"
        in str(refusal.value)
    )
    with open_source(job, FileData(path=f"alpaca/{names[1]}")) as data:
        assert len(list(data.records(Reader(data.name)))) == 2
        assert part_words(data.name).startswith("train-00001-of-00002.parquet is part 2 of 2")
    assert not part_words("train-00000-of-00001.parquet")
    for name, words in (
        ("README.md", "not '.md'; a data set of the Hub is in the files below data/"),
        ("alpaca_data.tsv", "not '.tsv'; save it as .csv or Parquet"),
        ("train.jsonl.gz", "not '.gz'; unpack it first"),
    ):
        with pytest.raises(DataError, match=words):
            Reader(name)
    (tmp_path / "models" / "none").mkdir()
    with (
        pytest.raises(MissingModelError, match="it holds no"),
        open_source(job, FileData(path="none")),
    ):
        pass


def test_a_list_in_one_document_is_refused_with_the_program_that_divides_it():
    for text in (json.dumps(USED["Alpaca"][1]), json.dumps(USED["Alpaca"][1], indent=2)):
        with pytest.raises(DataError, match=r"line 1: .*one object per line: jq -c '\.\[\]'"):
            list(Reader("a.jsonl").records(io.BytesIO(text.encode())))


def test_a_list_in_a_json_file_and_a_table_of_text_hold_the_records_that_lines_would(monkeypatch):
    monkeypatch.setattr(records, "LIST_PIECE", 7)  # no entry comes in one piece
    rows = [
        {"instruction": "Say “a, b”\n", "input": "", "output": "é ] }, {"},
        {"instruction": "2", "input": "", "output": "b", "n": "1"},
    ]
    expected = list(Reader("a.jsonl").records(as_lines(rows)))
    cells = 'instruction,input,output,n\r\n"Say “a, b”\n",,"é ] }, {",\r\n2,,b,1\r\n'
    for name, text in (
        ("a.json", json.dumps(rows)),
        ("a.json", f"\ufeff\n{json.dumps(rows, indent=1, ensure_ascii=False)}\n"),
        ("a.json", "\n".join(map(json.dumps, rows))),
        ("a.csv", cells),
        ("a.csv", f"\ufeff{cells}"),
    ):
        assert list(Reader(name).records(io.BytesIO(text.encode()))) == expected, text


def test_a_damaged_list_or_table_of_text_is_refused_with_its_place():
    entry = json.dumps({"text": "a"})
    for name, data, words in (
        ("a.json", f"[{entry}, {{]".encode(), "record 2: it is no JSON, or longer than 4 MiB, or"),
        ("a.json", f"[{entry}".encode(), "record 1: it is no JSON, .* or the list has no end"),
        ("a.json", f"[{entry}][{entry}]".encode(), "record 2: something follows the list"),
        ("a.json", b'["a"]', "record 1: it is not a JSON object"),
        ("a.json", b'{"data": []}', "record 1: it has the fields of no known format.* are data"),
        ("a.json", b'["\xff"]', "record 1: it is not valid UTF-8"),
        ("a.json", f'[{{"text": "{"a" * 5 * 1024**2}"}}]'.encode(), "record 1: .* 4 MiB"),
        ("a.json", f"[{entry}{entry}]".encode(), "record 2: a comma is missing before it"),
        ("a.json", f"[{entry},]".encode(), "record 2: it is no JSON"),
        ("a.json", f"[,{entry}]".encode(), "record 1: it is no JSON"),
        ("a.csv", b"a," * 1000 + b"text\n", "has 1001 columns; 1000 at most"),
        ("a.csv", b"text,n,m\n" + b",".join([b"a" * 2 * 1024**2] * 3), "row 1 is longer than"),
        ("a.csv", b"text\n" + b"a" * 5 * 1024**2, "row 1 is longer than 4 MiB"),
        ("a.csv", b"text,text\na,b\n", "its first line names a column twice; keep one"),
        ("a.csv", b"text\na\nb,c\n", "row 2: it has more than 1 values. It begins"),
        ("a.csv", b'text\na\n"b', "the row after 1 is no comma-separated values"),
        ("a.csv", b"text\n\xff\n", "the row after 0 is no comma-separated values"),
        ("a.csv", b"words;n\na;1\n", "row 1: it has the fields of no known format"),
    ):
        with pytest.raises(DataError, match=words):
            list(Reader(name).records(io.BytesIO(data)))


def test_a_table_with_a_name_twice_is_refused(tmp_path: Path):
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"])]
    struct = pa.StructArray.from_arrays(columns, ["role", "role"])
    for table, words in (
        (pa.Table.from_arrays(columns, ["text", "text"]), "the column “text” twice; keep one"),
        (pa.table({"messages": struct}), "a.parquet: "),
        (
            pa.table({"text": ["a"], "label": [float("nan")]}),
            "the number NaN, which is not finite",
        ),
    ):
        pq.write_table(table, tmp_path / "a.parquet")
        with (tmp_path / "a.parquet").open("rb") as file, pytest.raises(DataError, match=words):
            list(Reader("a.parquet").records(file))


def test_labels_whose_accents_are_written_apart_are_one_class():
    rows = [{"text": "a", "label": "caf\u00e9"}, {"text": "b", "label": "cafe\u0301"}]
    found = Reader("a.jsonl").records(as_lines(rows))
    assert {each.sample.label for each in found} == {"caf\u00e9"}


KNOWN = {
    *("role", "content", "from", "value", "type", "text", "function", "name", "arguments"),
    *("tool_calls", "tool_call_id", "reasoning_content", "thinking"),
    *("weight", "train", "training", "loss", "conversation", *MEDIA),
    *(name for names in (*FIELDS.values(), *READ_FIELDS.values()) for name in names),
}
PLACES = {  # where an unknown field can stand in each format
    "Alpaca": [[]],
    "ShareGPT of Vicuna": [[], ["conversations", 1]],
    "ChatML in text": [[]],
    "OpenAI's fine-tuning, with tool calls": [
        [],
        ["messages", 0],
        ["messages", 1, "tool_calls", 0],
        ["messages", 1, "tool_calls", 0, "function"],
        ["tools", 0],
    ],
    "prompt and completion as messages": [[], ["prompt", 0], ["completion", 0]],
    "prompt and completion as text": [[]],
    "classes": [[]],
}


@settings(max_examples=25)
@given(
    st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1), st.integers(1, 9)
)
def test_no_field_of_any_format_is_dropped_without_a_word(key, value):
    """It is used, counted, or refused by its name."""
    for name, places in PLACES.items():
        for place in places:
            record = json.loads(json.dumps(USED[name][1][0]))
            inner = record
            for step in place:
                inner = inner[step]
            if key in KNOWN or key in inner:
                continue
            inner[key] = value
            reader = Reader("a.jsonl")
            try:
                [sample] = [each.sample for each in reader.records(as_lines([record]))]
            except DataError as refusal:
                said = str(refusal)
            else:
                more = "".join(turn.more for turn in getattr(sample, "turns", ()))
                said = "\n".join([*reader.left_out, getattr(sample, "tools", ""), more])
            assert key in said or json.dumps(key, ensure_ascii=False)[1:-1] in said, (name, place)
