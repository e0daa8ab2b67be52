"""The host's own text and its tokens, and folders that are published."""

import hashlib

import numpy as np
import pytest

from runners.jobs.corpus import (
    END_OF_TEXT,
    HELD_OUT_ONE_IN,
    Corpus,
    Document,
    cached_folder,
    demo_tokenizer,
    load_corpus,
    tokenize_documents,
    tokenizer_digest,
)
from runners.jobs.events import read_events
from runners.jobs.runtime import card_text, describe_folder, publish_model, weight_file_bytes
from tests.runners.jobs.tiny import tiny_training


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


def test_reading_and_learning_again_give_the_same(corpus, tokenizer, tmp_path):
    assert load_corpus().digest == corpus.digest
    again = demo_tokenizer(CORPUS, 300, tmp_path)
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)


def test_each_document_is_on_one_side_and_one_python_file_in_sixteen_is_held_out(corpus):
    train = {each.text for each in corpus.train}
    assert not train & {each.text for each in corpus.held_out}
    assert len(corpus.train) + len(corpus.held_out) == len(corpus.documents)
    python = [each for each in corpus.documents if each.name.startswith("python/")]
    share = len(corpus.held_out) / len(python)
    assert 0.5 / HELD_OUT_ONE_IN < share < 2.0 / HELD_OUT_ONE_IN


def test_the_side_of_a_file_depends_on_its_content_and_licences_are_never_held_out():
    texts = [f"x = {index}\n" for index in range(100)]
    here = [Document("python/a.py", text).is_held_out for text in texts]
    there = [Document("python/b/c.py", text).is_held_out for text in texts]
    assert here == there
    assert any(here)
    texts = (f"licence {index}" for index in range(200))
    assert not any(Document("common-licenses/X", text).is_held_out for text in texts)


def test_there_is_enough_text_each_once_and_without_tables_tests_and_packages(corpus):
    size = sum(len(each.text) for each in corpus.train)
    assert size > 2_000_000
    digests = [each.digest for each in corpus.documents]
    assert len(digests) == len(set(digests))
    names = [each.name for each in corpus.documents]
    assert not [name for name in names if "/test/" in name or "site-packages" in name]
    assert not [name for name in names if name.startswith("python/encodings/")]


# The demo tokenizer and the cache of tokenised text.

TEXT = "def answer() -> int:\n    return 42\n"
CORPUS = Corpus(tuple(Document(f"python/{n}.py", TEXT * 20 + str(n)) for n in range(8)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tokenizer(cache):
    return demo_tokenizer(CORPUS, 300, cache)


def test_any_text_survives_a_vocabulary_of_the_asked_size(tokenizer):
    text = "naïve 東京 \t\x00 🙂 def f(): pass"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]
    assert len(tokenizer) <= 300


def test_the_stream_decodes_to_the_documents_and_is_read_from_the_cache(tokenizer, cache):
    ids = tokenize_documents(tokenizer, CORPUS.documents, "all", cache)
    assert np.count_nonzero(ids == tokenizer.eos_token_id) == len(CORPUS.documents)
    assert ids[-1] == tokenizer.eos_token_id
    ids = tokenize_documents(tokenizer, CORPUS.documents[:1], "first", cache)
    assert tokenizer.decode(ids[:-1]) == CORPUS.documents[0].text
    first = tokenize_documents(tokenizer, CORPUS.documents, "twice", cache)
    second = tokenize_documents(tokenizer, (), "twice", cache)
    assert np.array_equal(first, second)


def test_of_builders_of_a_cache_the_first_wins_and_a_failed_one_leaves_nothing(tmp_path):
    def build(target):
        (target / "half").write_text("x")
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        cached_folder(tmp_path, "thing", build)
    assert list(tmp_path.iterdir()) == []

    def build(target):
        (target / "mine").write_text("second")
        other = tmp_path / "thing"
        other.mkdir()
        (other / "mine").write_text("first")

    folder = cached_folder(tmp_path, "thing", build)
    assert (folder / "mine").read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["thing"]


# Publishing a folder: complete, described, and announced once.


@pytest.fixture
def job(make_job):
    return make_job(tiny_training())


def test_a_published_folder_holds_what_was_written_and_its_card(job):
    publish_model(job, lambda folder: (folder / "weights").write_bytes(b"abc"), "# Card\n", {})
    assert {each.name for each in job.output_dir("model").iterdir()} == {"weights", "README.md"}
    publish_model(job, lambda folder: (folder / "weights").write_bytes(b"abc"), "# Card\n", {})
    card = (job.output_dir("model") / "README.md").read_text()
    assert f"| weights | 3 | {hashlib.sha256(b'abc').hexdigest()} |" in card
    card = card_text("Title", {"Evaluation": {"perplexity": 91.54321987}})
    assert "# Title" in card
    assert "| perplexity | 91.5432 |" in card


def test_a_folder_is_published_whole_and_replaced_by_the_next(job):
    def write(_folder):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_model(job, write, "# Card\n", {})
    assert not job.output_dir("model").exists()

    for name in ("old", "new"):
        publish_model(job, lambda folder, name=name: (folder / name).touch(), "# Card\n", {})
    assert not (job.output_dir("model") / "old").exists()


def test_it_is_announced_with_its_facts(job, events_path):
    publish_model(job, lambda folder: (folder / "w").touch(), "# Card\n", {"perplexity": 3.0})
    job.emitter.close()
    assert read_events(events_path)[0]["body"]["facts"] == {"perplexity": 3.0}


def test_files_in_folders_are_described_by_their_relative_path(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"12")
    body = describe_folder(tmp_path, {})
    assert (body.files, body.total_bytes) == ({"deep/file": 2}, 2)


def test_only_safetensors_count_as_weights(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"123")
    (tmp_path / "tokenizer.json").write_bytes(b"12345")
    assert weight_file_bytes(tmp_path) == 3
