"""A serving job's pages: its address, and a playground that asks this machine's endpoint alone."""

import asyncio

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runners.jobs.loading import fresh_model
from runners.jobspec import FolderModel, ServeSpec
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.harness import Host
from tests.system.jobs.serve.serving import serving
from tests.webapp.conftest import client_of
from tests.webapp.jobs_pages.test_playground import (  # noqa: F401 -- some are fixtures
    SPEC,
    VALUES,
    told,
)
from webapp.jobs.endpoints import endpoint_of, hashes_of, new_key
from webapp.pages.playground import call_of, stream_text, whole_answer

pytestmark = [pytest.mark.django_db(databases="__all__"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Host:
    """A host with a model folder of random weights that reads bytes."""
    host = Host(tmp_path_factory.mktemp("playground") / "host")
    folder = host.path / "models" / "tiny"
    torch.manual_seed(1)
    fresh_model(TINY_CONFIG, torch.float32).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: at for at, each in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return host


@pytest.fixture(scope="module")
def answering(tiny):
    key = new_key()
    spec = ServeSpec(model=FolderModel(path="tiny"), served_name="tiny", key_hashes=hashes_of(key))
    with serving(tiny, "playground", spec, key) as endpoint:
        endpoint.address()
        yield endpoint


@pytest.mark.slow
def test_a_prompt_is_answered_whole_and_as_a_stream_with_the_servers_own_key(
    answering,
    told,
    alice,
):
    body = answering.said("endpoint")[-1]
    job = told(port=body["port"], hashes=hashes_of(answering.key))
    url = f"/jobs/{job.pk}/playground/answer/"
    whole = client_of(alice).post(url, {**VALUES, "form": "text"}).content.decode()

    call = call_of(job, endpoint_of(job), {**VALUES, "form": "text"}, stream=True)

    async def streamed() -> str:
        return "".join([piece async for piece in stream_text(call)])

    text = asyncio.run(streamed())
    assert text
    assert "key" not in text
    shown = whole.partition('aria-label="Answer"')[2].partition("</pre>")[0]
    assert shown.partition(">")[2]
    answered = answering.client().completions.create(
        model="tiny", prompt="import", max_tokens=5, temperature=0
    )
    assert answered.choices[0].text == text


@pytest.mark.slow
def test_the_endpoints_own_refusal_is_what_the_person_reads(answering, told):
    body = answering.said("endpoint")[-1]
    job = told(port=body["port"], hashes=hashes_of(answering.key))
    values = {**VALUES, "max_tokens": 1000}

    answer = whole_answer(call_of(job, endpoint_of(job), values, stream=False))

    assert "maximum context length is 64 tokens" in answer
