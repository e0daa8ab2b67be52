"""The command line of a host, as a person at a terminal meets it, and its systemd unit."""

import configparser
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from runners.__main__ import main
from runners.host import commands
from runners.host.commands import render
from runners.host.reconcile import Reconciler
from runners.shared.config import Credential, HostConfig, HostConfigError, HostDir
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.slurm import SlurmConfig
from runners.supervision import child, procfs
from tests.runners.programs import DAEMON, FOREVER, is_ready
from tests.runners.tools import ids_of, wait_for

# The command line of a host, as a person at a terminal meets it.

A1, A2 = ids_of(__name__)


def enroll(acceptor, host_dir: HostDir, token: str = "good-token", *more: str) -> int:  # noqa: S107 - a test token
    return main(
        ["enroll", "--server", acceptor.url, "--token", token, "--dir", str(host_dir.path), *more]
    )


def test_enrolment_leaves_a_credential_that_only_its_owner_can_read(acceptor, host_dir, capsys):
    """And it tells the server what the host is."""
    assert enroll(acceptor, host_dir, "good-token", "--name", "bench-1") == 0
    path = host_dir.path / "credential.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert host_dir.credential().name == "bench-1"
    assert "Enrolled as bench-1 (h1)" in capsys.readouterr().out
    assert acceptor.enrolments[0].facts.boot_id == procfs.boot_id()
    assert acceptor.enrolments[0].host_id is None


def test_enrolment_keeps_who_vouches_for_redis_and_the_secret_of_its_users(acceptor, host_dir):
    acceptor.redis_url, acceptor.redis_ca_pem = "rediss://redis:6380/0", "CERTIFICATE"
    enroll(acceptor, host_dir)
    credential = host_dir.credential()
    assert credential.worker_url == "rediss://h_h1:redis-secret@redis:6380/0"
    assert credential.shipper_url == "rediss://s_h1:redis-secret@redis:6380/0"
    assert host_dir.redis_ca().read_text() == "CERTIFICATE"


def test_an_authority_for_redis_that_the_operator_names_comes_first(
    host_dir, monkeypatch, tmp_path
):
    host_dir.save_redis_ca("CERTIFICATE")
    monkeypatch.setenv("SLIPWAY_REDIS_CA", f"{tmp_path / 'own.pem'} ")
    with pytest.raises(HostConfigError, match=r"SLIPWAY_REDIS_CA is .*no such file"):
        host_dir.redis_ca()
    (tmp_path / "own.pem").touch()
    assert host_dir.redis_ca() == tmp_path / "own.pem"


def test_enrolling_again_rotates_the_credential_of_the_same_host(acceptor, host_dir):
    enroll(acceptor, host_dir)
    first = host_dir.credential()
    acceptor.tokens.add("another-token")
    enroll(acceptor, host_dir, "another-token")
    assert acceptor.enrolments[1].host_id == first.host_id
    assert host_dir.credential().credential != first.credential


def test_a_busy_server_is_asked_again_when_it_said(acceptor, host_dir, caplog):
    acceptor.busy_enrolments = 2
    started, started_ms = time.monotonic(), time.time_ns() // 1_000_000
    assert enroll(acceptor, host_dir) == 0
    assert time.monotonic() - started >= 2
    assert caplog.text.count("too many at once. Trying again in") == 2
    # Each try says when it was sent: clock skew is read from it.
    assert acceptor.enrolments[0].sent_at_ms >= started_ms + 2000


def test_a_server_that_stays_busy_leaves_the_token_for_later(acceptor, host_dir, capsys):
    acceptor.busy_enrolments, acceptor.retry_after_seconds = 1, 3600
    assert enroll(acceptor, host_dir) == 1
    assert "The token was not used" in capsys.readouterr().err
    assert acceptor.tokens == {"good-token"}


def test_a_refused_token_says_the_way_out_and_keeps_the_old_credential(acceptor, host_dir, capsys):
    enroll(acceptor, host_dir)
    before = host_dir.credential()
    assert enroll(acceptor, host_dir, "used-token") == 1
    words = capsys.readouterr().err
    assert "used or older than an hour" in words
    assert "make a new one on the server's Hosts page" in words
    assert host_dir.credential() == before


