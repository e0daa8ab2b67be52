"""Publishing a folder: complete, described, and announced once."""

import hashlib

import pytest

from runners.jobs.artefacts import card_text, describe_folder, publish_model, weight_file_bytes
from runners.jobs.events import read_events
from tests.runners.jobs.tiny import tiny_training


@pytest.fixture
def job(make_job):
    return make_job(tiny_training())


def test_a_published_folder_holds_what_was_written_and_its_card(job):
    publish_model(job, lambda folder: (folder / "weights").write_bytes(b"abc"), "# Card\n", {})

    assert {each.name for each in job.output_dir("model").iterdir()} == {"weights", "README.md"}


def test_the_card_lists_each_file_with_its_digest(job):
    publish_model(job, lambda folder: (folder / "weights").write_bytes(b"abc"), "# Card\n", {})

    card = (job.output_dir("model") / "README.md").read_text()

    assert f"| weights | 3 | {hashlib.sha256(b'abc').hexdigest()} |" in card


def test_a_folder_that_failed_to_be_written_is_not_published(job):
    def write(_folder):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_model(job, write, "# Card\n", {})

    assert not job.output_dir("model").exists()


def test_publishing_again_replaces_the_folder(job):
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


def test_a_card_shows_numbers_with_six_digits():
    card = card_text("Title", {"Evaluation": {"perplexity": 91.54321987}})

    assert "# Title" in card
    assert "| perplexity | 91.5432 |" in card
