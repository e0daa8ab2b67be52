"""A deployment on a real site and host: woken, counted, killed, rolled and revoked under load."""

import asyncio
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.hub.hub_server import Hub
from tests.stack import HOST_SLUG, Stack, wait_for
from tests.system.clocks import Clock
from tests.system.webapp.test_by_name import Site, hub_variables, repositories, site  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DOCUMENT = {
    "goal": "serve",
    "model": "tiny/llama",
    "hardware": {"host": HOST_SLUG},
    "workload": {"input_tokens": 64, "output_tokens": 400, "concurrency": 32},
}
MESSAGES = [{"role": "user", "content": "A cache"}]
LONG = {"max_tokens": 400, "ignore_eos": True}
STORM, STREAMS = 100, 200
MOST_SECONDS = 20.0  # until a request is answered again, on a loaded machine
MIXED = [
    ("/chat/completions", {"messages": MESSAGES, "max_tokens": 8}),
    ("/completions", {"prompt": "A cache", "max_tokens": 8}),
    ("/responses", {"input": "A cache", "max_output_tokens": 8}),
    ("/messages", {"messages": MESSAGES, "max_tokens": 8}),
]


class Deployed:
    """A deployment of the site's person, and a key to it."""

    def __init__(
        self,
        site: Site,
        name: str = "tiny",
        model: str = "tiny/llama",
        *,
        launch: dict[str, Any] | None = None,
        workload: dict[str, int] | None = None,
        **key: Any,
    ) -> None:
        self.site, self.name = site, name
        self.base = f"{site.stack.base_url}/v1"
        launch = {"run": "endpoint", **(launch or {})}
        document = DOCUMENT | {"model": model, "launch": launch}
        document |= {"workload": workload} if workload else {}
        self.id = self.call("POST", "/deployments", {"name": name, "document": document})["id"]
        made = self.call("POST", "/serving-keys", {"name": "test", **key})
        self.key_id, self.key = made["id"], made["key"]
        self.headers = {"Authorization": f"Bearer {self.key}"}

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        alice = self.site.alice
        status, _, text = alice.request(
            method, f"/api/v1{path}", json.dumps(body) if body is not None else None,
            Content_Type="application/json", X_CSRFToken=alice.csrf_token,
        )  # fmt: skip
        assert status < 300, (status, text)
        return json.loads(text) if text else {}

    @property
    def now(self) -> dict[str, Any]:
        return self.call("GET", f"/deployments/{self.id}")

    @property
    def jobs(self) -> set[str]:
        return {each["job"] for each in self.now["replicas"]}

    def used(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in self.call("GET", "/usage")["items"]:
            found.update({name: row[name] for name in USED})
        return found

    async def ask(self, client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
        return await client.post(
            f"{self.base}{path}", json={"model": self.name, **body}, headers=self.headers
        )

    async def stream(
        self, client: httpx.AsyncClient, begun: asyncio.Semaphore | None = None, **more: Any
    ) -> AsyncIterator[str]:
        body = {"model": self.name, "messages": MESSAGES, "stream": True, **LONG, **more}
        request = client.stream(
            "POST", f"{self.base}/chat/completions", json=body, headers=self.headers
        )
        async with request as answer:
            assert answer.status_code == 200
            if begun is not None:
                begun.release()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")


USED = ("requests", "failed", "cut", "prompt_tokens", "completion_tokens")


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=STREAMS + 1, max_keepalive_connections=STREAMS)
    return httpx.AsyncClient(trust_env=False, timeout=240.0, limits=limits)


def usage_of(document: dict[str, Any]) -> tuple[int, int]:
    """Return prompt and completion tokens, by whatever names an API has for them."""
    found = document["usage"]
    prompt = found.get("prompt_tokens", found.get("input_tokens"))
    return prompt, found.get("completion_tokens", found.get("output_tokens"))


async def last_usage(answer: AsyncIterator[str]) -> tuple[int, int]:
    """Return the usage in the last event of a stream that has one."""
    found = (0, 0)
    async for line in answer:
        if line != "[DONE]" and json.loads(line).get("usage"):
            found = usage_of(json.loads(line))
    return found


def test_a_deployment_is_woken_counted_killed_rolled_and_revoked(site):
    deployed = Deployed(site)
    asyncio.run(storm(deployed))
    asyncio.run(mixed(deployed))
    asyncio.run(killed(deployed, "gateway"))
    asyncio.run(outlived(deployed))
    asyncio.run(killed(deployed, "host"))
    asyncio.run(rolled(deployed))
    asyncio.run(revoked(deployed))


async def storm(deployed: Deployed) -> None:
    """Wake it by many requests at once: one job, and an answer for each."""
    assert deployed.now["state"] == "asleep"
    async with client() as http:
        asking = [deployed.ask(http, *MIXED[at % 4]) for at in range(STORM)]
        answers = await asyncio.gather(*asking)
    assert {each.status_code for each in answers} == {200}, answers[0].text
    assert len(deployed.now["replicas"]) == 1
    with openai.OpenAI(base_url=deployed.base, api_key=deployed.key) as own:
        assert [each.id for each in own.models.list().data] == ["tiny"]


async def mixed(deployed: Deployed) -> None:
    """Compare what the clients count, whole and streamed, with the usage."""
    before, clients = settled(deployed), Counter()
    async with client() as http:
        answers = await asyncio.gather(*(deployed.ask(http, *MIXED[at % 4]) for at in range(60)))
        counted = [usage_of(each.json()) for each in answers]
        streams = (
            deployed.stream(http, max_tokens=20, stream_options={"include_usage": True})
            for _ in range(60)
        )
        counted += await asyncio.gather(*(last_usage(each) for each in streams))
    for prompt, completion in counted:
        clients.update(requests=1, prompt_tokens=prompt, completion_tokens=completion)
    assert settled(deployed) - before == clients


def settled(deployed: Deployed) -> Counter[str]:
    """Return the usage once two looks at it agree."""

    def agreed() -> Counter[str] | None:
        first = deployed.used()
        time.sleep(2.5)
        return first if deployed.used() == first else None

    return wait_for(agreed, "the usage to settle", every_s=0.1)


class Streams:
    """Many long streams of one deployment, and what their clients have seen of the usage."""

    def __init__(self, deployed: Deployed, http: httpx.AsyncClient, max_tokens: int = 400) -> None:
        self._deployed, self._http, self._max_tokens = deployed, http, max_tokens
        self.seen: dict[int, tuple[int, int]] = {}
        self.ends: Counter[str] = Counter()
        self._begun = asyncio.Semaphore(0)

    async def _read(self, number: int) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        more = {"max_tokens": self._max_tokens, "stream_options": options}
        last = ""
        with suppress(httpx.HTTPError):
            async for line in self._deployed.stream(self._http, self._begun, **more):
                last = line
                if line != "[DONE]" and (document := json.loads(line)).get("usage"):
                    self.seen[number] = usage_of(document)
        self.ends["whole" if last == "[DONE]" else "cut"] += 1

    async def begin(self) -> "asyncio.Future[list[None]]":
        """Return once the head of each answer is there."""
        going = asyncio.gather(*(self._read(number) for number in range(STREAMS)))
        for _ in range(STREAMS):
            await self._begun.acquire()
        return going

    @property
    def tokens(self) -> int:
        return sum(completion for _, completion in self.seen.values())


def kill_fork(stack: Stack) -> None:
    """End the process of the gateway that serves, as a crash would."""
    (fork,) = psutil.Process(stack.processes["gateway"].pid).children()
    fork.kill()


async def killed(deployed: Deployed, part: str) -> None:
    """Kill a part under streams: all end, each is counted once, new ones are answered."""
    before, stack = settled(deployed), deployed.site.stack
    async with client() as http, client() as other:
        streams = Streams(deployed, http)
        going = await streams.begin()
        if part == "gateway":
            kill_fork(stack)
        else:
            stack.kill(part)
            await asyncio.to_thread(stack.restart, part)
        killed_at, num_answered, status = time.monotonic(), 0, 0
        while status != 200:
            with suppress(httpx.HTTPError):
                status = (await deployed.ask(other, *MIXED[0])).status_code
                num_answered += 1
        seconds = time.monotonic() - killed_at
        assert seconds < MOST_SECONDS
        await going
    after = settled(deployed) - before
    assert streams.ends["cut"] >= STREAMS / 2
    assert after["requests"] == STREAMS + num_answered
    assert after["completion_tokens"] >= streams.tokens
    assert streams.ends["cut"] >= after["cut"] >= 1


async def outlived(deployed: Deployed) -> None:
    """Kill and restart the web process: every stream comes to its end, and is counted whole."""
    before, stack = settled(deployed), deployed.site.stack
    async with client() as http:
        streams = Streams(deployed, http, max_tokens=40)
        going = await streams.begin()
        stack.kill("web")
        assert (await deployed.ask(http, *MIXED[0])).status_code == 200
        await asyncio.to_thread(stack.restart, "web")
        await going
    assert streams.ends == {"whole": STREAMS}
    after = settled(deployed) - before
    assert (after["requests"], after["cut"], after["failed"]) == (STREAMS + 1, 0, 0)
    assert streams.tokens < after["completion_tokens"] <= streams.tokens + 8


async def rolled(deployed: Deployed) -> None:
    """Change it while it serves: no request fails."""
    failed: list[int] = []
    async with client() as http:
        going = True

        async def ask_on() -> int:
            count = 0
            while going:
                answer = await deployed.ask(http, *MIXED[0])
                failed.extend([answer.status_code] if answer.status_code != 200 else [])
                count += 1
            return count

        asking = [asyncio.create_task(ask_on()) for _ in range(4)]
        old = deployed.jobs
        changed = {"launch": {"priority": "low"}}
        await asyncio.to_thread(deployed.call, "PATCH", f"/deployments/{deployed.id}", changed)

        def is_new() -> bool:
            serving = [each for each in deployed.now["replicas"] if each["ready_at"]]
            return bool(serving) and not old & {each["job"] for each in serving}

        await asyncio.to_thread(wait_for, is_new, "the new version", every_s=0.5)
        going = False
        counts = await asyncio.gather(*asking)
    assert (failed, min(counts) > 0) == ([], True)


async def revoked(deployed: Deployed) -> None:
    """Revoke the key in the middle of a stream: it ends with an error, and nothing is let in."""
    async with client() as http:
        lines: list[str] = []
        async for line in deployed.stream(http):
            lines.append(line)
            if len(lines) == 2:
                path = f"/serving-keys/{deployed.key_id}"
                await asyncio.to_thread(deployed.call, "DELETE", path)
        assert "revoked" in lines[-1]
        assert (await deployed.ask(http, *MIXED[0])).status_code == 401


def test_clocks_that_are_set_under_streams_cut_none_and_end_no_replica(repositories, tmp_path):
    """The time of day of the host's agent, then of the site's processes, leaps by an hour."""
    noon = datetime.now(UTC).replace(hour=12)  # no leap reaches another day or month
    base = (noon - datetime.now(UTC)).total_seconds()
    clocks = {name: Clock(tmp_path / name, base) for name in ("host", "site")}
    with Hub(repositories) as hub:
        variables = hub_variables(hub, tmp_path) | clocks["site"].variables
        with Stack(tmp_path / "stack", **variables) as stack:
            stack.environment |= clocks["host"].variables
            stack.restart("host")
            deployed = Deployed(Site(stack, hub))
            for name, sign in (("host", 1), ("site", -1)):
                for leap in (3600, -3600, 0):
                    asyncio.run(leapt(deployed, clocks[name], base + leap, f"{name} {leap:+} s"))
                    ahead = sign * leap
                    wait_for(lambda ahead=ahead: abs(ahead_of(stack) - ahead) < 60, "the leap")


def ahead_of(stack: Stack) -> float:
    """Return the seconds that the site says its host's clock is ahead of its own."""
    with closing(sqlite3.connect(stack.folder / "slipway.sqlite3", timeout=60)) as rows:
        return float(rows.execute("select clock_offset_ms from hosts_host").fetchone()[0]) / 1000


async def leapt(deployed: Deployed, clock: Clock, seconds: float, words: str) -> None:
    """Set a clock under streams: each comes to its end and is counted; nothing is loaded anew."""
    async with client() as http:
        assert (await deployed.ask(http, *MIXED[0])).status_code == 200, words
        before, jobs = settled(deployed), deployed.jobs
        streams = Streams(deployed, http, max_tokens=40)
        going = await streams.begin()
        clock.set(seconds)
        answers = [await deployed.ask(http, *MIXED[at % 4]) for at in range(20)]
        refused = [each.text for each in answers if each.status_code != 200]
        assert refused == [], words
        await going
    assert streams.ends == {"whole": STREAMS}, words
    after = settled(deployed) - before
    assert (after["requests"], after["cut"], after["failed"]) == (STREAMS + 20, 0, 0), words
    assert (deployed.now["state"], deployed.jobs) == ("ready", jobs), words


def test_two_deployments_and_a_training_share_the_device_by_memory(site):
    both = [Deployed(site, name) for name in ("one", "two")]
    training = {
        "goal": "finetune",
        "model": "tiny/llama",
        "hardware": {"host": HOST_SLUG},
        "workload": {
            "method": "lora", "sequence_length": 128, "global_batch_size": 2, "tokens": 200_000,
        },
        "launch": {"shared": True},
    }  # fmt: skip

    async def ask() -> list[httpx.Response]:
        async with client() as http:
            return await asyncio.gather(*(each.ask(http, *MIXED[0]) for each in both))

    assert [each.status_code for each in asyncio.run(ask())] == [200, 200]
    job = both[0].call("POST", "/jobs", training)["job"]
    alone = both[0].call("POST", "/jobs", {**training, "launch": {}})["job"]
    wait_for(lambda: site.job(job)["state"] == "running", "the training to run beside them")
    assert [each.status_code for each in asyncio.run(ask())] == [200, 200]
    held = both[0].call("GET", f"/hosts/{HOST_SLUG}")["devices"][0]["jobs"]
    assert len(held) == 3
    assert site.job(alone)["state"] == "queued"  # until all have left
    assert site.ended(job)["state"] == "succeeded"
    for each in both:
        each.call("POST", f"/deployments/{each.id}/sleep")
    assert site.ended(alone)["state"] == "succeeded"