def test_a_refusal_that_is_not_about_the_token_says_its_own_cause(
    acceptor, host_dir, capsys, monkeypatch
):
    for status, reply, words in [
        (400, {}, "does not take {url} for its own address"),
        (400, {"code": "unknown_host", "detail": "The Host header is 'x'"}, "The Host header is"),
        (404, {}, "no Slipway answers at {url}"),
        (413, {"detail": "too large"}, "too large"),
        (407, {}, "the proxy's user and password"),
        (502, {}, "correct the cause"),
    ]:
        monkeypatch.setattr(acceptor, "enroll", lambda _, answer=(status, reply): answer)
        assert enroll(acceptor, host_dir) == 1, status
        said = capsys.readouterr().err
        assert words.format(url=acceptor.url) in said, status
        assert "The token was not used" in said, status
        assert "make a new one" not in said, status


def test_an_address_and_a_token_are_taken_as_they_are_pasted(acceptor, host_dir, capsys):
    server = f" {acceptor.url.replace('http', 'HTTP')}/ "
    code = main(
        ["enroll", "--server", server, "--token", " good-token\n", "--dir", str(host_dir.path)]
    )
    assert (code, host_dir.credential().server) == (0, acceptor.url)
    for server in ["http://[::1", "http://box:port", "http://box/hosts/add/", "ftp://box", "box"]:
        assert main(["enroll", "--server", server, "--token", "t"]) == 1, server
        assert f"--server {server!r} is not a valid address" in capsys.readouterr().err


