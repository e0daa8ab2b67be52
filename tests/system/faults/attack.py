"""A hostile host: what it can send by every way that it has, generated without end.

It has a true credential and true users of Redis, and may launch nothing. Each wire shape is a
sender of one or a few messages; ``Attack`` calls them in turn until every shape had its number
and the time is over.
"""

import itertools
import json
import random
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx
import redis

from runners.host.redis_access import ack_key, connect, events_key
from runners.shared.config import HostDir
from runners.shared.redis_address import pong_key
from tests.stack import StackError
from tests.system.faults.site import Site
from tests.webapp.conftest import EXIT_OK, STARTED
from tests.webapp.hosts.hostile import VALUES, endless
from tests.webapp.hosts.shapes import BODIES, heartbeat

BATCH = 20  # hostile events in one delivery
EXIT = "exited"
FIRST = 9_000_001  # stands for the number that is next
NUMBER = re.compile(r"\b9000(\d{3})\b")
TRIES = 20
CREDENTIALS = {"credential_hash": "0" * 64, "redis_secret_hash": "0" * 64}
CLAIM = {"fence": "FENCE", "claim_id": "folder-1", "boot_id": "boot-1"}
CHECK = {"name": "memory", "is_ok": True, "detail": "enough"}
WORDS = ("a", "b", "model", "", ".", "..", "../../x", "a/b/c", "a" * 300, "ä" * 200, "%00", "a%2Fb",
         "\\", " ", "-1", "0", "9" * 40, "null", "model/a", "x" * 3000, "🚢" * 70)  # fmt: skip
Send = Callable[[], int]


class Target:
    """The attempt that the host reports about, and the number that the server waits for."""

    def __init__(
        self,
        site: Site,
        host: str,
        *,
        beat: Callable[[], object],
        claim: Callable[[], object],
        end: Callable[[], object],
    ) -> None:
        self._site, self._host = site, host
        self._beat, self._claim, self._end = beat, claim, end
        self.attempt_id = self.fence = ""
        self.next_seq = 1
        self.sent = 0

    def renew(self) -> None:
        """End the present job, have an operator launch another, and report about that one."""
        if self.attempt_id:
            self._end()
        for _ in range(TRIES):
            with suppress(StackError):
                job = self._site.desk.submit(slug=self._host, spec={"steps": 5})
                for _ in range(TRIES):
                    self._beat()  # a silent host is given no job
                    if attempts := self._site.view(job)["attempts"]:
                        self.attempt_id, self.fence = attempts[-1]["id"], attempts[-1]["fence"]
                        self.next_seq, self.sent = 1, 0
                        self._claim()
                        return
                    time.sleep(0.3)
                self._site.desk.stop(job=job)
        raise StackError(f"no attempt for {self._host}")


