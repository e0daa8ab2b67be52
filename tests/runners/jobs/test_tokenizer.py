"""The demo tokenizer and the cache of tokenised text."""

import numpy as np
import pytest

from runners.jobs.corpus import (
    END_OF_TEXT,
    Corpus,
    Document,
    cached_folder,
    demo_tokenizer,
    tokenized,
    tokenizer_digest,
)

TEXT = "def answer() -> int:\n    return 42\n"
CORPUS = Corpus(tuple(Document(f"python/{n}.py", TEXT * 20 + str(n)) for n in range(8)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tokenizer(cache):
    return demo_tokenizer(CORPUS, 300, cache)


def test_any_text_survives_the_round_trip(tokenizer):
    text = "naïve 東京 \t\x00 🙂 def f(): pass"

    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_end_of_text_is_one_token(tokenizer):
    assert tokenizer(END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]


def test_the_vocabulary_has_no_more_entries_than_asked(tokenizer):
    assert len(tokenizer) <= 300


def test_learning_again_gives_the_same_tokenizer(tokenizer, tmp_path):
    again = demo_tokenizer(CORPUS, 300, tmp_path)

    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)


def test_each_document_ends_with_end_of_text(tokenizer, cache):
    ids = tokenized(tokenizer, CORPUS.documents, "all", cache)

    assert np.count_nonzero(ids == tokenizer.eos_token_id) == len(CORPUS.documents)
    assert ids[-1] == tokenizer.eos_token_id


def test_the_stream_decodes_to_the_documents(tokenizer, cache):
    ids = tokenized(tokenizer, CORPUS.documents[:1], "first", cache)

    assert tokenizer.decode(ids[:-1]) == CORPUS.documents[0].text


def test_a_second_call_reads_the_cache(tokenizer, cache):
    first = tokenized(tokenizer, CORPUS.documents, "twice", cache)

    second = tokenized(tokenizer, (), "twice", cache)

    assert np.array_equal(first, second)


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    def build(target):
        (target / "half").write_text("x")
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        cached_folder(tmp_path, "thing", build)

    assert list(tmp_path.iterdir()) == []


def test_of_two_builders_at_once_the_first_wins(tmp_path):
    def build(target):
        (target / "mine").write_text("second")
        other = tmp_path / "thing"
        other.mkdir()
        (other / "mine").write_text("first")

    folder = cached_folder(tmp_path, "thing", build)

    assert (folder / "mine").read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["thing"]
