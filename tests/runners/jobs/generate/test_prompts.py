"""A pile: its prompts, which of them go together, and answers that stay written."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import GenerationConfig

from runners.jobs.generate import answering
from runners.jobs.generate.answering import (
    Journal,
    Prompt,
    check_lengths,
    earlier_journals,
    read_journal,
    read_texts,
    remarks_of,
)
from runners.jobs.generate.batching import (
    POLICIES,
    CostModel,
    padding_ratio,
    sorted_batches,
    turbo_batches,
)
from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import (
    DemoPrompts,
    DownloadedData,
    FilePrompts,
    GenerateSpec,
    HubData,
    InlinePrompts,
)
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY, TINY_CONFIG


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


ASKED = [
    ({"prompt": "Why?", "completion": "So."}, (), "Why?", ()),
    ({"text": "Once"}, (), "Once", ()),
    ({"question": "Why?", "answer": "So."}, ("question=prompt",), "Why?", ()),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        (),
        "",
        (("user", "a"),),
    ),
    ({"instruction": "Add.", "output": "3"}, (), "", (("user", "Add."),)),
]


def test_the_prompt_of_a_record_is_what_stands_before_its_answer(make_job, host):
    path = host.path / "models" / "asked.jsonl"
    for record, columns, text, turns in ASKED:
        path.write_text(json.dumps(record) + "\n" + json.dumps(record))
        asked = DownloadedData(name="a.jsonl", paths=(str(path),), columns=columns, records=1)
        [found] = read_texts(make_job(GenerateSpec(model=TINY, prompts=asked)), asked)
        assert (found.text, tuple(turn[:2] for turn in found.turns)) == (text, turns), record
    path.write_text('{"prompt": "", "completion": "x"}')
    with pytest.raises(BadInputError, match="nothing before its answer"):
        read_texts(
            make_job(GenerateSpec(model=TINY, prompts=asked)),
            asked.model_copy(update={"columns": ()}),
        )
    hub = HubData(repository="datasets/a/b")
    with pytest.raises(MissingModelError, match="a/b was not downloaded"):
        read_texts(make_job(GenerateSpec(model=TINY, prompts=hub)), hub)


def test_a_text_file_holds_a_prompt_a_line_and_json_lines_a_name_too(read, make_job):
    assert [each[:2] for each in read(b"one\n\n  two\n")] == [("1", "one"), ("3", "  two")]
    lines = [{"prompt": "a\nb", "id": "x"}, {"prompt": "c"}]
    found = read("\n".join(map(json.dumps, lines)).encode(), "pile.jsonl")
    assert [each[:2] for each in found] == [("x", "a\nb"), ("2", "c")]
    asked = InlinePrompts(texts=("a", "b"))
    found = read_texts(make_job(GenerateSpec(model=TINY, prompts=asked)), asked)
    assert [each[:2] for each in found] == [("1", "a"), ("2", "b")]


def test_a_file_that_is_missing_outside_or_empty_is_refused(read, make_job):
    with pytest.raises(MissingModelError, match=r"prompts file pile\.txt: .*cannot be opened"):
        read(None)

    for name in ("/etc/passwd", "../../outside.txt"):
        asked = FilePrompts(path=name)
        with refused(MissingModelError, "is outside", name):
            read_texts(make_job(GenerateSpec(model=TINY, prompts=asked)), asked)

    for content in (b"", b"\n \n"):
        with refused(BadInputError, "holds no prompt; give one a line", content):
            read(content)


def test_lines_beyond_the_limits_are_refused_with_them(read, monkeypatch):
    long = b"x" * (answering.MAX_LINE_BYTES + 1)
    with pytest.raises(BadInputError, match="line 2 is longer than 1048576 bytes; split it"):
        read(b"short\n" + long)
    monkeypatch.setattr(answering, "MAX_PROMPTS", 2)
    with pytest.raises(BadInputError, match="more than 2 prompts; split it"):
        read(b"a\nb\nc\n")


def test_a_line_that_is_no_prompt_is_refused_by_its_number(read):
    for line, words in (
        (b"{", "line 1: it is not valid JSON"),
        (b"[" * 100_000, "line 1: it is nested 100000 deep; 100 is the limit"),
        (b'{"prompt": "a", "prompt": "b"}', "line 1: it has the key “prompt” twice"),
        (b'{"prompt": "a", "repetition_penalty": 2}', "“repetition_penalty” would change the"),
        (b'{"prompt": "a", "id": ["b"]}', "line 1: “id” is no text or number of at most 200"),
        (b'{"prompt": "a", "id": "%s"}' % (b"b" * 201), "“id” is no text or number of at most"),
        (b'"text"', 'line 1 has no text in "prompt"'),
        (b'{"prompt": 7}', 'line 1 has no text in "prompt"'),
        (b'{"prompt": ""}', 'line 1 has no text in "prompt"'),
        (b"\xff\xfe", "line 1: it is UTF-16 and not valid UTF-8"),
    ):
        with refused(BadInputError, words, (line, words)):
            read(line + b"\n", "pile.jsonl")


def test_what_of_a_prompts_file_and_of_a_models_settings_is_not_applied_is_noted(read):
    lines = [{"prompt": "a", "topic": "x", "id": None}, {"prompt": "b", "topic": "", "id": 7}]
    found = read("\n".join(map(json.dumps, lines)).encode(), "pile.jsonl")
    assert [each.name for each in found] == ["1", "7"]
    model = fresh_model(TINY_CONFIG, torch.float32)
    fields = "fields that are left out, with their records: “topic” (1)"
    assert remarks_of(found, model) == {"prompts_file": fields}
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, repetition_penalty=1.05, eos_token_id=2, top_p=1.0
    )
    assert remarks_of(found[1:], model) == {
        "generation_config": "not applied, as answers are greedy: do_sample True, "
        "temperature 0.6, repetition_penalty 1.05"
    }


def test_a_prompt_beyond_the_models_positions_is_refused_with_the_numbers():
    for tokens, positions in ((56, 64), (5000, None)):
        check_lengths([Prompt("1", None, tuple(range(tokens)))], 8, positions)
    with pytest.raises(BadInputError, match="prompt 9 has 60 tokens and 8 are to be written"):
        check_lengths([Prompt("9", None, tuple(range(60)))], 8, 64)
    with pytest.raises(ValidationError, match="shortest is 9"):
        DemoPrompts(input_tokens=8, shortest=9)


# Which prompts go together: every one once, no batch too large, never dearer than it must be.

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)
COSTS = st.builds(CostModel, st.floats(0, 1), st.floats(1e-6, 1e-2))


def planned_seconds(batches, lengths, cost: CostModel) -> float:
    return sum(cost.of(len(each), max(lengths[at] for at in each)) for each in batches)


@given(lengths=LENGTHS, size=st.integers(1, 12), cost=COSTS)
def test_every_prompt_is_in_one_batch_and_the_dynamic_programme_is_never_dearer(
    lengths, size, cost
):
    for name, policy in POLICIES.items():
        batches = policy(lengths, size, cost)
        assert sorted(itertools.chain(*batches)) == list(range(len(lengths))), name
        assert all(1 <= len(batch) <= size for batch in batches), name
    turbo = planned_seconds(turbo_batches(lengths, size, cost), lengths, cost)
    by_length = planned_seconds(sorted_batches(lengths, size, cost), lengths, cost)
    assert turbo <= by_length * (1 + 1e-9)


def test_no_way_of_cutting_is_cheaper_than_the_dynamic_programmes():
    for seed in range(8):
        generator = np.random.default_rng(seed)
        lengths = sorted(generator.integers(1, 201, 9).tolist())
        cost = CostModel(generator.random(), 10 ** generator.uniform(-5, -1))
        found = planned_seconds(turbo_batches(lengths, 4, cost), lengths, cost)

        ways = [cuts for n in range(9) for cuts in itertools.combinations(range(1, 9), n)]
        costs = []
        for cuts in ways:
            ends = [0, *cuts, 9]
            batches = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
            if max(map(len, batches)) <= 4:
                costs.append(planned_seconds(batches, lengths, cost))

        assert found == pytest.approx(min(costs)), seed


def test_padding_is_what_the_longest_asks_of_the_others_at_the_cost_of_a_batch():
    assert padding_ratio([[0, 1]], [10, 5]) == pytest.approx(0.25)
    batches = turbo_batches([5, 9, 5, 9, 100], 5, CostModel(0.0, 1.0))
    assert padding_ratio(batches, [5, 9, 5, 9, 100]) == 0.0
    assert len(turbo_batches([5, 9, 5, 9, 100], 5, CostModel(1e6, 1.0))) == 1
    lengths = [100, 1, 100, 1]
    given_ratio = padding_ratio(POLICIES["given"](lengths, 2, CostModel(0, 1)), lengths)
    assert padding_ratio(sorted_batches(lengths, 2, CostModel(0, 1)), lengths) < given_ratio


# What is written stays written: through kills in the middle of a line, and other attempts.

RECORD = {"id": "1", "text": "ä\u2028b", "output_tokens": 2}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outputs.jsonl"


def test_answers_to_these_prompts_alone_are_there_again(path):
    Journal(path, "d").add({3: dict(RECORD)})
    assert Journal(path, "d").records == {3: RECORD}
    Journal(path, "d").add({0: dict(RECORD)})
    assert Journal(path, "other").records == {}
    assert read_journal(path).records == {}
    for content in (b"", b"\xff", b"[]\n", b'{"digest'):
        path.write_bytes(content)
        assert Journal(path, "d").records == {}, content


def test_answers_of_other_weights_are_not_taken_over_and_the_log_says_so(path, tmp_path):
    earlier = tmp_path / "earlier.jsonl"
    for before, now, is_used, words in (
        ("m1", "m1", True, ""),
        ("m1", "m2", False, "1 earlier answers are to other prompts, or of other settings or"),
        (
            "",
            "m2",
            True,
            "1 earlier answers are used; whether data and weights are the same could",
        ),
        ("", "", True, ""),
    ):
        for other in (path, earlier):
            other.unlink(missing_ok=True)
        Journal(earlier, "d", before).add({0: dict(RECORD)})
        journal = Journal(path, "d", now)
        journal.take_over([earlier])
        assert journal.records == ({0: RECORD} if is_used else {}), (before, now)
        assert journal.remark().startswith(words), (before, now)
        assert bool(journal.remark()) == bool(words), (before, now)


def test_a_line_that_a_kill_cut_off_is_dropped_and_written_anew(path):
    Journal(path, "d").add({0: dict(RECORD), 1: dict(RECORD)})
    path.write_bytes(path.read_bytes()[:-4])
    again = Journal(path, "d")
    again.add({1: dict(RECORD)})
    assert again.records == Journal(path, "d").records == {0: RECORD, 1: RECORD}


def test_what_an_earlier_attempt_wrote_is_taken_over_once(path, tmp_path):
    earlier = tmp_path / "earlier.jsonl"
    Journal(earlier, "d").add({0: {"text": "old"}, 1: {"text": "old"}})
    journal = Journal(path, "d")
    journal.add({0: {"text": "new"}})
    journal.take_over([earlier, tmp_path / "missing.jsonl"])
    assert journal.records == {0: {"text": "new"}, 1: {"text": "old"}}
    assert Journal(path, "d").records == journal.records


def test_only_attempts_of_the_same_job_are_looked_at(host, make_job):
    spec = GenerateSpec(model=TINY)
    host.attempt("of-j1", spec, job_id="j1")
    host.attempt("of-j2", spec, job_id="j2")
    found = [path.parent.parent.name for path in earlier_journals(make_job(spec))]
    assert found == ["of-j1"]
