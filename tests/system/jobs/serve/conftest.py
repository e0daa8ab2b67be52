"""One endpoint of the tiny trained model for the tests of its answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobspec import ServeSpec
from runners.jobspec.serve import key_hash
from tests.system.jobs.serve.serving import KEY, Endpoint, serving


@pytest.fixture(scope="package")
def base(host, trained_model) -> Path:
    """The folder of the tiny trained model."""
    return host.path / "attempts" / trained_model.attempt_id / "output" / "model"


@pytest.fixture(scope="package")
def endpoint(host, trained_model) -> Iterator[Endpoint]:
    spec = ServeSpec(
        model=trained_model,
        weight_dtype="fp32",
        max_concurrency=8,
        queue_limit=256,
        kv_cache_tokens=256,  # of 512 that eight at their longest would take: some must wait
        key_hashes=(key_hash(KEY),),
    )
    with serving(host, "serve-shared", spec, KEY) as found:
        found.address()
        yield found


@pytest.fixture(scope="module")
def client(endpoint) -> OpenAI:
    """The official client on the endpoint of a module, which is the shared one unless it says."""
    return endpoint.client()


@pytest.fixture(scope="package")
def greedy(base):
    """What transformers' own generate writes after one prompt alone."""
    model = load_folder(base, "fp32", torch.device("cpu"))
    tokenizer = load_tokenizer(base)

    def write(prompt: str, tokens: int) -> str:
        asked = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**asked, max_new_tokens=tokens, do_sample=False)
        answer = found[0, asked["input_ids"].shape[1] :]
        return tokenizer.decode(answer, skip_special_tokens=True)

    return write
