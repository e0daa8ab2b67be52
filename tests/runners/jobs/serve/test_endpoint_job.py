"""An endpoint's life as a job: before it is ready, its ends, kills under load, bad input."""

import asyncio
import socket

import httpx
import pytest

from runners.jobs.runtime import BadInputError
from runners.jobs.serve.endpoint import listening
from runners.jobs.serve.openai_server import OpenAIServer, Service
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
