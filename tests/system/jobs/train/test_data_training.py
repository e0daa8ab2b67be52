"""Training on files as a job: it learns them, says what they were, and refuses by name."""

import json
import math

import pytest
import torch

from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobs.train import job as train
from runners.jobspec import (
    FileData,
    HostText,
    MixedData,
    SampleOptions,
    UploadedData,
    WeightedData,
)
from runners.jobspec.base import DATA_FOLDER
from tests.runners.jobs.tiny import tiny_training

COLOURS = ("red", "green", "blue", "black", "white", "grey", "pink", "brown")
ASKED = [{"instruction": f"Colour {n}?", "output": f"It is {COLOURS[n % 8]}."} for n in range(64)]


def lines(documents):
    return "".join(f"{json.dumps(each)}\n" for each in documents)


@pytest.fixture(scope="module", autouse=True)
def files(host):
    folder = host.path / "models" / "data"
    folder.mkdir()
    (folder / "asked.jsonl").write_text(lines(ASKED))
    (folder / "texts.txt").write_text(("A line of plain text.\n" * 100 + "\n") * 20)
    (folder / "several.txt").write_text(
        "".join(f"Number {n} is followed by {n + 1}.\n" * 80 + "\n" for n in range(20))
    )
    (folder / "broken.jsonl").write_text(lines(ASKED[:3]) + "{oops\n")
    (folder / "long.jsonl").write_text(
        lines({"prompt": "x " * 300, "completion": str(n)} for n in range(4))
    )
    return folder


@pytest.fixture(scope="module")
def tuned(host, trained_model):
    spec = tiny_training(model=trained_model, data=FileData(path="data/asked.jsonl"), max_steps=60)
    return host.run_here("data-tuned", spec, train.work)


def test_it_learns_the_answers(tuned):
    losses = tuned.metric("validation_loss")

    assert losses[-1] < losses[0]
    assert tuned.measured["data_loss"] < 2.0 < math.log(512)
    assert tuned.measured["data_perplexity"] == pytest.approx(
        math.exp(tuned.measured["data_loss"])
    )


def test_the_model_answers_as_it_was_taught(tuned):
    folder = tuned.folder / "output" / "model"
    tokenizer = load_tokenizer(folder)
    model = load_folder(folder, "fp32", torch.device("cpu"))
    asked = [{"role": "user", "content": "Colour 3?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]

    with torch.no_grad():
        for _ in range(6):
            following = model(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, following], 1)

    assert "<|im_start|>assistant\nIt is" in tokenizer.decode(ids[0])


def test_the_result_says_what_it_was_made_of(tuned):
    measured, notes = tuned.measured, tuned.bodies("result")[0]["notes"]

    assert measured["data_documents"] + measured["data_held_out"] == 64
    assert 0.0 <= measured["padding_share"] < 0.2  # packed
    assert 0.1 < measured["label_share"] < 0.6  # the questions are not learnt
    assert 0 < measured["tokens"] < 60 * 4 * 64
    assert notes["data"].startswith("asked.jsonl (instruction, sha256 ")
    assert "no chat template" in notes["data_remarks"]


def test_one_a_row_has_more_padding(host, trained_model, tuned):
    spec = tiny_training(
        model=trained_model,
        data=FileData(path="data/asked.jsonl"),
        samples=SampleOptions(rows="padded"),
        max_steps=2,
    )

    done = host.run_here("data-padded", spec, train.work)

    assert done.measured["label_share"] == pytest.approx(tuned.measured["label_share"], rel=0.1)
    assert done.bodies("result")[0]["notes"]["samples"].startswith("one a row")


def test_a_text_and_an_upload_are_mixed_with_the_hosts_own(host, trained_model, files):
    upload = UploadedData(
        dataset_id="d1", name="mine.jsonl", sha256="0" * 64, size_bytes=9, format="instruction"
    )
    parts = (HostText(), FileData(path="data/several.txt"), upload)
    data = MixedData(parts=tuple(WeightedData(data=each, weight=1.0) for each in parts))
    spec = tiny_training(model=trained_model, data=data, max_steps=2)
    fetched = host.attempt("data-mixed", spec) / DATA_FOLDER
    fetched.mkdir()
    (fetched / upload.file_name).write_text(lines(ASKED))

    done = host.run_here("data-mixed", spec, train.work)

    notes = done.bodies("result")[0]["notes"]
    assert notes["data"].startswith("the host's own text; several.txt (text, sha256 ")
    assert "mine.jsonl (instruction" in notes["data"]
    assert done.measured["label_share"] > 0.6


@pytest.mark.parametrize(
    ("data", "options", "error", "said"),
    [
        (
            "broken.jsonl",
            SampleOptions(),
            BadInputError,
            "broken.jsonl: line 4: it is not valid JSON",
        ),
        ("texts.txt", SampleOptions(), BadInputError, "one record, again"),
        (
            "long.jsonl",
            SampleOptions(),
            BadInputError,
            "all [0-9] samples are longer than sequence_length, which is 64",
        ),
        (
            "long.jsonl",
            SampleOptions(too_long="leave_out"),
            BadInputError,
            "samples are longer than sequence_length",
        ),
        (
            "none.jsonl",
            SampleOptions(),
            MissingModelError,
            "training data none.jsonl: .*cannot be",
        ),
    ],
)
def test_what_cannot_be_learnt_is_refused_by_name(make_job, data, options, error, said):
    spec = tiny_training(data=FileData(path=f"data/{data}"), samples=options)

    with pytest.raises(error, match=said):
        train.work(make_job(spec))
