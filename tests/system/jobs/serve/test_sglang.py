"""A spec in SGLang's words, held to its own options; its server's stand-in behind our door."""

import httpx
import openai
import pytest

from runners.jobspec import FolderModel, NamedAdapter, ServeSpec
from runners.jobspec.serve import key_hash
from tests.runners.jobs.adapter_making import make_all
from tests.runners.jobs.serve.speaking import (
    STANDIN,
    recorded_options,
)
from tests.system.jobs.harness import PROJECT
from tests.system.jobs.serve.serving import KEY, complete, engine_of, serving_by, until

MODULE = "runners.jobs.serve.sglang"
ENV = {
    "PYTHONPATH": f"{PROJECT}:{STANDIN}",
    "SGLANG_OPTIONS": " ".join(sorted(recorded_options("sglang"))),
}


@pytest.fixture(scope="module")
def endpoint(host, trained_model, base):
    make_all(base, host.path / "models" / "for-sglang", {"one": {}})
    adapter = NamedAdapter(name="one", adapter=FolderModel(path="for-sglang/one"))
    spec = ServeSpec(
        model=trained_model, engine="sglang", max_concurrency=4, max_length=64,
        adapters=(adapter,), key_hashes=(key_hash(KEY),),
    )  # fmt: skip
    with serving_by(host, MODULE, "sglang", spec, ENV) as found:
        found.address()
        yield found


def test_an_answer_comes_back_whole_and_streamed_and_an_adapters_by_its_name(endpoint):
    client = endpoint.client()

    whole = complete(client, "one two three")
    stream = complete(client, "one two three", stream=True)
    chunks = list(stream)
    adapted = complete(client, "four", model="one")

    assert (whole.model, whole.choices[0].text) == ("model", "one two three")
    assert "".join(each.choices[0].text for each in chunks).split() == ["one", "two", "three"]
    assert stream.response.headers["x-accel-buffering"] == "no"
    assert adapted.model == "model:one"
    until(lambda: endpoint.figure("slipway_output_tokens_total") >= 7, "tokens are not counted")
    with pytest.raises(openai.NotFoundError):
        complete(client, model="model:one")


def test_what_it_refuses_comes_back_in_our_form_and_nobody_else_has_its_key(endpoint):
    engine = engine_of(endpoint)
    (port,) = [each.laddr.port for each in engine.net_connections("tcp") if not each.raddr]

    with pytest.raises(openai.BadRequestError) as caught:
        complete(endpoint.client(), "this is too long")
    behind = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"})

    assert caught.value.code == "context_length_exceeded"
    assert behind.status_code == 401
    assert "--api-key" not in engine.cmdline()
    assert "--served-model-name" in engine.cmdline()


def test_what_it_says_when_it_does_not_start_is_the_jobs_reason(host, trained_model):
    broken = ENV | {"SGLANG_OPTIONS": "host port"}
    spec = ServeSpec(model=trained_model, engine="sglang", key_hashes=(key_hash(KEY),))

    with serving_by(host, MODULE, "sglang-broken", spec, broken) as endpoint:
        ended = endpoint.end()

    assert ended.returncode == 3
    assert "SGLang does not start with this model: error: " in ended.stderr
