"""Nothing of one is open to another: secrets of a job, folders and processes of two users."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from runners.__main__ import main
from runners.jobspec import BenchmarkSpec, DemoModel, DrillSpec, TrainSpec
from runners.launchers import launch
from runners.shared.config import HostDir
from runners.shared.messages import BeatReply, ClaimReply, WantedAttempt
from runners.shared.reasons import Reason
from runners.supervision import child, procfs
from tests.runners.tools import AttemptFolder, bodies, ids_of, wait_for
from tests.system.jobs.harness import PROJECT

# A secret from the claim to the job: by file, and nowhere else on the host.

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
def reconciler(reconciling):
    return reconciling(TELLS_ALL)


def give(acceptor, spec=SPEC, **values: str) -> WantedAttempt:
    """Have the server answer the claim with these secrets."""
    stored = acceptor.want(A1, spec=spec)
    secrets = {name: SecretStr(value) for name, value in values.items()}
    acceptor.claim = lambda *_: (200, ClaimReply(request=stored.request, secrets=secrets))
    return WantedAttempt(attempt_id=A1, fence=stored.fence)


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


def test_no_command_line_no_environment_and_no_other_file_holds_it_while_it_runs(
    running, host_dir
):
    file = running.path / child.SECRETS / "HF_TOKEN"
    assert file.read_text() == CANARY
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    processes = [Path(f"/proc/{each.pid}") for each in procfs.processes_of_attempt(A1)]
    seen = [(each / name).read_bytes() for each in processes for name in ("cmdline", "environ")]
    assert len(seen) >= 2
    assert not any(CANARY.encode() in text for text in seen)
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
    wait_for(lambda: not child.is_locked(running.lock))
    reconciler.reap()
    assert holding(running.path) == []


def test_a_job_whose_secret_is_gone_does_not_start_and_the_log_says_why(
    acceptor, reconciler, host_dir, caplog
):
    reconciler.claim(give(acceptor))
    ended = AttemptFolder(host_dir.attempts / A1).exit_record()
    assert ended.reason is Reason.PREFLIGHT_FAILED
    assert "HF_TOKEN" in ended.last_lines[0]
    assert f"attempt {A1} ends: preflight_failed the team has no secret HF_TOKEN" in caplog.text


def test_a_secret_for_a_tracker_that_the_operator_has_not_listed_does_not_start(
    acceptor, reconciler, host_dir
):
    tracker = {"name": "mlflow", "url": "https://m.example.org"}
    spec = TrainSpec(tracker=tracker, secrets=("MLFLOW_TRACKING_TOKEN",))
    reconciler.claim(give(acceptor, spec, MLFLOW_TRACKING_TOKEN=CANARY))
    ended = AttemptFolder(host_dir.attempts / A1).exit_record()
    assert ended.reason is Reason.PREFLIGHT_FAILED
    assert "would go to https://m.example.org, which is none of this host's" in ended.last_lines[0]
    assert holding(host_dir.path) == []


def test_only_the_wire_of_a_claim_says_the_value():
    reply = ClaimReply(request=request(), secrets={"HF_TOKEN": SecretStr(CANARY)})
    assert CANARY not in repr(reply) + str(reply) + str(reply.model_dump())
    assert CANARY in reply.model_dump_json()
    assert "secrets" not in BeatReply.model_fields


def request():
    from tests.runners.acceptor import Stored

    return Stored(A1, SPEC, None).request


# Two Unix users of one machine, each with an agent: nothing of one is open to the other.

PATIENCE_SECONDS = 120.0
OURS, THEIRS = 20_001, 20_002  # users that need no name
# Says of each thing that another user might try whether the kernel let it.
TRIES = """
import json, os, sys
def may(act, *args):
    try:
        act(*args)
    except OSError as error:
        return type(error).__name__
    return "may"
folder, pids = sys.argv[1], [int(pid) for pid in sys.argv[2:]]
tried = {path: may(os.listdir, path) for path in (folder, folder + "/attempts")}
for name in ("credential.json", "attempts/ATTEMPT/stdout.log", "attempts/ATTEMPT/spec.json"):
    tried[name] = may(open, os.path.join(folder, name))
tried["write"] = may(open, folder + "/attempts/ATTEMPT/mark", "w")
for pid in pids:
    tried[f"signal {pid}"] = may(os.kill, pid, 0)
    tried[f"environment {pid}"] = may(open, f"/proc/{pid}/environ")
print(json.dumps(tried))
""".replace("ATTEMPT", A1)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}


@contextlib.contextmanager
def agent(host_dir: HostDir, user: int | None = None) -> Iterator[None]:
    """Run a real agent, started with a mask that would leave everything open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runners", "work", "--dir", str(host_dir.path)],
        env=environment() | {"HOME": str(host_dir.path)},
        cwd="/",
        umask=0,
        **as_user(user),
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def as_user(user: int | None) -> dict:
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


def open_to_others(folder: Path) -> list[str]:
    paths = [folder, *folder.rglob("*")]
    return [
        f"{stat.filemode(path.lstat().st_mode)} {path}"
        for path in paths
        if not path.is_symlink() and path.lstat().st_mode & 0o077
    ]


