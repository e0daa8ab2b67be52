"""A classification head learns labels that it was not shown, padding or not, and says how well."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from runners.jobs.corpus import load_corpus
from runners.jobs.loading import load_tokenizer
from runners.jobs.ranks import ALONE
from runners.jobs.runtime import BadInputError
from runners.jobs.train import job as train
from runners.jobs.train.classifying import passages
from runners.jobs.train.sources import macro_f1
from runners.jobspec import FileData, FolderModel, RandomModel, SampleOptions, TrainSpec
from runners.jobspec.base import PACKAGES
from runners.jobspec.train import LayoutOptions
from tests.system.jobs.gang import run_on_ranks

ENCODER: dict[str, object] = {
    "model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
FRUIT, TOOLS = ("apple", "pear", "plum", "cherry"), ("hammer", "saw", "drill", "plane")


def sentences():
    for n in range(160):
        word, label = (FRUIT[n // 2 % 4], "fruit") if n % 2 else (TOOLS[n // 2 % 4], "tool")
        yield {"text": f"{'We have ' * (n % 7)}number {n} of the {word}s.", "label": label}


def lines(documents):
    return "".join(f"{json.dumps(each)}\n" for each in documents)


def classification(**changes):
    fields = {
        "model": RandomModel(config=ENCODER), "objective": "classification",
        "data": FileData(path="labels/things.jsonl"), "sequence_length": 48,
        "micro_batch_size": 8, "max_steps": 150, "time_budget_seconds": None,
        "compute_dtype": "fp32", "learning_rate": 2e-3,
    }  # fmt: skip
    return TrainSpec(**{**fields, **changes})


@pytest.fixture(scope="module", autouse=True)
def files(host):
    folder = host.path / "models" / "labels"
    folder.mkdir()
    (folder / "things.jsonl").write_text(lines(sentences()))
    (folder / "unlabelled.jsonl").write_text(lines([{"text": "a", "label": "b"}, {"text": "c"}]))
    (folder / "alike.jsonl").write_text(lines({"text": f"t{n}", "label": "one"} for n in range(9)))
    return folder


@pytest.fixture(scope="module")
def learnt(host):
    return host.run_here("classified", classification(), train.work)


def test_it_tells_what_it_was_not_shown_apart(learnt):
    measured = learnt.measured

    assert measured["accuracy"] > 0.9
    assert measured["f1"] == pytest.approx(measured["accuracy"], abs=0.1)
    assert measured["data_classes"] == 2
    assert measured["data_documents"] + measured["data_held_out"] == 160
    assert "perplexity" not in measured


def test_accuracy_and_f1_are_charted_while_it_trains(learnt):
    losses = learnt.metric("validation_loss")

    assert len(losses) == len(learnt.metric("accuracy")) == len(learnt.metric("f1")) >= 6
    assert losses[-1] < losses[0]
    assert max(learnt.metric("accuracy")) <= 1.0


def test_its_folder_is_a_classifier_of_transformers_with_the_names_of_its_classes(learnt):
    folder = learnt.folder / "output" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    first = [tokenizer.bos_token_id]

    def said(text):
        logits = model(torch.tensor([first + tokenizer(text)["input_ids"]])).logits
        return model.config.id2label[int(logits.argmax())]

    assert said("number 5 of the plums.") == "fruit"
    assert said("We have number 4 of the drills.") == "tool"


def test_what_it_left_is_taken_further_with_the_head_that_it_has(host, learnt):
    spec = classification(
        model=FolderModel(path=str(learnt.folder / "output" / "model")), max_steps=1,
        learning_rate=1e-6,
    )  # fmt: skip

    again = host.run_here("classified-again", spec, train.work)

    assert again.measured["accuracy"] == pytest.approx(learnt.measured["accuracy"], abs=0.15)


def test_padding_changes_nothing(make_job):
    prepared = prepared_of(make_job(classification()))
    model, batch = prepared.trainer.model, prepared.data.batches.micro_batch(0, 0)
    row = int(batch.attention_mask.sum(1).argmin())
    length = int(batch.attention_mask[row].sum())
    assert length < batch.input_ids.shape[1]

    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # fresh ones are so small that nothing shows
        padded = model(**batch.inputs).logits[row]
        alone = model(batch.input_ids[row : row + 1, :length]).logits[0]
        unmasked = model(batch.input_ids[row : row + 1]).logits[0]

    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)
    assert not torch.allclose(unmasked, alone, atol=1e-3)


def prepared_of(job):
    return train._prepare(job, job.spec_of(TrainSpec), ALONE)


def test_f1_is_the_mean_over_classes_of_precision_and_recalls_harmonic_mean():
    wanted, found = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 2, 2])

    scores = [2 * 2 / (3 + 2), 2 * 1 / (2 + 2), 2 * 1 / (1 + 2)]
    assert macro_f1(wanted, found, 3) == pytest.approx(sum(scores) / 3)
    assert macro_f1(wanted, found, 9) == pytest.approx(sum(scores) / 3)  # 6 never come up
    assert macro_f1(wanted, wanted, 3) == 1.0


def test_the_hosts_own_passages_are_the_same_each_time_and_of_every_package():
    one, other = (passages(load_corpus()) for _ in range(2))
    records = [json.loads(line) for line in one.file]

    assert one.digest() == other.digest()
    assert {each["label"] for each in records} == set(PACKAGES)
    assert min(sum(each["label"] == name for each in records) for name in PACKAGES) > 100


def test_a_long_text_is_cut_to_the_models_length(host):
    spec = classification(sequence_length=12, max_steps=1)

    cut = host.run_here("classified-cut", spec, train.work)

    assert cut.measured["data_cut"] > 0
    assert cut.measured["data_tokens"] <= 12 * 160


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": FileData(path="labels/unlabelled.jsonl")}, "line 2: “label” is missing"),
        ({"data": FileData(path="labels/alike.jsonl")}, "at least 2 classes"),
        ({"sequence_length": 65}, "sequence_length is 65, and the model has 64 positions"),
        ({"model": RandomModel(config={**ENCODER, "vocab_size": 99})}, "at least 257"),
        (
            {"model": RandomModel(config={**ENCODER, "model_type": "llama"})},
            "the model_type is llama: it must be distilbert",
        ),
    ],
)
def test_what_cannot_be_classified_is_refused_by_name(make_job, changes, said):
    with pytest.raises(BadInputError, match=said):
        train.work(make_job(classification(**changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"source": "demo"}}, "the demo model predicts text"),
        ({"quantized": {"method": "qat", "bits": 8}}, "quantized is for models"),
        ({"layout": LayoutOptions(tensor_parallel_size=2)}, "other parallel sizes out"),
    ],
)
def test_a_spec_that_goes_not_with_a_head_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        classification(**changes)


@pytest.mark.slow
def test_two_ranks_under_zero_leave_one_whole_classifier(host):
    layout = LayoutOptions(data_parallel_size=2, zero_stage=2)
    spec = classification(layout=layout, gradient_accumulation_steps=2, micro_batch_size=4)

    done = run_on_ranks(host, "classified-zero", spec)

    assert done.returncode == 0, done.stderr
    assert done.measured["accuracy"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(done.folder / "output" / "model")
    assert model.config.label2id == {"fruit": 0, "tool": 1}


def test_a_packed_sample_option_changes_no_row(make_job):
    one, other = (
        prepared_of(make_job(classification(samples=SampleOptions(rows=rows)))).data.batches
        for rows in ("packed", "padded")
    )

    assert torch.equal(one.micro_batch(0, 0).input_ids, other.micro_batch(0, 0).input_ids)
