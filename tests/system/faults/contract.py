"""schemathesis against a running product: its own program, every phase, one caller at a time.

A product, things in it that a caller may know, and ``python -m schemathesis.cli`` with them. Each
run ends by itself: a caller is sent to the operations that are its own, below the product's limit
of calls (``webapp/core/pace.py``), so that an answer is the operation's and not 429.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from runners.host import enrolment
from runners.shared.config import HostDir
from tests.stack import ROOT, ApiClient, wait_for
from tests.system.faults.parts import Desk
from tests.system.faults.site import Site

PHASES = "examples,coverage,fuzzing,stateful"
# What the document promises of an answer: no fault, and nothing that it does not name.
PROMISES = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance",
)  # fmt: skip
HOOKS = "tests.system.faults.contract_hooks"
CONFIG = Path(__file__).with_name("schemathesis.toml")
KNOWN, SHARE, ANSWERS = "SLIPWAY_TEST_KNOWN", "SLIPWAY_TEST_SHARE", "SLIPWAY_TEST_ANSWERS"
LONGEST_S = 1500  # of one run; each is to end in about 900
# Operations that only a host's credential opens, and enrolment, which none needs.
OF_HOSTS = r"^/api/v1/(hosts/(beat|echo|enroll|rotate)$|attempts/|copies/)"
# Their requests hold whole models, clusters and strategies: 6,300 coverage cases.
OF_PLANNER = r"^/api/v1/planner/"
# What is taken of these ends the credential of all calls that follow.
ROTATE, REVOKE = "/api/v1/hosts/rotate", "/api/v1/tokens/{token_id}"
DOCUMENT = """
import json
from webapp.api.urls import api
print("DOCUMENT" + json.dumps(api.get_openapi_schema()))
"""


class Caller(NamedTuple):
    """Who calls: the headers of every request, the calls a second, the operations."""

    name: str
    headers: dict[str, str]
    rate: str
    operations: tuple[str, ...]
    own: str  # an operation that answers 200 as long as the credential is one
    examples: int = 10  # fuzzing cases of an operation
    share: int = 1  # one in so many coverage cases of bodies is sent; the seed chooses


class Run(NamedTuple):
    """What a run of schemathesis came to."""

    code: int
    printed: str
    answers: dict[str, Counter[str]]  # operation -> status -> number

    @property
    def statuses(self) -> Counter[str]:
        return sum(self.answers.values(), Counter())

    @property
    def summary(self) -> str:
        """Return the last part of what schemathesis printed, and the answers by status."""
        _, _, after = self.printed.rpartition(" SUMMARY ")
        words = re.sub(r"\n{2,}", "\n", after).strip("=\n ")
        return f"{words}\n{dict(sorted(self.statuses.items()))}"


def begin(folder: Path, **environment: str) -> Site:
    """Return a running product, at the pace of real ones."""
    site = Site(folder, **environment)
    site.environment["SLIPWAY_TIME_SCALE"] = "1"
    site.start()
    site.desk.close()
    site.desk = Desk(site.environment, site.logs / "desk.log", "tests.system.faults.more_calls")
    return site


def host_without_agent(site: Site, name: str) -> None:
    """Enrol a host for which nobody speaks but whoever has its credential."""
    folder = site.folder / "hosts" / name
    enrolment.enroll(HostDir(folder), site.base_url, site.desk.token(name=name), name)
    site.hosts[name] = folder
    site.desk.measured(slug=name)


def beat(site: Site, host: str) -> httpx.Response:
    """Send a heartbeat in a host's place."""
    body = {
        "boot_id": "boot-1", "sent_at_ms": int(time.time() * 1000), "agent_version": "0.1",
        "cpu_utilization": 0.1, "memory_available_bytes": 2**33, "disk_free_bytes": 2**36,
    }  # fmt: skip
    return site.call(host, "/hosts/beat", body)


