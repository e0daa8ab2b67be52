"""An endpoint's life as a job: before it is ready, its ends, kills under load, bad input."""

import asyncio
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest

from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobs.serve.endpoint import listening
from runners.jobs.serve.job import work
from runners.jobs.serve.openai_server import OpenAIServer
from runners.jobs.serve.service import Service
from runners.jobspec import RandomModel, ServeSpec
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.harness import Finished
from tests.system.jobs.serve.serving import serving, until

RANDOM = RandomModel(config=TINY_CONFIG)


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


@pytest.fixture(scope="module")
def spec(trained_model):
    return ServeSpec(model=trained_model, max_concurrency=2, port=free_port())


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


@pytest.mark.parametrize("state", ["loading", "draining"])
def test_while_it_loads_or_ends_it_says_so_and_when_to_come_again(state):
    service = Service(ServeSpec(model=RANDOM))
    service.state = state

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(OpenAIServer(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "model", "prompt": "a"}
            return [await client.post("/v1/completions", json=body), await client.get("/health")]

    answer, health = asyncio.run(ask())

    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == state
    assert (health.status_code, health.json()) == (503, {"status": state})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/models", 405), ("GET", "/v1/embeddings", 404), ("GET", "/v1/models/x", 404)],
)
def test_an_address_that_is_not_there_is_refused_in_openais_form(method, path, status):
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(OpenAIServer(Service(ServeSpec(model=RANDOM))))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path)

    answer = asyncio.run(ask())

    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole():
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(OpenAIServer(Service(ServeSpec(model=RANDOM))))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", content=b" " * (5 * 1024**2))

    assert asyncio.run(ask()).status_code == 413


def test_a_model_that_reads_no_text_ends_the_job_by_name(host):
    with pytest.raises(MissingModelError, match=r"no tokenizer\.json, which an endpoint needs"):
        host.run_here("serve-no-tokenizer", ServeSpec(model=RANDOM), work)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 65}, "max_length is 65, but the model knows 64 positions"),
        ({"kv_cache_tokens": 63}, "kv_cache_tokens is 63, less than one request of 64 tokens"),
    ],
)
def test_what_the_model_cannot_hold_is_refused_with_the_limit(
    host, trained_model, fields, message
):
    spec = ServeSpec(model=trained_model, **fields)

    with pytest.raises(BadInputError, match=message):
        host.run_here(f"serve-refused-{next(iter(fields))}", spec, work)


def test_each_token_is_sent_at_once():
    async def option() -> int:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_reader, writer) -> None:
            found = writer.get_extra_info("socket")
            told.set_result(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        door = listening(ServeSpec(model=RANDOM))
        async with await asyncio.start_server(accepted, sock=door):
            _, client = await asyncio.open_connection(*door.getsockname())
            async with asyncio.timeout(60):
                found = await told
            client.close()
            return found

    assert asyncio.run(option()) == 1


def test_a_port_that_somebody_has_is_refused_by_its_number():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        spec = ServeSpec(model=RANDOM, port=taken.getsockname()[1])

        with pytest.raises(BadInputError, match=f"port {spec.port}.*choose another port"):
            listening(spec)
