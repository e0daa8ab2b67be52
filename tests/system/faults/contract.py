"""schemathesis against a running product: its own program, every phase, one caller at a time.

A product, things in it that a caller may know, and ``python -m schemathesis.cli`` with them.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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
KNOWN = "SLIPWAY_TEST_KNOWN"  # names the file of what a caller knows
ROTATE = "/api/v1/hosts/rotate"  # one that is taken ends the credential of all that follow
STREAM = "/api/v1/jobs/{job_id}/stream"  # of a job that runs it has no end
DOCUMENT = """
import json
from webapp.api.urls import api
print("DOCUMENT" + json.dumps(api.get_openapi_schema()))
"""


class Caller(NamedTuple):
    """Who calls: the headers that every request carries."""

    name: str
    headers: dict[str, str]


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


def known_things(site: Site, host: str) -> dict[str, Any]:
    """Make things of every kind that an address names; return what a caller may know of them."""
    beat = {
        "boot_id": "boot-1", "sent_at_ms": int(time.time() * 1000), "agent_version": "0.1",
        "cpu_utilization": 0.1, "memory_available_bytes": 2**33, "disk_free_bytes": 2**36,
    }  # fmt: skip
    site.call(host, "/hosts/beat", beat).raise_for_status()
    job = site.submit(host, steps=5)
    attempt = wait_for(lambda: site.attempt(job), "an attempt")
    claim = {"fence": attempt["fence"], "claim_id": "folder-1", "boot_id": "boot-1"}
    site.call(host, f"/attempts/{attempt['id']}/claim", claim).raise_for_status()
    return dict(site.desk.things(job=job))


def callers(site: Site, host: str) -> list[Caller]:
    """Return a caller of each kind, logged in where it can be."""
    olga = ApiClient(site.port, "olga")
    cookies = "; ".join(f"{name}={value}" for name, value in olga.cookies.items())
    return [
        Caller("host", {"Authorization": f"Bearer {site.credential(host)['credential']}"}),
        Caller("person", {"Cookie": cookies}),
        Caller("token", {"Authorization": f"Bearer {site.desk.person_token(name='olga')}"}),
        Caller("nobody", {}),
    ]


def document(site: Site) -> Path:
    """Write the API's document beside the product and return its file."""
    printed = site.run("manage.py", "shell", "-v", "0", "-c", DOCUMENT)
    path = site.folder / "openapi.json"
    path.write_text(printed[printed.index("DOCUMENT") + len("DOCUMENT") :])
    return path


def command(site: Site, caller: Caller, *more: str) -> list[str]:
    """Return the command line of a whole run as one caller."""
    headers = [part for each in caller.headers.items() for part in ("-H", ": ".join(each))]
    return [
        sys.executable, "-m", "schemathesis.cli", "run", str(site.folder / "openapi.json"),
        "--url", site.base_url, "--phases", PHASES, "--checks", ",".join(PROMISES),
        "--mode", "all", "--rate-limit", "auto", "--request-timeout", "60",
        "--continue-on-failure", "--generation-database", "none", *headers, *more,
    ]  # fmt: skip


def run(site: Site, caller: Caller, known: dict[str, Any], *more: str) -> tuple[int, str]:
    """Run schemathesis to its end; return its exit status and what it printed."""
    path = site.folder / "known.json"
    path.write_text(json.dumps(known))
    environment = site.environment | {
        "SCHEMATHESIS_HOOKS": HOOKS, KNOWN: str(path), "PYTHONPATH": str(ROOT), "COLUMNS": "100",
        "NO_COLOR": "1",
    }  # fmt: skip
    done = subprocess.run(
        command(site, caller, *more), cwd=site.folder, env=environment,
        capture_output=True, text=True, check=False, timeout=3600,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def summary(printed: str) -> str:
    """Return the last part of what schemathesis printed: counts by phase, and the total."""
    _, _, after = printed.rpartition(" SUMMARY ")
    return re.sub(r"\n{2,}", "\n", after).strip("=\n ")