def known_things(site: Site, host: str) -> dict[str, Any]:
    """Make things of every kind that an address names; return what a caller may know of them."""
    beat(site, host).raise_for_status()
    job = site.submit(host, steps=5)
    attempt = wait_for(lambda: site.attempt(job), "an attempt")
    claim = {"fence": attempt["fence"], "claim_id": "folder-1", "boot_id": "boot-1"}
    site.call(host, f"/attempts/{attempt['id']}/claim", claim).raise_for_status()
    return dict(site.desk.things(job=job))


def callers(site: Site, host: str) -> list[Caller]:
    """Return a caller of each kind, logged in where it can be."""
    olga = ApiClient(site.port, "olga")
    cookies = "; ".join(f"{name}={value}" for name, value in olga.cookies.items())
    credential, token = site.credential(host)["credential"], site.desk.person_token(name="olga")
    of_people = ("--exclude-path-regex", f"{OF_HOSTS}|{OF_PLANNER}")
    return [
        Caller(
            "host", {"Authorization": f"Bearer {credential}"}, "60/s",
            ("--include-path-regex", OF_HOSTS, "--exclude-path", ROTATE), "/hosts/echo", 30,
            share=4,  # enrolments and heartbeats have 3,000 cases, and low limits
        ),
        Caller(
            "person", {"Cookie": cookies, "X-CSRFToken": olga.csrf_token}, "18/s", of_people,
            "/me", share=8,  # what a token's run sends, by another way in
        ),
        Caller(
            "token", {"Authorization": f"Bearer {token}"}, "18/s",
            (*of_people, "--exclude-path", REVOKE), "/me", share=2,
        ),
        Caller("nobody", {}, "60/s", (), "", 10, share=20),  # refused before a body is read
    ]  # fmt: skip


def is_known(site: Site, caller: Caller) -> bool:
    """Tell whether the product still knows a caller: else the rest of its run was of nobody."""
    method = "POST" if caller.name == "host" else "GET"
    url = f"{site.base_url}/api/v1{caller.own}"
    return httpx.request(method, url, headers=caller.headers, trust_env=False).is_success


def document(site: Site) -> Path:
    """Write the API's document beside the product and return its file."""
    printed = site.run("manage.py", "shell", "-v", "0", "-c", DOCUMENT)
    path = site.folder / "openapi.json"
    path.write_text(printed[printed.index("DOCUMENT") + len("DOCUMENT") :])
    return path


def command(site: Site, caller: Caller) -> list[str]:
    """Return the command line of a whole run as one caller."""
    headers = [part for each in caller.headers.items() for part in ("-H", ": ".join(each))]
    return [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG),
        "run", str(site.folder / "openapi.json"),
        "--url", site.base_url, "--phases", PHASES, "--checks", ",".join(PROMISES),
        "--mode", "all", "--rate-limit", caller.rate, "--request-timeout", "60",
        "--max-examples", str(caller.examples),
        "--continue-on-failure", "--generation-database", "none", *headers, *caller.operations,
    ]  # fmt: skip


def run(site: Site, caller: Caller, known: dict[str, Any], seed: int) -> Run:
    """Run schemathesis to its end."""
    files = {name: site.folder / f"{name}.json" for name in ("known", "answers")}
    files["known"].write_text(json.dumps(known))
    environment = site.environment | {
        "SCHEMATHESIS_HOOKS": HOOKS, KNOWN: str(files["known"]), ANSWERS: str(files["answers"]),
        SHARE: f"{seed % caller.share}/{caller.share}", "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1",
    }  # fmt: skip
    printed = site.logs / "schemathesis.log"
    with printed.open("wb") as log:
        done = subprocess.run(
            [*command(site, caller), "--seed", str(seed)], cwd=site.folder, env=environment, stdout=log,
            stderr=subprocess.STDOUT, check=False, timeout=LONGEST_S,
        )  # fmt: skip
    answers = json.loads(files["answers"].read_text())
    counted = {name: Counter(each) for name, each in answers.items()}
    return Run(done.returncode, printed.read_text("utf-8", "replace"), counted)
