"""Prompts of every source, and bad ones refused by name."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from runners.jobs.generate import prompts
from runners.jobs.generate.prompts import Prompt, check_lengths, read_texts
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import DemoPrompts, FilePrompts, GenerateSpec, InlinePrompts
from tests.runners.jobs.tiny import TINY


@pytest.fixture
def read(make_job, host):
    """Read a prompts file of these bytes below the host's model folder."""

    def run(content: bytes | None, name: str = "pile.txt") -> list[tuple[str, str]]:
        path: Path = host.path / "models" / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        asked = FilePrompts(path=name)
        return read_texts(make_job(GenerateSpec(model=TINY, prompts=asked)), asked)

    return run


def test_a_text_file_holds_a_prompt_a_line(read):
    assert [each[:2] for each in read(b"one\n\n  two\n")] == [("1", "one"), ("3", "  two")]


def test_json_lines_hold_a_prompt_and_a_name(read):
    lines = [{"prompt": "a\nb", "id": "x"}, {"prompt": "c"}]

    found = read("\n".join(map(json.dumps, lines)).encode(), "pile.jsonl")

    assert [each[:2] for each in found] == [("x", "a\nb"), ("2", "c")]


def test_a_file_that_is_missing_is_said_so_by_its_name(read):
    with pytest.raises(MissingModelError, match=r"prompts file pile\.txt: .*cannot be opened"):
        read(None)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../outside.txt"])
def test_a_file_outside_of_the_hosts_folders_is_refused(make_job, name):
    asked = FilePrompts(path=name)

    with pytest.raises(MissingModelError, match="lies outside"):
        read_texts(make_job(GenerateSpec(model=TINY, prompts=asked)), asked)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(read, content):
    with pytest.raises(BadInputError, match="holds no prompt; give one a line"):
        read(content)


def test_a_line_that_is_too_long_is_refused_with_its_number_and_the_limit(read):
    long = b"x" * (prompts.MAX_LINE_BYTES + 1)

    with pytest.raises(BadInputError, match="line 2 is longer than 1048576 bytes; split it"):
        read(b"short\n" + long)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 1 is no JSON"),
        (b"[" * 5000, "line 1 is no JSON"),
        (b'"text"', 'line 1 has no text in "prompt"'),
        (b'{"prompt": 7}', 'line 1 has no text in "prompt"'),
        (b'{"prompt": ""}', 'line 1 has no text in "prompt"'),
        (b"\xff\xfe", "line 1 is no UTF-8 text"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(read, line, words):
    with pytest.raises(BadInputError, match=words):
        read(line + b"\n", "pile.jsonl")


def test_more_prompts_than_the_limit_are_refused(read, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_PROMPTS", 2)

    with pytest.raises(BadInputError, match="more than 2 prompts; split it"):
        read(b"a\nb\nc\n")


def test_a_short_list_is_taken_as_it_stands(make_job):
    asked = InlinePrompts(texts=("a", "b"))

    found = read_texts(make_job(GenerateSpec(model=TINY, prompts=asked)), asked)

    assert [each[:2] for each in found] == [("1", "a"), ("2", "b")]


def test_a_prompt_beyond_the_models_positions_is_refused_with_the_numbers():
    with pytest.raises(BadInputError, match="prompt 9 has 60 tokens and 8 are to be written"):
        check_lengths([Prompt("9", None, tuple(range(60)))], 8, 64)


@pytest.mark.parametrize(("tokens", "positions"), [(56, 64), (5000, None)])
def test_a_prompt_within_the_models_positions_passes(tokens, positions):
    check_lengths([Prompt("1", None, tuple(range(tokens)))], 8, positions)


def test_the_shortest_demo_prompt_is_no_longer_than_the_longest():
    with pytest.raises(ValidationError, match="shortest is 9"):
        DemoPrompts(input_tokens=8, shortest=9)