def test_nothing_that_an_agent_and_its_supervisor_write_is_open_to_others(
    acceptor, host_dir, credential
):
    host_dir.path.chmod(0o755)  # as somebody made it before
    host_dir.save_credential(credential)
    stored = acceptor.want(A1, DrillSpec(steps=2, step_seconds=0.01))
    with agent(host_dir):
        wait_for(lambda: stored.has_exited, PATIENCE_SECONDS)
    names = {path.name for path in host_dir.path.rglob("*")}
    assert {"credential.json", "stdout.log", "spec.json", "output"} <= names
    assert open_to_others(host_dir.path) == []


# Folders and files as jobs make them: checkpoints, artefacts, journals, caches, sockets.
WRITES = """
import os, socket, tempfile
os.makedirs("output/checkpoint-00000001/deep")
for name in ("model.safetensors", "checkpoint-00000001/state.json"):
    open("output/" + name, "w").write("weights")
os.close(os.open("output/journal.jsonl", os.O_WRONLY | os.O_CREAT, 0o666))
tempfile.mkdtemp(dir=".")
socket.socket(socket.AF_UNIX).bind("output/socket")
"""


def test_nothing_that_a_job_writes_is_open_to_others(attempts):
    before = os.umask(0)
    try:
        folder = attempts.make(code=f"import os; os.chdir(os.environ['AT'])\n{WRITES}")
        launched = child.read_json(folder.path / child.LAUNCH)
        launched["env"]["AT"] = str(folder.path)
        child.write_json(folder.path / child.LAUNCH, launched)
        assert launch.start_supervisor(folder.path) == 0
        attempts.wait(folder, PATIENCE_SECONDS)
    finally:
        os.umask(before)
    assert folder.exit_record().reason == "ok"
    assert (folder.path / "output" / "checkpoint-00000001" / "state.json").exists()
    assert list(folder.spool.iterdir())
    assert open_to_others(attempts.host_dir.path) == []


def test_the_doctor_tells_of_a_folder_that_others_may_read(host_dir, capsys):
    host_dir.path.chmod(0o750)
    main(["doctor", "--dir", str(host_dir.path)])
    assert f"FAIL Folder: open to other users; make it yours alone: chmod 700 {host_dir.path}" in (
        capsys.readouterr().out
    )


# Two real users: only root can become them.


def may_run(python: str, code: str, user: int) -> bool:
    if os.getuid() != 0:
        return False
    command = [python, "-c", code]
    with contextlib.suppress(OSError):
        done = subprocess.run(
            command, env=environment(), cwd="/", check=False, capture_output=True, **as_user(user)
        )
        return done.returncode == 0
    return False


@pytest.fixture(scope="module")
def our_user() -> int:
    """A user of no rights; the suite's own where this Python lies in a home that is closed."""
    is_open = may_run(sys.executable, "import runners.host.agent, runners.jobs.drill", OURS)
    return OURS if is_open else os.getuid()


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter, of the standard library alone, that any user may run."""
    found = [each for each in (sys.executable, "/usr/bin/python3") if may_run(each, "", THEIRS)]
    if not found:
        pytest.skip("no Python of this machine is open to other users")
    return found[0]


@pytest.fixture
def our_dir(credential, our_user) -> Iterator[HostDir]:
    """A host's folder of our user, in a place that every user may enter."""
    place = Path(tempfile.mkdtemp(prefix="slipway-users-"))
    place.chmod(0o755)
    made = HostDir(place / "host")
    made.make()
    made.save_credential(credential)
    for path in (made.path, *made.path.rglob("*")):
        os.chown(path, our_user, our_user)
    yield made
    shutil.rmtree(place)


@pytest.fixture
def tries(acceptor, our_dir, our_user, python) -> Iterator[Callable[[int], dict[str, str]]]:
    """Return what a user may do to our agent's folder and processes while its job runs."""
    stored = acceptor.want(A1, DrillSpec(steps=100_000, step_seconds=0.05))
    attempt = our_dir.attempts / A1
    with agent(our_dir, our_user):
        try:
            wait_for(lambda: "started" in stored.kinds(), PATIENCE_SECONDS)
            identity = child.read_json(attempt / child.SUPERVISOR)
            pids = [str(identity["pid"]), str(identity["child_pid"])]
            command = [python, "-c", TRIES, str(our_dir.path), *pids]
            yield lambda user: json.loads(
                subprocess.run(
                    command, cwd="/", check=True, capture_output=True, **as_user(user)
                ).stdout
            )
        finally:
            acceptor.order_stop(A1)
            wait_for(lambda: stored.has_exited, PATIENCE_SECONDS)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_another_user_reads_lists_and_signals_nothing_of_ours(tries, our_user):
    of_ourselves, of_others = tries(our_user), tries(THEIRS)
    assert set(of_ourselves.values()) == {"may"}
    assert "may" not in of_others.values()
    assert len(of_others) == 10


def test_a_value_that_colours_split_is_masked(attempts):
    """As rich prints a token: its numbers in another colour than its letters."""
    folder = attempts.make(code=f"print('{CANARY[:5]}\\x1b[1;36m{CANARY[5:]}\\x1b[0m end')")
    (folder.path / child.SECRETS).mkdir()
    (folder.path / child.SECRETS / "HF_TOKEN").write_text(CANARY)
    assert launch.start_supervisor(folder.path) == 0
    attempts.wait(folder)
    assert folder.exit_record().last_lines == ("[secret] end",)
    assert {body["text"] for body in bodies(folder, "log")[1:]} == {"[secret] end\n"}
