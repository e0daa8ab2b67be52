"""An endpoint's life as a job: before it is ready, its ends, kills under load, bad input."""

import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest

from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobs.serve.own_backend import work
from runners.jobspec import FolderModel, ServeSpec
from tests.runners.jobs.serve.test_endpoint_job import (  # noqa: F401 -- some are fixtures
    RANDOM,
    free_port,
    spec,
)
from tests.system.jobs.harness import Finished
from tests.system.jobs.serve.serving import serving, until


@pytest.fixture(scope="module")
def killed(host, spec):
    """Kill an endpoint that sixteen clients wait for; return it and how each of them ended."""
    with serving(host, "serve-killed", spec) as endpoint, ThreadPoolExecutor(16) as pool:
        client = endpoint.client()
        asked = [pool.submit(ask_for_long, client, at) for at in range(16)]
        until(lambda: endpoint.figure("slipway_waiting_requests") > 8, "there is no load")
        endpoint.process.kill()
        return endpoint, [each.result(timeout=600) for each in asked]


class Life(NamedTuple):
    """An endpoint from its first answer to its end by a stop that came while it wrote."""

    first: str
    said: list
    last: str
    run: Finished


@pytest.fixture(scope="module")
def restarted(host, spec, killed) -> Life:
    with serving(host, "serve-restarted", spec) as endpoint, ThreadPoolExecutor(1) as pool:
        client = endpoint.client()
        found = client.completions.create(model="model", prompt="def", max_tokens=2)
        asked = pool.submit(ask_for_long, client, 0)
        until(
            lambda: asked.done() or endpoint.figure("slipway_running_requests") > 0, "nobody asks"
        )
        said = endpoint.said("endpoint")
        endpoint.process.send_signal(signal.SIGTERM)
        last = asked.result(timeout=600)
        return Life(found.choices[0].finish_reason, said, last, endpoint.end())


def ask_for_long(client, at) -> str:
    """Ask for all that fits, and say how it ended."""
    try:
        stream = client.completions.create(
            model="model", prompt=f"def f{at}", max_tokens=48, temperature=1, n=8, stream=True
        )
        return [chunk.choices[0].finish_reason for chunk in stream][-1]
    except Exception as error:
        return type(error).__name__


@pytest.mark.slow
def test_killed_under_load_no_client_hangs_and_those_cut_off_get_an_error(killed):
    endpoint, ends = killed

    errors = set(ends) - {"length", "stop"}
    assert endpoint.process.returncode == -signal.SIGKILL
    assert errors
    assert all("Timeout" not in error for error in errors)


@pytest.mark.slow
def test_a_restarted_endpoint_answers_at_the_same_address(killed, restarted):
    assert restarted.first in ("length", "stop")
    assert restarted.said == killed[0].said("endpoint")


@pytest.mark.slow
def test_told_to_stop_it_finishes_what_was_asked_and_ends_by_the_signal(restarted):
    run = restarted.run

    assert restarted.last in ("length", "stop")
    assert run.returncode == -signal.SIGTERM
    assert run.measured["requests"] >= 8
    assert run.measured["tokens_per_second"] > 0
    assert run.bodies("phase")[-1]["name"] == "Finishing open requests"


def ask_once(url: str, answers: list) -> None:
    """Ask as soon as it is ready."""

    def answered():
        try:
            asked = {"model": "model", "prompt": "def", "max_tokens": 9}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
        except httpx.TransportError:
            return None
        return answer if answer.status_code == 200 else None

    answers.append(until(answered, "it never answered").json())


def test_left_alone_it_ends_well_and_its_charts_have_the_planners_names(host, trained_model):
    spec = ServeSpec(model=trained_model, idle_stop_seconds=3, port=free_port())
    answers: list = []
    client = threading.Thread(target=ask_once, args=(f"http://127.0.0.1:{spec.port}", answers))
    client.start()

    run = host.run_here("serve-idle", spec, work)

    client.join()
    assert answers[0]["usage"]["completion_tokens"] <= 9
    assert run.bodies("result")[0]["notes"]["ended"] == "idle for 3 s"
    for name in ("ttft_seconds", "tpot_seconds", "tokens_per_second", "kv_cache_used_ratio"):
        assert run.metric(name), name
    assert run.metric("held_kv_cache_bytes")[0] > 0


def test_a_model_that_reads_no_text_ends_the_job_by_name(host):
    with pytest.raises(MissingModelError, match=r"no tokenizer\.json, which an endpoint needs"):
        host.run_here("serve-no-tokenizer", ServeSpec(model=RANDOM), work)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 65}, "max_length is 65, but the model has 64 positions"),
        ({"kv_cache_tokens": 63}, "kv_cache_tokens is 63, less than one request of 64 tokens"),
    ],
)
def test_what_the_model_cannot_hold_is_refused_with_the_limit(
    host, trained_model, fields, message
):
    spec = ServeSpec(model=trained_model, **fields)

    with pytest.raises(BadInputError, match=message):
        host.run_here(f"serve-refused-{next(iter(fields))}", spec, work)


def test_a_template_that_cannot_render_is_told_when_it_loads_and_asked(host, base, capsys):
    folder = host.path / "models" / "template-fails"
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}"
    )
    spec = ServeSpec(
        model=FolderModel(path="template-fails"), idle_stop_seconds=1, port=free_port()
    )
    url, answers = f"http://127.0.0.1:{spec.port}", []

    def ask() -> None:
        ask_once(url, answers)
        asked = {"model": "model", "messages": [{"role": "user", "content": "a"}]}
        answers.append(httpx.post(f"{url}/v1/chat/completions", json=asked))

    client = threading.Thread(target=ask)
    client.start()
    run = host.run_here("serve-template-fails", spec, work)
    client.join()

    logged = capsys.readouterr().out
    assert "chat template renders no conversation: TypeError: can only concatenate" in logged
    assert "POST /v1/chat/completions: 400 The model's chat template refuses" in logged
    assert answers[1].status_code == 400
    assert "TypeError: can only concatenate" in answers[1].json()["error"]["message"]
    assert run.measured["refused"] >= 1