class Attack:
    """One hostile host at work."""

    def __init__(self, site: Site, host: str, *, seed: int) -> None:
        self.site, self.host = site, host
        self.credential = HostDir(site.hosts[host]).credential()
        self.sent: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)  # that each shape's sending took
        self.answers: Counter[int] = Counter()
        self.failures: list[str] = []
        self.target = Target(
            site, host, beat=self._beat_well, claim=self._claim_well, end=self._end_well
        )
        self._chance = random.Random(seed)  # noqa: S311 (a test, not a secret)
        self._seeds = itertools.count(seed)
        self._lock = threading.Lock()
        self._tokens = 20
        self._token = ""
        self._http = httpx.Client(
            base_url=f"{site.base_url}/api/v1", timeout=60, trust_env=False,
            headers={"Authorization": f"Bearer {self.credential.credential}"},
        )  # fmt: skip
        self._worker = _client(self.credential.worker_url)
        self._shipper = _client(self.credential.shipper_url)

    def greet(self) -> None:
        """Say one valid word by each way, so that what the site loads for them is loaded."""
        self._beat_well()
        self.target.renew()
        whole = [self._event(kind, json.dumps(body)) for kind, body in BODIES]
        self._by_http(self._batch(whole))
        self._by_stream(self._batch([self._event("log", json.dumps(dict(BODIES)["log"]))]))

    def close(self) -> None:
        """End every connection."""
        self._http.close()
        self._worker.close()
        self._shipper.close()

    def run(self, *, seconds: float, num_messages: int) -> None:
        """Send from every shape, evenly over the time; go on until each had its number."""
        self.target.renew()
        groups = (
            self._heartbeats(),
            self._events(),
            self._calls(),
            self._enrolments(),
            self._keys(),
        )
        threads = [
            threading.Thread(target=self._drive, args=(shapes, seconds, num_messages), daemon=True)
            for shapes in groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _drive(self, shapes: dict[str, Send], seconds: float, num_messages: int) -> None:
        started = time.monotonic()
        while True:
            elapsed = time.monotonic() - started
            behind = [name for name in shapes if self.sent[name] < num_messages]
            if elapsed >= seconds and not behind:
                return
            due = num_messages * elapsed / seconds  # beyond the number it goes on until the end
            name = min(shapes, key=lambda one: self.sent[one])
            if self.sent[name] > due:
                time.sleep(0.02)
                continue
            self._one(name, shapes[name])

    def _one(self, name: str, send: Send) -> None:
        started = time.monotonic()
        try:
            num = send()
        except (httpx.HTTPError, redis.RedisError, StackError) as error:
            num = 1
            with self._lock:
                self.failures = [*self.failures, f"{name}: {type(error).__name__} {error}"][-50:]
        with self._lock:
            self.sent[name] += num
            self.seconds[name] += time.monotonic() - started

    def _call(self, method: str, path: str, **rest: Any) -> httpx.Response:
        answer = self._http.request(method, path, **rest)
        with self._lock:
            self.answers[answer.status_code] += 1
        return answer

    def _post(self, path: str, body: str) -> httpx.Response:
        content = body.encode("utf-8", "surrogatepass")
        headers = {"Content-Type": "application/json"}
        return self._call("POST", path, content=content, headers=headers)

    def _variants(self, message: dict[str, Any]) -> Iterator[str]:
        return endless(message, next(self._seeds))

    # Heartbeats

    def _heartbeats(self) -> dict[str, Send]:
        said = self._variants(heartbeat())
        return {"heartbeat": lambda: self._beat(next(said))}

    def _beat_well(self) -> None:
        self._post("/hosts/beat", json.dumps(heartbeat()))

    def _claim_well(self) -> None:
        self._simple(f"/attempts/{self.target.attempt_id}/claim", json.dumps(CLAIM))

    def _end_well(self) -> None:
        """End the present attempt; the first answer may only say which number is next."""
        words = [("started", STARTED), (EXIT, EXIT_OK)]
        for _ in range(2):
            self._by_http(self._batch([self._event(kind, json.dumps(one)) for kind, one in words]))

    def _beat(self, body: str) -> int:
        self._wait(self._post("/hosts/beat", body))
        if self.sent["heartbeat"] % 5 == 0:  # else the server gives it nothing to report about
            self._beat_well()
        return 1

    def _wait(self, answer: httpx.Response) -> None:
        """Wait as long as the server asks: what is refused for its pace shows nothing."""
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            time.sleep(min(5.0, float(answer.headers.get("Retry-After", 1))))

    # Events by both ways

    def _events(self) -> dict[str, Send]:
        bodies = [*BODIES, (EXIT, EXIT_OK | {"last_lines": ["bye"]})]
        found: dict[str, Send] = {}
        for way in (self._by_http, self._by_stream):
            where = way.__name__.removeprefix("_by_")
            for kind, body in dict(bodies).items():
                variants = self._variants(body)
                found[f"{kind} by {where}"] = self._sender(way, kind, variants)
            whole = [self._event(kind, json.dumps(body)) for kind, body in bodies[:-1]]
            batch = json.loads(self._batch(whole))
            found[f"batch by {where}"] = self._sender(way, "", self._variants(batch))
        return found

    def _sender(self, way: Callable[[str], None], kind: str, variants: Iterator[str]) -> Send:
        def send() -> int:
            if self.target.sent >= (3 if kind == EXIT else 200):
                self.target.renew()
            self.target.sent += 1
            if not kind:
                way(next(variants))
                return 1
            texts = [next(variants) for _ in range(BATCH)]
            readable = [text for text in texts if _is_json(text)]
            if readable:
                way(self._batch([self._event(kind, text) for text in readable]))
            for text in texts:
                if text not in readable:
                    way(self._batch([self._event(kind, text)]))
            return BATCH

        return send

    def _event(self, kind: str, body: str) -> str:
        return f'{{"seq": SEQ, "t_ms": 1700000000000, "kind": "{kind}", "body": {body}}}'

    def _batch(self, events: list[str]) -> str:
        numbered = [event.replace("SEQ", str(FIRST + at), 1) for at, event in enumerate(events)]
        ids = f'"attempt_id": "ATTEMPT", "fence": "FENCE", "events": [{", ".join(numbered)}]'
        return f"{{{ids}}}"

    def _filled(self, batch: str) -> str:
        target = self.target
        text = batch.replace("ATTEMPT", target.attempt_id).replace("FENCE", target.fence)
        return NUMBER.sub(lambda found: str(target.next_seq + int(found[1]) - 1), text)

    def _by_http(self, batch: str) -> None:
        answer = self._post(f"/attempts/{self.target.attempt_id}/events", self._filled(batch))
        if answer.status_code == httpx.codes.OK:
            self.target.next_seq = answer.json()["acked_seq"] + 1
        self._wait(answer)

    def _by_stream(self, batch: str) -> None:
        text = self._filled(batch)
        fields = {"a": self.target.attempt_id, "f": self.target.fence}
        fields["b"] = text.partition('"events": ')[2].removesuffix("}") or text
        if not text.startswith('{"attempt_id": "'):
            fields["a"] = text[:200]
        entry = {name: value.encode("utf-8", "surrogatepass") for name, value in fields.items()}
        host = self.credential.host_id
        for key in (events_key(host), ack_key(host)):
            with suppress(redis.RedisError):  # of another kind of value just then
                if key == events_key(host):
                    self._shipper.xadd(key, entry)  # type: ignore[arg-type]  # dict is invariant
                elif acked := self._shipper.hget(key, self.target.attempt_id):
                    self.target.next_seq = max(self.target.next_seq, int(acked) + 1)
        time.sleep(0.01)

    # Other calls

    def _calls(self) -> dict[str, Send]:
        claims, rotations = (
            self._variants(CLAIM | {"checks": [CHECK]}),
            self._variants(CREDENTIALS),
        )
        return {
            "claim": lambda: self._simple(
                f"/attempts/{self.target.attempt_id}/claim", next(claims)
            ),
            "rotate": lambda: self._simple("/hosts/rotate", next(rotations)),
            "artefact part": lambda: self._artefact("PUT"),
            "artefact state": lambda: self._artefact("GET"),
            "training data": self._data,
            "echo": self._echo,
        }

    def _simple(self, path: str, body: str) -> int:
        self._wait(self._post(path, self._filled(body)))
        return 1

    def _word(self) -> str:
        return quote(self._chance.choice(WORDS), safe="%/" if self._chance.random() < 0.3 else "")

    def _artefact(self, method: str) -> int:
        attempt = self.target.attempt_id if self._chance.random() < 0.8 else self._word()
        name = "model" if self._chance.random() < 0.7 else self._word()
        query = f"?offset={self._word()}" if method == "PUT" else ""
        content = self._chance.randbytes(self._chance.choice((0, 1, 3, 5000)))
        self._call(method, f"/attempts/{attempt}/artefacts/{name}/{self._word()}{query}",
                   content=content if method == "PUT" else None)  # fmt: skip
        return 1

    def _data(self) -> int:
        self._call("GET", f"/attempts/{self.target.attempt_id}/data/{self._word()}")
        return 1

    def _echo(self) -> int:
        content = self._chance.choice(VALUES).encode("utf-8", "surrogatepass")
        self._call("POST", f"/hosts/echo?num_bytes={self._word()}", content=content)
        return 1

    def _enrolments(self) -> dict[str, Send]:
        facts = heartbeat()["facts"]
        ask = {"token": "TOKEN", "protocol_version": 1, "name": "Hostile", "facts": facts,
               "host_id": self.credential.host_id, "sent_at_ms": 1_700_000_000_000}  # fmt: skip
        variants = self._variants({name: one for name, one in ask.items() if name != "host_id"})
        return {"enrol": lambda: self._enrol(next(variants))}

    def _enrol(self, body: str) -> int:
        if not self._token and self._tokens:
            self._tokens -= 1
            self._token = self.site.desk.token(name="Hostile")
        answer = self._post("/hosts/enroll", body.replace("TOKEN", self._token))
        if answer.status_code == httpx.codes.OK:
            self._token = ""
        self._wait(answer)
        return 1

    # Redis

    def _keys(self) -> dict[str, Send]:
        host = self.credential.host_id
        keys = [events_key(host), ack_key(host), pong_key(host), f"host:{host}:jobs"]
        return {"pong": lambda: self._pong(pong_key(host)), "key": lambda: self._replace(keys)}

    def _pong(self, key: str) -> int:
        with suppress(redis.ResponseError):
            text = self._chance.choice(VALUES).encode("utf-8", "surrogatepass")
            self._worker.rpush(key, text)
            if self._worker.llen(key) > 1000:
                self._worker.delete(key)
        return 1

    def _replace(self, keys: list[str]) -> int:
        """Now and then make one of the host's keys another kind of value, then take it away."""
        if self._chance.random() < 0.9:
            return 1
        key = self._chance.choice(keys)
        with suppress(redis.ResponseError):
            self._worker.delete(key)
            if self._chance.random() < 0.5:
                self._worker.set(key, "x")
            else:
                self._worker.zadd(key, {"x": 1.0})
        time.sleep(0.1)
        with suppress(redis.ResponseError):
            self._worker.delete(key)
        return 1


def _client(url: str | None) -> redis.Redis:
    if url is None:
        raise StackError("the host has no Redis")
    return connect(url, None, socket_timeout=30)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