def test_a_folder_below_the_home_is_read_as_the_shell_would(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert HostDir(Path("~/host")).path == tmp_path / "host"
    assert HostConfig(model_roots=("~/models",)).model_roots == (tmp_path / "models",)


def test_an_absent_server_an_incomplete_address_and_a_missing_enrolment_are_named(
    host_dir, capsys
):
    code = main(
        ["enroll", "--server", "http://127.0.0.1:9", "--token", "t", "--dir", str(host_dir.path)]
    )
    assert code == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    code = main(["enroll", "--server", "box:8000", "--token", "t", "--dir", str(host_dir.path)])
    assert code == 1
    assert "give one such as http://127.0.0.1:8000" in capsys.readouterr().err
    assert main(["work", "--dir", str(host_dir.path)]) == 1
    assert "python -m runners enroll --server URL" in capsys.readouterr().err


def test_a_damaged_credential_or_config_is_named_and_not_a_traceback(host_dir):
    (host_dir.path / "credential.json").write_text('{"server": 3}')
    with pytest.raises(HostConfigError, match="is damaged"):
        host_dir.credential()
    for text in ["{", '{"upload_cap_bytes": -1}', '{"unknown": 1}']:
        (host_dir.path / "config.json").write_text(text)
        with pytest.raises(HostConfigError, match=r"config\.json is not valid"):
            host_dir.config()


def test_files_state_only_what_is_set_and_a_newer_agents_files_are_read(host_dir, credential):
    cluster = KubernetesConfig(image="i", volume_claim="v", mount_path="/data")
    host_dir.save_address("10.0.0.7")
    host_dir.save_scheduler(cluster)
    host_dir.save_scheduler(SlurmConfig(max_jobs=3))
    written = host_dir.path / "config.json"
    assert json.loads(written.read_text()) == {"address": "10.0.0.7", "slurm": {"max_jobs": 3}}
    host_dir.save_scheduler(cluster)
    assert json.loads(written.read_text()).keys() == {"address", "kubernetes"}
    host_dir.save_credential(credential)
    stored = host_dir.path / "credential.json"
    document = json.loads(stored.read_text())
    assert document.keys() == Credential.model_fields.keys() - {"redis_secret"}
    stored.write_text(json.dumps({**document, "of_a_newer_agent": 1}))
    assert host_dir.credential() == credential


def test_stop_all_ends_every_attempt_and_its_daemons(attempts, host_dir, capsys):
    folders = [attempts.start(A1, DAEMON + FOREVER), attempts.start(A2, FOREVER)]
    wait_for(lambda: is_ready(folders[0]))
    assert main(["stop-all", "--dir", str(host_dir.path)]) == 0
    assert capsys.readouterr().out == "Stopped 2 running attempts\n"
    assert [folder.exit_record().reason for folder in folders] == ["stopped_by_operator"] * 2
    assert procfs.processes_of_attempt(A1) == procfs.processes_of_attempt(A2) == []


def test_stop_all_of_a_host_that_never_was_is_no_error(tmp_path, capsys):
    assert main(["stop-all", "--dir", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "Stopped 0 running attempts\n"


def test_status_lists_each_attempt_with_its_end(attempts, host_dir, capsys):
    attempts.run(A1, "raise SystemExit(3)")
    attempts.start(A2, FOREVER)
    main(["status", "--dir", str(host_dir.path)])
    assert capsys.readouterr().out == f"{A1}  finished  exit_nonzero\n{A2}  running\n"


def test_doctor_finds_a_sound_host_sound_and_names_how_to_mend_another(
    acceptor, host_dir, credential, capsys
):
    host_dir.save_credential(credential)
    assert main(["doctor", "--dir", str(host_dir.path)]) == 0
    assert "FAIL" not in capsys.readouterr().out
    changes = {"credential": "revoked", "redis_url": "redis://127.0.0.1:9/0"}
    host_dir.save_credential(credential.model_copy(update=changes))
    assert main(["doctor", "--dir", str(host_dir.path)]) == 1
    words = capsys.readouterr().out
    assert "enrol this host again" in words
    assert "work continues over HTTP" in words


def work(host_dir: HostDir) -> subprocess.Popen:
    command = [sys.executable, "-m", "runners", "work", "--dir", str(host_dir.path)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)


@pytest.fixture
def enrolled(host_dir: HostDir, credential: Credential) -> HostDir:
    host_dir.save_credential(credential)
    return host_dir


@pytest.mark.faults
def test_work_ends_on_sigterm_and_leaves_the_jobs(acceptor, enrolled, attempts):
    folder = attempts.start(code=FOREVER)
    acceptor.want(A1).claim_id = folder.claim().claim_id
    acceptor.attempts[A1].fence = "fence"
    with work(enrolled) as process:
        wait_for(lambda: acceptor.attempts[A1].events)
        process.terminate()
        assert process.wait(15) == 0
    assert child.is_locked(folder.lock)


@pytest.mark.slow
@pytest.mark.faults
def test_work_killed_in_the_middle_is_continued_by_the_next(acceptor, enrolled, attempts):
    folder = attempts.start(code="import time; time.sleep(3); print('end')")
    stored = acceptor.want(A1)
    stored.claim_id, stored.fence = folder.claim().claim_id, "fence"
    with work(enrolled) as process:
        wait_for(lambda: stored.events)
        os.killpg(process.pid, signal.SIGKILL)
    with work(enrolled) as process:
        wait_for(lambda: stored.has_exited)
        process.terminate()
    assert stored.exit["reason"] == "ok"
    assert [event.seq for event in stored.events] == list(range(1, len(stored.events) + 1))


def test_work_stores_the_schedulers_settings_that_it_is_given_and_keeps_them_without(
    host_dir, credential, monkeypatch
):
    host_dir.save_credential(credential)
    monkeypatch.setattr(commands, "Agent", lambda *_: SimpleNamespace(run=lambda **_: None))
    monkeypatch.setattr(commands, "DoorbellWorkerSupervisor", lambda _: None)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    folder = str(host_dir.path)
    volume = ["--volume-claim", "shared", "--mount-path", folder]
    for more, image in ((("--image", "a:2"), "a:2"), (("--image", "a:3"), "a:3"), ((), "a:3")):
        options = ["--kubernetes", *more, *volume] if more else []
        assert main(["work", "--dir", folder, *options]) == 0
        assert host_dir.config().scheduler.image == image


def test_a_second_worker_of_the_same_folder_ends_with_a_sentence(acceptor, enrolled, capsys):
    with child.locked(enrolled.agent_lock):
        assert main(["work", "--dir", str(enrolled.path)]) == 75
    assert "another agent serves" in capsys.readouterr().err


def test_the_credential_survives_its_file(host_dir, credential):
    host_dir.save_credential(credential)
    assert host_dir.credential() == credential
    assert json.loads((host_dir.path / "credential.json").read_text())["host_id"] == "h1"


def test_stop_all_with_the_site_says_so_in_each_record(attempts, host_dir, capsys):
    folder = attempts.start(A1, FOREVER)
    assert main(["stop-all", "--with-site", "--dir", str(host_dir.path)]) == 0
    assert folder.exit_record().reason == "site_stopped"


def test_stop_all_names_what_does_not_end_and_why(attempts, host_dir, capsys, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    attempts.start(A1, FOREVER)
    monkeypatch.setattr(commands, "STOP_ALL_SECONDS", 0.2)
    for stop, why in [
        (lambda *_: None, "its supervisor did not end it"),
        (fail, "No space left on device"),
    ]:
        monkeypatch.setattr(Reconciler, "stop", stop)
        assert main(["stop-all", "--dir", str(host_dir.path)]) == 1
        assert capsys.readouterr().err == f"{A1} still runs: {why}\n"


def test_stop_all_without_waiting_gives_the_orders(attempts, host_dir, capsys):
    folder = attempts.start(A1, FOREVER)
    assert main(["stop-all", "--no-wait", "--dir", str(host_dir.path)]) == 0
    assert capsys.readouterr().out == "Told 1 to stop\n"
    wait_for(folder.exit_record)


# The unit file: unprivileged, shut in, and no job dies with the agent.

HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "PrivateTmp": "yes",
    "KillMode": "process",
    "OOMPolicy": "continue",
    "Delegate": "yes",
    "UMask": "0077",
    "Restart": "always",
}


def parsed(text: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    return unit


def test_the_unit_is_hardened():
    for user in [None, "slipway"]:
        service = parsed(render(Path("/home/u/.slipway/host"), user=user))["Service"]
        assert {name: service[name] for name in HARDENED} == HARDENED, user
        assert service["ReadWritePaths"] == "/home/u/.slipway/host", user


def test_a_systems_unit_names_its_user_and_gpus_stay_visible():
    assert "PrivateDevices" not in render(Path("/h"))
    system, own = render(Path("/h"), user="slipway"), render(Path("/h"))
    assert parsed(system)["Service"]["User"] == "slipway"
    assert parsed(system)["Install"]["WantedBy"] == "multi-user.target"
    assert "User=" not in own
    assert parsed(own)["Install"]["WantedBy"] == "default.target"


def test_a_folder_with_spaces_and_percent_signs_means_itself():
    service = parsed(render(Path("/home/u/100 %/host"), python="/usr/bin/python3"))["Service"]
    assert service["ReadWritePaths"] == '"/home/u/100 %%/host"'
    assert service["ExecStart"].endswith('--dir "/home/u/100 %%/host"')


def test_the_command_prints_the_unit_of_its_folder(host_dir, capsys):
    assert main(["unit", "--dir", str(host_dir.path), "--system", "slipway"]) == 0
    printed = capsys.readouterr().out
    assert printed == render(host_dir.path, user="slipway", variables=os.environ)


def test_a_service_keeps_the_certificates_and_proxies_of_the_shell_but_no_password():
    variables = {
        "SSL_CERT_FILE": "/etc/our own/100%.pem ", "no_proxy": ".lan", "HTTP_PROXY": "",
        "HTTPS_PROXY": "http://me:secret@proxy:3128", "PATH": "/bin", "HF_HOME": "~/hf@lab",
        "SLIPWAY_TIME_SCALE": "0.1", "SLIPWAY_POWERCAP_DIR": "/p", "HF_TOKEN": "hf_secret",
        "HF_ENDPOINT": "https://mirror.lan/hub", "VLLM_USE_MODELSCOPE": "True",
    }  # fmt: skip
    unit = render(Path("/h"), variables=variables)
    lines = [line for line in unit.splitlines() if line.startswith("Environment=")]
    home = Path("~").expanduser()
    assert sorted(lines) == sorted(
        f'Environment="{each}"'
        for each in (
            "SSL_CERT_FILE=/etc/our own/100%%.pem", "no_proxy=.lan", "SLIPWAY_TIME_SCALE=0.1",
            "SLIPWAY_POWERCAP_DIR=/p", f"HF_HOME={home}/hf@lab",
            "HF_ENDPOINT=https://mirror.lan/hub", "VLLM_USE_MODELSCOPE=True",
        )
    )  # fmt: skip
    assert "me:secret" not in unit
    assert "hf_secret" not in unit
    for words in ("# HTTPS_PROXY holds a password", "# HF_TOKEN holds a secret"):
        assert words in unit


def test_systemd_finds_nothing_to_say_about_it(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    unit = tmp_path / "slipway-host.service"
    unit.write_text(render(tmp_path, python="/bin/true", user="root"))
    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert "slipway-host" not in told.stderr
