"""Real nginx and Caddy before a site and an endpoint, configured by the blocks of the docs.

The site, the endpoint and the proxy run on one machine of the lab, on the ports that the docs
name; a host on another machine enrols by the public name, and trusts the test's own authority.
"""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from runners.jobspec import ArtefactModel, ServeSpec
from runners.jobspec.serve import key_hash
from tests.runners.jobs.tiny import TINY, tiny_training
from tests.stack import ROOT, wait_for
from tests.system.jobs.harness import Host
from tests.system.jobs.serve.serving import KEY, Endpoint, serving
from tests.system.namespaces.lab import MARKS, Lab
from tests.system.namespaces.machines import Machines
from tests.system.runners.test_redis_tls import make_authority

HOSTS = ["node-nginx", "node-caddy"]
pytestmark = MARKS
SITE, LLM = "slipway.example.org", "llm.example.org"
PAGE = ROOT / "templates" / "docs" / "proxies.md"
BLOCK = re.compile(r"```(nginx|caddy)\n(.*?)```", re.DOTALL)
MEBIBYTE = 1024**2
TEXT = b"training data " * 75_000  # about 1 MiB
NGINX = """
daemon off; user root; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    include {folder}/blocks.conf;
}}
"""


def blocks_of(kind: str) -> str:
    """Return the configurations of one proxy that the docs print: the site's, the endpoint's."""
    return "\n".join(text for name, text in BLOCK.findall(PAGE.read_text("utf-8")) if name == kind)


