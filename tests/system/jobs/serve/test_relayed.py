"""A child that speaks OpenAI's form, behind our door: a real one, which vLLM is started like."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from runners.environments.builder import Store
from runners.jobspec import ServeSpec
from runners.jobspec.serve import key_hash
from runners.shared.config import HostDir
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.system.jobs.serve.gguf import build_environment, write_model
from tests.system.jobs.serve.serving import (
    KEY,
    PROMPT,
    complete,
    engine_of,
    kill_until_given_up,
    outcome,
    starter,
    until,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def child(host, trained_model) -> dict[str, str]:
    """Return where the child's interpreter and its GGUF file lie."""
    build_environment(host.path)
    source = host.path / "attempts" / trained_model.attempt_id / "output" / "model"
    folder = host.path / "models" / "relayed-gguf"
    write_model(source, folder)
    store = Store(HostDir(host.path))
    python = store.python(store.pins("llamacpp"))
    return {"LLAMA_PYTHON": str(python), "LLAMA_FILE": str(folder / "model.gguf")}


@pytest.fixture(scope="module")
def spec(trained_model) -> ServeSpec:
    return ServeSpec(
        model=trained_model,
        engine="vllm",
        max_concurrency=4,
        queue_limit=4,
        max_length=64,
        key_hashes=(key_hash(KEY),),
    )


@pytest.fixture(scope="module")
def start(host, child):
    return starter(host, "tests.system.jobs.serve.relayed_job", child)


@pytest.fixture(scope="module")
def endpoint(start, spec):
    with start("relayed", spec) as found:
        found.address()
        yield found


def test_an_answer_comes_back_whole_and_streamed_with_the_same_text(client):
    whole = complete(client)

    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))

    assert (
        "".join(each.choices[0].text for each in chunks if each.choices) == whole.choices[0].text
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_each_token_comes_when_it_is_written_and_not_at_the_end(endpoint):
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 40, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{endpoint.address()}/v1/completions"

    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        parts = list(answer.iter_raw())

    assert answer.headers["content-type"] == "text/event-stream"
    assert len(parts) > 10
    assert parts[-1].endswith(b"data: [DONE]\n\n")


def test_a_bias_reaches_the_engine(client):
    plain = complete(client, max_tokens=4)

    biased = complete(client, max_tokens=4, logit_bias={"40": 100.0})

    assert biased.choices[0].text != plain.choices[0].text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (
            {"extra_body": {"kv_transfer_params": {"remote_host": "10.0.0.1"}}},
            "kv_transfer_params",
        ),
        ({"n": 99}, "n"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
    ],
)
def test_a_bad_field_is_refused_by_name_before_the_engine_hears_of_it(client, changes, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **changes)

    assert caught.value.param == param


def test_what_the_engine_refuses_comes_back_in_our_form(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "a b c d " * 100)

    assert caught.value.body["type"] == "invalid_request_error"
    assert "exceed" in caught.value.body["message"]


def test_a_model_of_another_name_is_not_found_and_the_served_one_is_listed(client):
    with pytest.raises(openai.NotFoundError):
        complete(client, model="other")
    (model,) = client.models.list().data

    assert (model.id, model.max_model_len) == ("model", 64)


def test_a_key_is_needed_at_the_door_and_at_the_engine_behind_it(endpoint):
    engine = engine_of(endpoint)
    (port,) = [each.laddr.port for each in engine.net_connections("tcp") if not each.raddr]

    with pytest.raises(openai.AuthenticationError):
        complete(endpoint.client("wrong"))
    behind = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"})

    assert behind.status_code == 401
    assert not any(KEY in word or "LLAMA_KEY" in word for word in engine.cmdline())


def test_more_requests_than_may_wait_are_refused_and_the_others_answered(endpoint, client):
    engine = engine_of(endpoint)
    engine.suspend()
    try:
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(outcome, client, max_tokens=50) for _ in range(12)]
            until(lambda: sum(each.done() for each in asked) == 4, "nobody is refused")
            engine.resume()
            ends = [each.result(timeout=600) for each in asked]
    finally:
        engine.resume()

    assert ends.count("RateLimitError") == 4
    assert ends.count("length") + ends.count("stop") == 8


