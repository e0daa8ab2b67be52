"""Training through 8-bit integers alone (QFT): what it holds, how it rounds, what it leaves."""

import pytest
import torch

from runners.jobs.corpus import load_corpus, tokenize_documents
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import load_folder, load_tokenizer
from tests.runners.jobs.tiny import tiny_training


def test_the_job_leaves_a_plain_model_that_reads_text_as_the_result_says(host):
    spec = tiny_training(optimizer="qft", learning_rate=1e-3, max_steps=12)
    trained = host.run("qft", spec)
    corpus = load_corpus()
    folder = trained.folder / "output" / "model"
    key = f"{corpus.digest}/held-out"
    ids = tokenize_documents(load_tokenizer(folder), corpus.held_out, key, host.path / "cache")

    found = evaluate(load_folder(folder, "fp32", torch.device("cpu")), ids, 8192)

    assert found.value == pytest.approx(trained.measured["perplexity"], rel=1e-6)
    assert trained.measured["trainable_parameters"] == trained.measured["parameters"]
