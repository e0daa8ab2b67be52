"""A secret from the claim to the job: by file, and nowhere else on the host."""

import stat
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from runners.client import ServerClient
from runners.config import HostConfig
from runners.jobspec import BenchmarkSpec, DemoModel
from runners.messages import BeatReply, ClaimReply, Wanted
from runners.reasons import Reason
from runners.reconcile import Reconciler
from runners.supervision import procfs, record
from tests.runners.tools import AttemptFolder, bodies, ids_of, wait_for

A1, _ = ids_of(__name__)

CANARY = "hf_canary_5Kx9mQ2v"
SPEC = BenchmarkSpec(model=DemoModel(), secrets=("HF_TOKEN",))
# Writes the token in one piece, in two, in an event, and fails with it on its lips.
TELLS_ALL = """
import json, os, sys, time
token = open(os.environ["HF_TOKEN_FILE"]).read()
print("token", token, flush=True)
sys.stdout.write(token[:7]); sys.stdout.flush(); time.sleep(0.2); print(token[7:], flush=True)
event = {"kind": "phase", "body": {"name": "with " + token}}
os.write(int(os.environ["SLIPWAY_EVENT_FD"]), (json.dumps(event) + "\\n").encode())
open("ready", "w").close()
while not os.path.exists("go"): time.sleep(0.05)
raise SystemExit("bad token " + token)
"""


@pytest.fixture
def reconciler(acceptor, host_dir, attempts):
    client = ServerClient(acceptor.url, "host-credential")
    yield Reconciler(
        host_dir,
        HostConfig(),
        client,
        boot_id=procfs.boot_id(),
        render=lambda _spec, _folder: [sys.executable, "-c", TELLS_ALL],
    )
    client.close()


def give(acceptor, **values: str) -> Wanted:
    """Have the server answer the claim with these secrets."""
    stored = acceptor.want(A1, spec=SPEC)
    secrets = {name: SecretStr(value) for name, value in values.items()}
    acceptor.claim = lambda *_: (200, ClaimReply(request=stored.request, secrets=secrets))
    return Wanted(attempt_id=A1, fence=stored.fence)


@pytest.fixture
def running(acceptor, reconciler, host_dir) -> AttemptFolder:
    """An attempt whose job has told its secret to everyone and waits."""
    reconciler.claim(give(acceptor, HF_TOKEN=CANARY))
    folder = AttemptFolder(host_dir.attempts / A1)
    wait_for((folder.path / "ready").exists)
    return folder


def holding(path: Path) -> list[str]:
    """Return the files below a folder that hold the canary."""
    files = [each for each in path.rglob("*") if each.is_file()]
    return [each.name for each in files if CANARY.encode() in each.read_bytes()]


def test_the_job_finds_it_as_a_file_of_its_owner_alone(running):
    file = running.path / record.SECRETS / "HF_TOKEN"
    assert file.read_text() == CANARY
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_no_command_line_and_no_environment_holds_it(running):
    processes = [Path(f"/proc/{each.pid}") for each in procfs.marked(A1)]
    seen = [(each / name).read_bytes() for each in processes for name in ("cmdline", "environ")]
    assert len(seen) >= 2
    assert not any(CANARY.encode() in text for text in seen)


def test_no_other_file_of_the_host_holds_it_while_it_runs(running, host_dir):
    wait_for(lambda: bodies(running, "phase")[1:])
    assert holding(host_dir.path) == ["HF_TOKEN"]


def test_after_its_end_nothing_on_the_host_holds_it(running, host_dir, attempts):
    (running.path / "go").touch()
    attempts.wait(running)
    assert holding(host_dir.path) == []
    assert running.exit_record().last_lines[-1] == "bad token [secret]"
    assert bodies(running, "phase")[1:] == [{"name": "with [secret]"}]
    assert (running.path / "stdout.log").read_text() == "token [secret]\n[secret]\n"


def test_a_host_that_restarts_meanwhile_leaves_none_behind(running, attempts, reconciler):
    attempts.clean_up()
    wait_for(lambda: not record.is_locked(running.lock))
    reconciler.reap()
    assert holding(running.path) == []


def test_a_job_whose_secret_is_gone_does_not_start(acceptor, reconciler, host_dir):
    reconciler.claim(give(acceptor))
    ended = AttemptFolder(host_dir.attempts / A1).exit_record()
    assert ended.reason is Reason.PREFLIGHT_FAILED
    assert "HF_TOKEN" in ended.last_lines[0]


def test_only_the_wire_of_a_claim_says_the_value():
    reply = ClaimReply(request=request(), secrets={"HF_TOKEN": SecretStr(CANARY)})
    assert CANARY not in repr(reply) + str(reply) + str(reply.model_dump())
    assert CANARY in reply.model_dump_json()
    assert "secrets" not in BeatReply.model_fields


def request():
    from tests.runners.acceptor import Stored

    return Stored(A1, SPEC, None).request