class Proxied(Machines):
    """The site with a public URL, and hosts that know it by that name."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab, SITE, 8000, SLIPWAY_PUBLIC_URL=f"https://{SITE}")
        self.authority = make_authority(folder / "tls", "*.example.org")

    def client(self, name: str) -> httpx.Client:
        """Return a browser that asks for a name at the proxy, and verifies its certificate."""

        def name_server(request: httpx.Request) -> None:
            request.extensions["sni_hostname"] = name

        context = ssl.create_default_context(cafile=str(self.authority.ca))
        return httpx.Client(
            base_url="https://127.0.0.1",
            headers={"Host": name, "Referer": f"https://{name}/"},
            verify=context,
            event_hooks={"request": [name_server]},
            timeout=300,
        )

    def run_proxy(self, kind: str, endpoint_port: str) -> subprocess.Popen[bytes]:
        """Start a proxy with the blocks of the docs; only the certificate and PORT are ours."""
        folder = self.folder / kind
        folder.mkdir()
        blocks = blocks_of(kind).replace("PORT", endpoint_port)
        for name, path in (
            ("fullchain", self.authority.certificate), ("privkey", self.authority.key),
        ):  # fmt: skip
            blocks = blocks.replace(f"/etc/ssl/slipway/{name}.pem", str(path))
        (folder / "blocks.conf").write_text(blocks)
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
        command = {
            "nginx": ["nginx", "-c", f"{folder}/nginx.conf"],
            "caddy": [
                "caddy",
                "run",
                "--adapter",
                "caddyfile",
                "--config",
                f"{folder}/blocks.conf",
            ],
        }[kind]
        with (folder / "output.log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"HOME": str(folder)}
            )


@pytest.fixture(scope="module")
def machines(lab, tmp_path_factory) -> Iterator[Proxied]:
    with Proxied(tmp_path_factory.mktemp("m"), lab) as made:
        yield made


@pytest.fixture(scope="module")
def endpoint(machines) -> Iterator[Endpoint]:
    """An endpoint of a tiny model, whose longest answers take seconds."""
    host = Host(machines.folder / "endpoint-host")
    model = TINY.model_copy(update={"max_position_embeddings": 4096})
    trained = host.run(
        "long", tiny_training(model=model, max_steps=2, sequence_length=4096, micro_batch_size=1)
    )
    assert trained.returncode == 0, trained.stderr
    spec = ServeSpec(
        model=ArtefactModel(attempt_id="long"), weight_dtype="fp32", max_concurrency=2,
        key_hashes=(key_hash(KEY),),
    )  # fmt: skip
    with serving(host, "behind-proxy", spec, KEY) as found:
        found.address()
        yield found


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxy(request, machines, endpoint) -> Iterator[str]:
    if shutil.which(request.param) is None:
        pytest.skip(f"needs the Debian package {request.param}")
    process = machines.run_proxy(request.param, endpoint.address().rpartition(":")[2])

    def answers() -> bool:
        assert process.poll() is None, (machines.folder / request.param / "output.log").read_text()
        try:
            with machines.client(SITE) as nobody:
                return nobody.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(answers, request.param)
        yield request.param
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def form_of(page: str) -> dict[str, str]:
    found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
    return {"csrfmiddlewaretoken": found[1]}


@pytest.fixture
def admin(machines, proxy) -> Iterator[httpx.Client]:
    """The administrator, logged in through the proxy."""
    with machines.client(SITE) as client:
        page = client.get("/login/").text
        done = client.post(
            "/login/", data={"username": "admin", "password": machines.password, **form_of(page)}
        )
        assert done.status_code == 302, done.text
        yield client


def test_one_logs_in_over_tls_alone(machines, admin):
    cookie = next(each for each in admin.cookies.jar if each.name == "__Host-session")
    assert cookie.secure
    assert "Log out" in admin.get("/").text
    for path in ("/", "/login/"):
        sent_on = httpx.get(f"http://127.0.0.1{path}", headers={"Host": SITE})
        assert sent_on.status_code in (301, 308), path
        assert sent_on.headers["Location"] == f"https://{SITE}{path}"


def test_events_of_a_live_page_arrive_while_its_stream_is_open(machines, admin):
    page = admin.get("/hosts/").text
    ticket = re.search(r'data-live-ticket="([^"]+)"', page)[1]
    headers = {"Live-Ticket": ticket}
    with admin.stream("GET", "/live/", headers=headers, timeout=60) as stream:
        pieces = stream.iter_text()
        assert next(pieces).startswith("retry:")
        seen = next(each for each in pieces if "event: host" in each)
    assert "data: {" in seen


def test_200_mib_of_training_data_are_taken_and_too_many_refused_by_the_site(
    machines, admin, proxy
):
    page = admin.get("/data/").text
    file = machines.folder / f"{proxy}.jsonl"
    with file.open("wb") as content:
        content.writelines(b'{"text": "%d %b"}\n' % (number, TEXT) for number in range(201))
    assert file.stat().st_size > 200 * MEBIBYTE
    with file.open("rb") as content:
        done = admin.post("/data/upload/", data=form_of(page), files={"file": content})
    assert (done.status_code, done.headers.get("Location")) == (302, "/data/")
    assert f"{proxy}.jsonl is uploaded: 201 records" in admin.get("/data/").text

    with machines.client(SITE) as nobody:
        refused = nobody.post("/login/", content=iter([TEXT] * 40))
    assert refused.status_code == 413
    assert "A request to /login/ has at most 1048576 bytes" in refused.text


def test_a_host_enrols_through_the_proxy_and_runs_a_job(machines, admin, proxy):
    host = f"node-{proxy}"
    trust = f"export SSL_CERT_FILE={machines.authority.ca}"
    token = machines.manage("enrol_token", "--name", host)
    enroll = f"python -m runners enroll --server https://{SITE} --token {token}"
    assert "CERTIFICATE_VERIFY_FAILED" in machines.type(host, enroll)
    printed = machines.type(host, f"{trust} && {enroll}")
    assert printed.startswith(f"Enrolled as {host}"), printed
    machines.spare_benchmarks()
    machines.leave(host, f"{trust} && python -m runners work")

    # The forwarded address is believed: by its own, the host would be this machine.
    assert machines.credential(host)["redis_url"] is None
    job = machines.manage("drill", host, "--steps", "3", "--step-seconds", "0.2")
    wait_for(lambda: 'data-state-now="succeeded"' in admin.get(f"/jobs/{job}/").text, "the job")
    assert "step 3 of 3" in admin.get(f"/jobs/{job}/logs/").text


def test_an_endpoint_s_answer_is_streamed_through_the_proxy(machines, proxy, endpoint):
    with (
        machines.client(LLM) as http,
        OpenAI(base_url="https://127.0.0.1/v1", api_key=KEY, http_client=http) as client,
    ):
        chunks = client.completions.create(
            model="model", prompt="import os\n", max_tokens=3000, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(chunks)
        assert endpoint.figure("slipway_running_requests") == 1
        assert len(list(chunks)) > 1000
        refused = http.post("/v1/completions", headers={"Authorization": "Bearer no"}, json={})
    assert (refused.status_code, json.loads(refused.text)["error"]["type"]) == (
        401, "authentication_error",
    )  # fmt: skip
