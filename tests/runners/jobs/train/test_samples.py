"""A file in tokens: what is learnt of it, what is kept back, and what is written where."""

import io
import itertools
import json

import numpy as np
import pytest

from runners.datasets.records import ChatSample, Turn
from runners.jobs.corpus import Corpus, Document, demo_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobs.train.samples import (
    DEFAULT_TEMPLATE,
    DataFile,
    Renderer,
    give_template,
    tokenised_file,
)

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Qwen3 does: an answer is written with its thoughts only while it is the last.
LAST_THINKS = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSING = "{{ raise_exception('no system role here') }}"


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    corpus = Corpus((Document("prose", "Say it, and it is said. " * 50),))

    def make(template=None):
        tokenizer = demo_tokenizer(corpus, 300, cache)
        tokenizer.chat_template = template
        return tokenizer

    return make


def lines(documents):
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


def tokenised(tokenizer, data, cache_dir, name="a.jsonl"):
    file = DataFile(name, io.BytesIO(data))
    return tokenised_file(file, file.digest(), tokenizer, cache_dir)


def samples(tokenizer, documents):
    """Return text and learnt text of each sample."""
    found = []
    for begin, end in itertools.pairwise(documents.offsets):
        ids, learnt = documents.ids[begin:end], documents.learnt[begin:end] > 0
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[learnt])))
    return found


QUESTIONS = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(40)]


def test_of_an_instruction_only_the_answer_is_learnt(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(PLAIN)

    found = tokenised(tokenizer, lines(QUESTIONS), tmp_path)

    end = tokenizer.eos_token
    assert dict(samples(tokenizer, found.train)) | dict(samples(tokenizer, found.held_out)) == {
        f"[user]Say {n}.{end}[assistant]It is {n}.{end}": f"It is {n}.{end}" for n in range(40)
    }
    assert found.facts["is_template_ours"] is False


def test_a_tokenizer_without_a_template_is_given_ours_and_keeps_it(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()

    found = tokenised(tokenizer, lines(QUESTIONS), tmp_path)

    text, learnt = samples(tokenizer, found.train)[0]
    end = tokenizer.eos_token
    assert text.startswith("<|im_start|>user\nSay ")
    assert learnt.startswith("It is ")
    assert learnt.endswith(f"<|im_end|>{end}")
    assert found.facts["is_template_ours"] is True
    assert tokenizer.chat_template == DEFAULT_TEMPLATE


def test_a_completion_is_learnt_with_its_end_and_a_text_whole(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token
    asked = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(4)]

    completions = tokenised(tokenizer, lines(asked), tmp_path)
    texts = tokenised(tokenizer, lines([{"text": "one"}, {"text": "two"}]), tmp_path)

    text, learnt = samples(tokenizer, completions.train)[0]
    assert text.endswith(learnt)
    assert learnt.strip()[0].isdigit()
    assert learnt.endswith(end)
    assert {each for part in texts[:2] for each in samples(tokenizer, part)} == {
        (f"one{end}", f"one{end}"),
        (f"two{end}", f"two{end}"),
    }


def test_what_is_held_out_is_in_no_training_sample_however_often_it_stands(
    make_tokenizer, tmp_path
):
    tokenizer = make_tokenizer(PLAIN)

    found = tokenised(tokenizer, lines(QUESTIONS * 2), tmp_path)

    train, held_out = (set(samples(tokenizer, part)) for part in found[:2])
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 40
    assert len(found.train) + len(found.held_out) == 80


def test_two_records_are_one_to_learn_and_one_to_judge_by(make_tokenizer, tmp_path):
    for pair in range(20):  # whichever of them their hashes would keep
        data = lines(QUESTIONS[2 * pair : 2 * pair + 2])

        found = tokenised(make_tokenizer(PLAIN), data, tmp_path)

        assert (len(found.train), len(found.held_out)) == (1, 1)


def test_a_file_is_tokenised_once(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(PLAIN)
    first = tokenised(tokenizer, lines(QUESTIONS), tmp_path)
    [folder] = tmp_path.iterdir()
    changed = first.train.ids[::-1].copy()
    (folder / "train" / "ids").write_bytes(changed.tobytes())

    again = tokenised(tokenizer, lines(QUESTIONS), tmp_path)
    other = tokenised(make_tokenizer(), lines(QUESTIONS), tmp_path)

    assert np.array_equal(again.train.ids, changed)
    assert len(list(tmp_path.iterdir())) == 2  # another template is another text
    assert len(other.train) == len(first.train)


def test_answers_that_later_turns_rewrite_are_not_learnt(make_tokenizer):
    renderer = Renderer(make_tokenizer(LAST_THINKS))
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]

    found = renderer.rendered(ChatSample(tuple(turns)), "a.jsonl: line 1")

    [(begin, end)] = found.spans
    assert found.text[begin:end] == "<think></think>d"
    assert renderer.num_last_only == 1


def test_every_answer_of_a_conversation_is_learnt(make_tokenizer):
    tokenizer = make_tokenizer()
    give_template(tokenizer)
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]

    found = Renderer(tokenizer).rendered(ChatSample(tuple(turns)), "")

    said = [found.text[begin:end] for begin, end in found.spans]
    assert said == [f"{answer}<|im_end|>{tokenizer.eos_token}" for answer in "bd"]


def test_a_template_that_refuses_is_named_with_the_line(make_tokenizer, tmp_path):
    with pytest.raises(BadInputError, match=r"a\.jsonl: line 1: .*no system role here"):
        tokenised(make_tokenizer(REFUSING), lines(QUESTIONS), tmp_path)


def test_a_broken_line_ends_the_reading_with_its_sentence(make_tokenizer, tmp_path):
    with pytest.raises(BadInputError, match=r"a\.jsonl: line 41: it is no JSON"):
        tokenised(make_tokenizer(), lines(QUESTIONS) + b"{oops\n", tmp_path)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("samples-")]
