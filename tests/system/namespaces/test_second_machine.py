"""Other machines as hosts, by the words of README, docs and the page: reach it, enrol, work, log.

The site is one `up --host 0.0.0.0` on the server; each host runs the commands that a person would
paste there, as a user with a home of its own. node-b reaches the site by an IPv4 address and takes
the README's commands; node-c by a name that its /etc/hosts gives to the IPv6 address, and takes
the command of the page.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import ROOT, ApiClient, free_port
from tests.system.namespaces.lab import MARKS, SERVER, SERVER_ADDRESS
from tests.system.namespaces.machines import Machines
from tests.webapp.boot.conftest import eventually

HOSTS = ["node-b", "node-c"]
pytestmark = MARKS
NAME = "slipway.lan"
PAGES = {
    ROOT / "README.md": "## A second host",
    ROOT / "templates" / "docs" / "hosts.md": "## Add a host",
}
UNREADY = "select count(*) from hosts_host where state <> 'ready'"


def commands_of(page: Path, heading: str) -> list[str]:
    """Return the lines of the first block of commands below a heading."""
    block = re.search(r"```sh\n(.*?)```", page.read_text("utf-8").partition(heading)[2], re.DOTALL)
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


@pytest.fixture(scope="module")
def machines(lab, tmp_path_factory) -> Iterator[Machines]:
    options = ("--host", "0.0.0.0")
    with Machines(
        tmp_path_factory.mktemp("m"), lab, NAME, free_port(), *options, SLIPWAY_ALLOWED_HOSTS=NAME
    ) as made:
        yield made


@pytest.fixture(scope="module")
def admin(machines) -> ApiClient:
    return ApiClient(machines.up.port, "admin", machines.password)


@pytest.fixture(scope="module")
def by_readme(machines) -> str:
    """What `enroll` printed on node-b, which works since."""
    token = machines.manage("enrol_token", "--name", "node-b")
    server = f"http://{SERVER_ADDRESS}:{machines.up.port}"
    _, enroll, work = commands_of(*next(iter(PAGES.items())))
    enroll = enroll.replace("https://slipway.example.org", server).replace("slt_...", token)
    printed = machines.type("node-b", enroll)
    machines.spare_benchmarks()
    machines.leave("node-b", work)
    return printed


@pytest.fixture(scope="module")
def by_page(machines, admin) -> str:
    """The page's command, which runs on node-c since; the page was asked for by the name."""
    host = {"Host": f"{NAME}:{machines.up.port}"}
    form = {"name": "node-c", "pool": "default", "labels": ""}
    _, where = admin.post("/hosts/add/", form)
    _, _, page = admin.request("GET", where, **host)
    command = html.unescape(re.search(r'id="enroll-command">(.*?)</code>', page)[1])
    machines.leave("node-c", command)
    eventually((machines.folder / "node-c/.slipway/host/credential.json").exists)
    machines.spare_benchmarks()
    return command


def test_readme_and_docs_say_the_same():
    first, second = (commands_of(*page) for page in PAGES.items())
    assert first == second


def test_every_address_that_up_prints_and_the_name_answer_on_another_machine(machines):
    told = re.search(r"Other machines reach it at (.*)", machines.up.words)[1].split(", ")
    port = machines.up.port
    addresses = [SERVER_ADDRESS, f"[{machines.lab.address6(SERVER)}]"]
    assert told == [f"http://{each}:{port}" for each in addresses]
    for url in [*told, f"http://{NAME}:{port}"]:
        ask = f"import httpx; print(httpx.get('{url}/healthz').status_code)"
        assert machines.type("node-c", f'python -c "{ask}"').strip() == "200", url
    refused = machines.type("node-b", f"python -m runners enroll --server {told[1]} --token no")
    assert "make a new one on the server's Hosts page" in refused


def test_the_readme_s_commands_enrol_a_host_which_speaks_http_alone(machines, by_readme):
    assert by_readme.startswith("Enrolled as node-b"), by_readme
    credential = machines.credential("node-b")
    assert credential["redis_url"] is None  # the site's own Redis is on a socket
    own = json.loads((machines.up.data / "host" / "credential.json").read_text())
    assert own["redis_url"].startswith("unix://")


def test_the_page_s_command_names_the_site_as_the_browser_did(machines, by_page):
    assert f"--server http://{NAME}:{machines.up.port} --token" in by_page
    assert machines.credential("node-c")["server"] == f"http://{NAME}:{machines.up.port}"


def test_jobs_run_on_both_machines_and_their_logs_are_on_the_site(
    machines, admin, by_readme, by_page
):
    eventually(lambda: machines.rows(UNREADY) == [(0,)])
    jobs = {
        name: machines.manage("drill", name, "--steps", "3", "--step-seconds", "0.2")
        for name in HOSTS
    }
    for name, job in jobs.items():
        assert admin.wait_for_state(job) == "succeeded", name
        assert "step 3 of 3" in admin.get(f"/jobs/{job}/logs/"), name
        assert (machines.folder / name / ".slipway/host/attempts").is_dir(), name
