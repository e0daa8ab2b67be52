"""The host's own text: what is in it, in which order, and what is held out."""

import pytest

from runners.jobs.corpus import HELD_OUT_ONE_IN, Document, load_corpus


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


def test_reading_twice_gives_the_same_digest(corpus):
    assert load_corpus().digest == corpus.digest


def test_no_text_is_on_both_sides_of_the_split(corpus):
    train = {each.text for each in corpus.train}

    assert not train & {each.text for each in corpus.held_out}


def test_the_two_sides_hold_every_document(corpus):
    assert len(corpus.train) + len(corpus.held_out) == len(corpus.documents)


def test_about_one_python_file_in_sixteen_is_held_out(corpus):
    python = [each for each in corpus.documents if each.name.startswith("python/")]

    share = len(corpus.held_out) / len(python)

    assert 0.5 / HELD_OUT_ONE_IN < share < 2.0 / HELD_OUT_ONE_IN


def test_the_side_of_a_file_depends_on_its_content_and_not_on_its_path():
    texts = [f"x = {index}\n" for index in range(100)]

    here = [Document("python/a.py", text).is_held_out for text in texts]
    there = [Document("python/b/c.py", text).is_held_out for text in texts]

    assert here == there
    assert any(here)


def test_licences_are_never_held_out_because_their_versions_repeat_each_other():
    texts = (f"licence {index}" for index in range(200))

    assert not any(Document("common-licenses/X", text).is_held_out for text in texts)


def test_tables_tests_and_installed_packages_are_left_out(corpus):
    names = [each.name for each in corpus.documents]

    assert not [name for name in names if "/test/" in name or "site-packages" in name]
    assert not [name for name in names if name.startswith("python/encodings/")]


def test_there_is_enough_text_for_two_minutes_of_training(corpus):
    size = sum(len(each.text) for each in corpus.train)

    assert size > 2_000_000


def test_equal_files_are_kept_once(corpus):
    digests = [each.digest for each in corpus.documents]

    assert len(digests) == len(set(digests))
