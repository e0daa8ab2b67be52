"""An endpoint before it is ready and at its ends, and what it measures of itself."""

import asyncio
import socket

import httpx
import pytest

from runners.jobs.runtime import BadInputError
from runners.jobs.serve.endpoint import bind_socket
from runners.jobs.serve.figures import TTFT_BOUNDS, EndpointMetrics, Histogram
from runners.jobs.serve.openai_server import OpenAIServer, ServiceState
from runners.jobspec import RandomModel, ServeSpec
from tests.runners.jobs.tiny import TINY_CONFIG

RANDOM = RandomModel(config=TINY_CONFIG)


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


@pytest.fixture(scope="module")
def spec(trained_model):
    return ServeSpec(model=trained_model, max_concurrency=2, port=free_port())


def asked(service: ServiceState, method: str, path: str, **sent) -> httpx.Response:
    """Return the answer of a service's server to one request."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(OpenAIServer(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **sent)

    return asyncio.run(ask())


def test_while_it_loads_or_ends_it_says_so_and_when_to_come_again():
    service = ServiceState(ServeSpec(model=RANDOM), print)
    for state in ("loading", "draining"):
        service.state = state

        answer = asked(service, "POST", "/v1/completions", json={"model": "model", "prompt": "a"})
        health = asked(service, "GET", "/health")

        assert answer.status_code == 503, state
        assert answer.headers["retry-after"], state
        assert answer.json()["error"]["code"] == state
        assert (health.status_code, health.json()) == (503, {"status": state})


def test_an_address_that_is_not_there_is_refused_in_openais_form():
    for method, path, status in (
        ("POST", "/v1/models", 405),
        ("GET", "/v1/rerank", 405),
        ("GET", "/v1/score", 404),
        ("GET", "/v1/models/x", 404),
    ):
        answer = asked(ServiceState(ServeSpec(model=RANDOM), print), method, path)
        assert answer.status_code == status, path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, path


def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole():
    service = ServiceState(ServeSpec(model=RANDOM), print)
    answer = asked(service, "POST", "/v1/completions", content=b" " * (5 * 1024**2))
    assert answer.status_code == 413


def test_each_token_is_sent_at_once():
    async def option() -> int:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_reader, writer) -> None:
            found = writer.get_extra_info("socket")
            told.set_result(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        door = bind_socket(ServeSpec(model=RANDOM))
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
            bind_socket(spec)


# What an endpoint measures of itself, over its life and since it was asked last.


def histogram(*values: float) -> Histogram:
    found = Histogram(TTFT_BOUNDS)
    for value in values:
        found.add(value)
    return found


def test_a_percentile_lies_in_the_bucket_of_its_rank_and_is_exact_at_a_bound():
    for values, percent, low, high in (
        ([0.3] * 100, 95, 0.25, 0.5),
        ([0.3] * 94 + [2.0] * 6, 95, 1.0, 2.5),
        ([0.3] * 95 + [2.0] * 5, 95, 0.25, 0.5),
        ([100.0], 50, 60.0, 60.0),
    ):
        assert low <= histogram(*values).percentile(percent) <= high, (values, percent)

    for within in range(90, 101):
        found = histogram(*[0.8] * within, *[1.2] * (100 - within))
        assert (found.percentile(95) <= 1.0) == (within >= 95)


def test_the_points_of_the_life_end_as_the_result_and_nobody_leaves_no_time():
    figures = EndpointMetrics()
    for seconds in (0.1, 0.2, 0.9):
        figures.first_token(seconds, 10)
        figures.later_token(0.02)
    figures.step(2.0, 30, {})
    point, result = figures.since_last(1.0), figures.result_metrics()
    assert point["answered_requests"] == 3
    assert point["ttft_mean_seconds"] == result["ttft_seconds"] == pytest.approx(0.4)
    assert point["ttft_p95_seconds"] == result["ttft_p95_seconds"]
    assert point["tpot_p95_seconds"] == result["tpot_p95_seconds"]
    assert point["busy_tokens_per_second"] == result["tokens_per_second"] == 15.0

    found = EndpointMetrics().since_last(1.0)
    assert found["answered_requests"] == 0
    assert not any(name.startswith(("ttft", "tpot")) for name in found)