def test_a_client_that_goes_is_counted_and_frees_its_place(endpoint):
    before = endpoint.figure("slipway_requests_cancelled_total")
    url, headers = f"{endpoint.address()}/v1/completions", {"Authorization": f"Bearer {KEY}"}
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 50, "n": 4}

    engine_of(endpoint).suspend()
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(url, json=body, headers=headers, timeout=0.3)
    engine_of(endpoint).resume()

    until(
        lambda: endpoint.figure("slipway_requests_cancelled_total") == before + 4,
        "the client is still waited for",
    )
    assert complete(endpoint.client()).choices


def test_the_engines_own_figures_are_read_into_ours_and_shown_beside_them(endpoint, client):
    before = endpoint.figure("slipway_output_tokens_total")
    complete(client, max_tokens=10)

    until(
        lambda: endpoint.figure("slipway_output_tokens_total") >= before + 10,
        "the tokens are not counted",
    )
    assert endpoint.figure("llamacpp:tokens_predicted_total") >= 10


@pytest.mark.faults
def test_a_killed_engine_gives_clean_errors_and_is_started_again(start, spec):
    with start("relayed-killed", spec) as endpoint, ThreadPoolExecutor(9) as pool:
        client = endpoint.client()
        first = engine_of(endpoint)
        first.suspend()  # so that all of them are under way
        asked = [pool.submit(outcome, client, max_tokens=50) for _ in range(9)]
        until(lambda: sum(each.done() for each in asked) == 1, "there is no load")
        first.kill()

        ends = [each.result(timeout=600) for each in asked]
        until(lambda: endpoint.get("/health").status_code == 200, "no restart")

        assert sorted(set(ends)) == ["InternalServerError", "RateLimitError"], ends
        assert complete(client).choices[0].finish_reason
        assert engine_of(endpoint).pid != first.pid
        assert [each["name"] for each in endpoint.said("phase")].count("Serving") == 2


@pytest.mark.faults
def test_an_engine_that_ends_again_and_again_ends_the_job_by_name(start, spec):
    with start("relayed-lost", spec) as endpoint:
        ended = kill_until_given_up(endpoint)

    assert classify(Ending(ended.returncode, None, ended.stderr)) is Reason.ENGINE_LOST
    assert "llama.cpp's server" in ended.stderr


def test_it_stops_when_nobody_asks_and_leaves_its_figures(start, spec):
    idle = spec.model_copy(update={"idle_stop_seconds": 1.0})
    with start("relayed-idle", idle) as endpoint:
        ended = endpoint.end()

    (result,) = ended.bodies("result")
    assert ended.returncode == 0, ended.stderr
    assert result["notes"]["ended"].startswith("idle")
    assert result["measured"]["peak_memory_bytes"] > 10_000_000


def test_a_stop_ends_the_engine_and_all_that_it_started(start, spec):
    with start("relayed-stopped", spec) as endpoint:
        complete(endpoint.client())
        engine = engine_of(endpoint)
        endpoint.process.send_signal(signal.SIGTERM)
        ended = endpoint.end()

    assert ended.returncode == -signal.SIGTERM
    assert not psutil.pid_exists(engine.pid)


def test_a_job_that_is_killed_takes_its_engine_with_it(start, spec):
    with start("relayed-orphan", spec) as endpoint:
        endpoint.address()
        engine = engine_of(endpoint)
        endpoint.process.kill()
        endpoint.end()

    engine.wait(10)


def test_an_engine_that_does_not_start_is_told_in_its_own_words(start, spec, tmp_path):
    (broken := tmp_path / "broken.gguf").write_bytes(os.urandom(64))
    with start("relayed-broken", spec, LLAMA_FILE=str(broken)) as endpoint:
        ended = endpoint.end()

    assert ended.returncode == 3
    assert "BAD_INPUT: llama.cpp's server does not start with this model" in ended.stderr
