"""The agent against an in-memory server, with real supervisors and jobs below it."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from runners.host.agent import Agent, AlreadyRunningError
from runners.host.wake import wake_agent
from runners.jobspec import ArtefactModel, BenchmarkSpec, FolderModel
from runners.shared.config import HostDir
from runners.shared.facts import Microbench
from runners.shared.messages import EpochShown
from runners.shared.timing import LOCK_PROBE_SECONDS
from runners.supervision import child, procfs
from tests.runners.programs import FOREVER, SAY
from tests.runners.tools import ids_of, wait_for

A1, A2 = ids_of(__name__)

MICROBENCH = Microbench(
    measured_at_ms=1,
    duration_seconds=0.1,
    torch_version="0",
    num_threads=1,
    devices=(),
    disk_write_bytes_per_second=1.0,
)
BENCH = (sys.executable, "-c", f"print({MICROBENCH.model_dump_json()!r})")


def running(code: str) -> Callable:
    """Return what stands in for the list of job modules: every job is this program."""
    return lambda _spec, _folder: [sys.executable, "-c", code]


@pytest.fixture
def serve(host_dir, credential, attempts, monkeypatch) -> Callable:
    """Run an agent in a thread while a block runs; ``attempts`` ends its jobs afterwards."""
    monkeypatch.setattr("runners.host.agent.POLL_SECONDS", 0.1)

    @contextmanager
    def served(
        code: str = "", bench: tuple[str, ...] = BENCH, **options: object
    ) -> Iterator[Agent]:
        changed = credential.model_copy(update=options)
        agent = Agent(host_dir, changed, render=running(code), bench_command=bench)
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            yield agent
        finally:
            agent.stop()
            thread.join(20)
        assert not thread.is_alive()

    return served


def test_a_wanted_attempt_is_claimed_run_told_to_its_end_and_then_forgotten(
    acceptor, serve, host_dir
):
    """Its artefacts are uploaded after the end."""
    stored = acceptor.want(A1)
    code = SAY + (
        "say('result', measured={'perplexity': 3.0})\n"
        "os.mkdir('output/model'); open('output/model/w', 'w').write('weights')\n"
        "say('artefact', name='model', kind='model', total_bytes=7, files={'w': 7}, sha256={'w': '0' * 64})"
    )

    with serve(code):
        wait_for((acceptor.uploads / A1 / "artefacts/model/w").exists)
        assert stored.has_exited
        wait_for((host_dir.attempts / A1 / "forgotten").exists)
        wait_for(lambda: acceptor.beats[-1].attempts == ())

    assert stored.kinds()[0] == "started"
    assert stored.of_kind("result")[0]["measured"] == {"perplexity": 3.0}
    assert stored.exit["reason"] == "ok"
    assert stored.num_duplicates == 0
    assert (acceptor.uploads / A1 / "artefacts/model/w").read_text() == "weights"
    assert not (host_dir.attempts / A1 / "spool").exists()


def test_an_agent_works_with_a_newer_server_and_refuses_an_option_that_it_does_not_know(
    acceptor, serve, host_dir, monkeypatch
):
    acceptor.is_newer = True
    stored = acceptor.want(A1)
    with serve(SAY + "say('result', measured={'perplexity': 3.0})"):
        wait_for((host_dir.attempts / A1 / "forgotten").exists)
        monkeypatch.setattr("tests.runners.acceptor.option_paths", lambda _spec: ())
        other = acceptor.want(A2)
        wait_for(lambda: other.has_exited)
    assert (stored.exit["reason"], stored.num_duplicates) == ("ok", 0)
    assert other.exit["reason"] == "version_incompatible"
    assert "from_a_newer_server" in " ".join(other.exit["last_lines"])


def test_for_a_server_that_went_back_nothing_starts_until_it_is_further_on(acceptor, serve):
    acceptor.epoch = EpochShown(number=7, proof="a" * 64)
    with serve():
        wait_for(lambda: acceptor.beats and acceptor.beats[-1].epoch == acceptor.epoch)
        acceptor.epoch = EpochShown(number=6, proof="b" * 64)
        stored = acceptor.want(A1)
        wait_for(lambda: "restored from a backup" in " ".join(acceptor.beats[-1].problems))
        assert not stored.claim_id
        acceptor.epoch = EpochShown(number=8, proof="c" * 64)
        wait_for(lambda: stored.has_exited)


def test_the_first_beat_brings_the_facts_and_the_benchmark_is_sent_once(acceptor, serve):
    with serve():
        wait_for(lambda: acceptor.microbench)
        num_beats = len(acceptor.beats)
        wait_for(lambda: len(acceptor.beats) > num_beats + 1)
    first, second, *_ = acceptor.beats
    assert first.facts.boot_id == procfs.boot_id()
    assert first.is_agent_start
    assert (second.facts, second.is_agent_start) == (None, False)
    (sent,) = [beat.microbench for beat in acceptor.beats if beat.microbench]
    assert sent.model_copy(update={"network": None}) == MICROBENCH
    assert sent.network.round_trip_seconds > 0


def test_a_beat_says_how_far_an_attempt_is_and_a_stop_order_ends_it(acceptor, serve):
    stored = acceptor.want(A1)
    with serve(FOREVER):
        wait_for(lambda: any(each.acked_seq for beat in acceptor.beats for each in beat.attempts))
        status = acceptor.beats[-1].attempts[0]
        acceptor.order_stop(A1)
        wait_for(lambda: stored.has_exited)
    assert (status.phase, status.fence) == ("running", acceptor.attempts[A1].fence)
    assert status.last_seq >= status.acked_seq > 0
    assert stored.exit["reason"] == "stopped_by_user"


def test_a_stop_that_comes_before_the_start_runs_nothing(acceptor, serve, host_dir):
    stored = acceptor.want(A1)
    acceptor.lose_replies = 2  # still claiming at its second beat, which brings the order
    acceptor.order_stop(A1)
    with serve("open('ran', 'w')"):
        wait_for(lambda: stored.has_exited)
    assert stored.kinds() == ["exited"]
    assert stored.exit["reason"] == "stopped_by_user"
    assert not (host_dir.attempts / A1 / "ran").exists()


def test_a_lost_claim_reply_is_asked_for_again_and_starts_one_job(acceptor, serve):
    stored = acceptor.want(A1)
    acceptor.lose_replies = 2
    with serve("print('ran')"):
        wait_for(lambda: stored.has_exited)
    assert stored.kinds().count("started") == 1


def test_a_refused_claim_becomes_a_tombstone_and_no_process(acceptor, serve, host_dir):
    stored = acceptor.want(A1)
    stored.claim_id = ""
    acceptor.claim = lambda *_: (409, {"detail": "superseded"})
    with serve("open('ran', 'w')"):
        wait_for((host_dir.attempts / A1 / "tombstone").exists)
        num_beats = len(acceptor.beats)
        wait_for(lambda: len(acceptor.beats) > num_beats + 1)
    assert acceptor.beats[-1].attempts == ()
    assert not (host_dir.attempts / A1 / "ran").exists()


def test_a_doorbell_brings_the_next_beat_at_once(acceptor, serve, host_dir):
    with serve(beat_seconds=9.0):
        wait_for(lambda: acceptor.microbench)
        stored = acceptor.want(A1)
        wake_agent(host_dir.wake)
        wait_for(lambda: stored.claim_id, seconds=2)


def test_the_tunnel_runs_while_the_server_names_gateways_with_the_credential_of_now(
    acceptor, serve, host_dir, credential, monkeypatch, tmp_path
):
    program = "import sys, time; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); time.sleep(600)"
    seen = tmp_path / "seen"
    command = (sys.executable, "-c", program, str(seen))
    monkeypatch.setattr("runners.host.companions.TUNNEL_COMMAND", command)

    def was_started(*gateways: str) -> bool:
        return seen.exists() and seen.read_text().split() == list(gateways)

    host_dir.save_credential(credential)
    with serve() as agent:
        wait_for(lambda: len(acceptor.beats) > 1)
        assert agent.tunnel.pid is None
        acceptor.tunnels = ("/tunnel/",)
        wait_for(lambda: was_started("/tunnel/"))
        first = agent.tunnel.pid
        acceptor.wants_rotation = True
        wait_for(lambda: was_started("/tunnel/", "/tunnel/"))
        assert host_dir.credential().credential != credential.credential
        acceptor.tunnels = ("ws://other/",)
        wait_for(lambda: was_started("/tunnel/", "/tunnel/", "ws://other/"))
        last = agent.tunnel.pid
        acceptor.tunnels = ()
        wait_for(lambda: agent.tunnel.pid is None)
        acceptor.tunnels = ("ws://again/",)
        wait_for(lambda: was_started("/tunnel/", "/tunnel/", "ws://other/", "ws://again/"))
        again = agent.tunnel.pid
    assert [procfs.read_process(pid) for pid in (first, last, again)] == [None] * 3


def test_a_hosts_folder_is_closed_to_others_and_a_wake_without_an_agent_harmless(
    host_dir, tmp_path
):
    assert not wake_agent(host_dir.wake)
    made = HostDir(tmp_path / "new")
    made.make()
    assert made.path.stat().st_mode & 0o077 == 0


def test_the_server_may_be_away_while_a_job_runs_and_ends(acceptor, serve):
    stored = acceptor.want(A1)
    with serve("import time; time.sleep(1.5); print('end')"):
        wait_for(lambda: stored.events)
        acceptor.is_away = True
        wait_for(lambda: procfs.processes_of_attempt(A1) == [])
        acceptor.is_away = False
        wait_for(lambda: stored.has_exited)
    assert [event.seq for event in stored.events] == list(range(1, len(stored.events) + 1))


def test_a_job_outlives_its_agent_and_the_next_agent_ships_the_rest(acceptor, serve):
    stored = acceptor.want(A1)
    with serve("import time; print('on', flush=True); time.sleep(2); print('end')"):
        wait_for(lambda: stored.events)
    assert procfs.processes_of_attempt(A1)
    with serve():
        wait_for(lambda: stored.has_exited)
    assert stored.exit["reason"] == "ok"
    assert stored.kinds().count("started") == 1


def test_a_job_that_ended_while_no_agent_ran_is_told_by_the_next(acceptor, serve, attempts):
    stored = acceptor.want(A1)
    with serve("import time; time.sleep(1)"):
        wait_for(lambda: stored.events)
    wait_for(lambda: procfs.processes_of_attempt(A1) == [])
    with serve():
        wait_for(lambda: stored.has_exited)
    assert (stored.exit["reason"], stored.exit["by"]) == ("ok", "supervisor")


@pytest.mark.faults
def test_a_killed_supervisor_is_told_as_lost_and_leaves_no_process(acceptor, serve, host_dir):
    stored = acceptor.want(A1)
    with serve(FOREVER):
        wait_for(lambda: stored.events)
        identity = child.read_json(host_dir.attempts / A1 / child.SUPERVISOR)
        procfs.send_signal(identity["pid"], identity["start_ticks"], 9)
        wait_for(lambda: stored.has_exited)
    assert (stored.exit["reason"], stored.exit["by"]) == ("supervisor_lost", "reaper")
    assert procfs.processes_of_attempt(A1) == []


@pytest.mark.faults
def test_a_stale_identity_kills_no_stranger_and_the_last_boots_attempt_is_told_as_rebooted(
    acceptor, serve, attempts
):
    lost, rebooted = attempts.make(), attempts.make(A2)
    me = procfs.read_process(procfs.os.getpid())
    child.write_json(
        lost.path / child.SUPERVISOR, {"pid": me.pid, "start_ticks": me.start_ticks - 1}
    )
    stored = [acceptor.want(each) for each in (A1, A2)]
    for each, folder in zip(stored, (lost, rebooted), strict=True):
        each.fence, each.claim_id = "fence", folder.claim().claim_id
    attempts.reboot(rebooted)
    acceptor.order_stop(A1)

    with serve():
        wait_for(lambda: all(each.has_exited for each in stored))

    assert [each.exit["reason"] for each in stored] == ["supervisor_lost", "host_rebooted"]


def test_a_damaged_folder_or_a_spool_with_a_false_end_goes_aside_and_the_others_run(
    acceptor, serve, attempts, host_dir
):
    attempts.make("broken").spec.write_bytes(b"\0" * 100)
    false = attempts.make("false")
    false.spool.mkdir()
    end = '{"seq":1,"t_ms":1,"kind":"exited","body":{"exit_code":"x"}}\n'
    (false.spool / "000000000001.jsonl").write_text(end)
    stored = acceptor.want(A1)

    with serve():
        wait_for(lambda: stored.has_exited)
        wait_for(lambda: any(beat.problems for beat in acceptor.beats))
        wait_for(lambda: len(list(host_dir.quarantine.iterdir())) == 2)

    told = [problem for beat in acceptor.beats for problem in beat.problems]
    assert any("the folder of attempt broken is damaged" in problem for problem in told)
    assert {path.name[:5] for path in host_dir.quarantine.iterdir()} == {"broke", "false"}


def test_what_cannot_be_run_is_refused_in_words(acceptor, serve, host_dir):
    """A model outside of the roots, an artefact that is gone, ids that would be paths."""
    outside = acceptor.want(A1, BenchmarkSpec(model=FolderModel(path="/etc")))
    missing = acceptor.want(A2, BenchmarkSpec(model=ArtefactModel(attempt_id="gone")))
    acceptor.want("..")
    acceptor.want("../x")

    with serve():
        wait_for(lambda: outside.has_exited and missing.has_exited)
        num_beats = len(acceptor.beats)
        wait_for(lambda: len(acceptor.beats) > num_beats + 1)

    assert outside.kinds() == ["exited"]
    assert outside.exit["reason"] == "preflight_failed"
    assert "outside of this host's model folders" in outside.exit["last_lines"][0]
    assert missing.exit["reason"] == "model_or_data_missing"
    assert {path.name for path in host_dir.attempts.iterdir()} == {A1, A2}


def test_a_full_disk_refuses_new_attempts_in_words(acceptor, serve, host_dir):
    (host_dir.path / "config.json").write_text('{"min_free_bytes": 1000000000000000}')
    stored = acceptor.want(A1)
    with serve():
        wait_for(lambda: stored.has_exited)
    assert stored.exit["reason"] == "disk_full"
    assert "are required" in stored.exit["last_lines"][0]


def test_no_benchmark_runs_beside_a_job(acceptor, serve):
    stored = acceptor.want(A1)
    slow = (sys.executable, "-c", "import time; time.sleep(60)")
    with serve("import time; time.sleep(1)", bench=slow) as agent:
        wait_for(lambda: stored.events)
        assert not agent.bench.is_running
        wait_for(lambda: stored.has_exited)
        wait_for(lambda: agent.bench.is_running)


def test_a_failed_benchmark_is_a_problem_in_words(acceptor, serve):
    with serve(bench=(sys.executable, "-c", "raise SystemExit('no torch here')")):
        wait_for(lambda: acceptor.beats and acceptor.beats[-1].problems)
    assert acceptor.beats[-1].problems == ("the micro-benchmark failed: no torch here",)


def test_a_second_agent_on_the_same_folder_is_refused(serve, host_dir, credential):
    with serve():
        wait_for(lambda: child.is_locked(host_dir.agent_lock))
        with pytest.raises(AlreadyRunningError, match="another agent serves"):
            Agent(host_dir, credential).run()


def test_a_probe_of_its_lock_does_not_turn_a_starting_agent_down(serve, host_dir, acceptor):
    with ExitStack() as probe:
        probe.enter_context(child.locked(host_dir.agent_lock))
        with serve():
            time.sleep(LOCK_PROBE_SECONDS / 5)
            probe.close()
            wait_for(lambda: acceptor.beats)


def test_a_turned_down_credential_leaves_the_jobs_alone(acceptor, serve, caplog):
    stored = acceptor.want(A1)
    with serve(FOREVER):
        wait_for(lambda: stored.events)
        acceptor.credentials.clear()
        wait_for(lambda: "enrol this host again" in caplog.text)
        assert procfs.processes_of_attempt(A1)


# An operator mended something: the host says at once what it is now.


@pytest.fixture
def agent(acceptor, host_dir, credential):
    acceptor.microbench = MICROBENCH
    host_dir.save_credential(credential)
    now = [1000.0]
    made = Agent(host_dir, credential, clock=lambda: now[0])
    made.now = now
    yield made
    made.client.close()


def step_after(agent: Agent, seconds: float) -> None:
    agent.now[0] += seconds
    agent.step()


def has_facts(acceptor) -> list[bool]:
    return [beat.facts is not None for beat in acceptor.beats]


def test_a_host_that_is_asked_says_it_again_without_waiting(acceptor, agent):
    step_after(agent, 0)
    acceptor.wants_recheck = True
    step_after(agent, 11)
    step_after(agent, 0)
    step_after(agent, 11)
    assert has_facts(acceptor) == [True, False, True, False]


def test_a_host_says_it_again_every_ten_minutes(acceptor, agent):
    step_after(agent, 0)
    step_after(agent, 590)
    step_after(agent, 11)
    assert has_facts(acceptor) == [True, False, True]


def test_a_benchmark_that_failed_runs_again_when_asked(acceptor, agent):
    step_after(agent, 0)
    agent.bench._not_before = float("inf")
    acceptor.wants_recheck = True
    step_after(agent, 11)
    assert agent.bench._not_before == 0.0
