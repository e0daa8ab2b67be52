"""New secrets: made on the host, taken by the server at once, never lost between the two."""

import stat

import pytest

from runners.__main__ import main
from runners.agent import Agent
from runners.client import RefusedError, UnreachableError
from runners.enrolment import RotationError, rotate
from runners.supervision import record
from tests.runners.test_agent import MICROBENCH
from tests.runners.tools import wait_for


@pytest.fixture
def enrolled(host_dir, credential):
    host_dir.save_credential(credential)
    return credential


def test_a_rotated_host_speaks_under_a_secret_that_it_made_itself(acceptor, host_dir, enrolled):
    fresh = rotate(host_dir)

    assert host_dir.credential() == fresh
    assert fresh.credential != enrolled.credential
    assert fresh.command_key == "fresh-key"
    assert acceptor.knows(fresh.credential)


def test_the_old_secret_ends_at_once(acceptor, host_dir, enrolled):
    rotate(host_dir)

    assert not acceptor.knows(enrolled.credential)


def test_the_server_is_told_digests_alone(acceptor, host_dir, enrolled):
    fresh = rotate(host_dir)

    assert fresh.credential not in acceptor.credentials | acceptor.digests


def test_the_files_are_for_their_owner_only(acceptor, host_dir, enrolled):
    acceptor.lose_replies = 1
    with pytest.raises(RefusedError):
        rotate(host_dir)

    files = [host_dir.path / name for name in ("credential.json", "credential.next.json")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]


def test_a_lost_reply_is_made_good_by_the_next_try(acceptor, host_dir, enrolled):
    acceptor.lose_replies = 1
    with pytest.raises(RefusedError):
        rotate(host_dir)
    assert host_dir.credential() == enrolled

    fresh = rotate(host_dir)

    assert acceptor.knows(fresh.credential)
    assert not (host_dir.path / "credential.next.json").exists()


def test_a_damaged_note_of_an_earlier_try_is_written_anew(acceptor, host_dir, enrolled):
    (host_dir.path / "credential.next.json").write_text("{")

    assert acceptor.knows(rotate(host_dir).credential)


def test_an_absent_server_leaves_the_old_secrets(host_dir, enrolled):
    host_dir.save_credential(enrolled.model_copy(update={"server": "http://127.0.0.1:9"}))

    with pytest.raises(UnreachableError):
        rotate(host_dir)
    assert host_dir.credential().credential == enrolled.credential


def test_a_host_that_is_locked_out_is_told_to_enrol_again(acceptor, host_dir, enrolled, capsys):
    acceptor.credentials.clear()

    assert main(["rotate", "--dir", str(host_dir.path)]) == 1
    assert "enrol this host again" in capsys.readouterr().err


def test_two_rotations_at_once_do_not_mix(acceptor, host_dir, enrolled):
    with record.locked(host_dir.path / "rotate.lock"):
        with pytest.raises(RotationError, match="another process"):
            rotate(host_dir)


def test_the_command_says_what_happens_to_a_running_agent(acceptor, host_dir, enrolled, capsys):
    assert main(["rotate", "--dir", str(host_dir.path)]) == 0

    assert "uses them from its next heartbeat" in capsys.readouterr().out


class Worker:
    """What lives beside the agent and reads its secret as it starts."""

    def __init__(self) -> None:
        self.num_stops = 0

    def tend(self) -> None:
        pass

    def stop(self) -> None:
        self.num_stops += 1


@pytest.fixture
def agent(acceptor, host_dir, enrolled):
    acceptor.microbench = MICROBENCH
    made = Agent(host_dir, enrolled)
    yield made
    made.client.close()


def test_an_agent_rotates_when_an_operator_asks(acceptor, host_dir, agent):
    acceptor.wants_rotation = True
    agent._companion = worker = Worker()

    agent.step()

    fresh = host_dir.credential()
    assert acceptor.knows(fresh.credential)
    assert worker.num_stops == 1
    num_beats = len(acceptor.beats)
    agent.step()
    assert len(acceptor.beats) == num_beats + 1


def test_an_agent_whose_redis_was_taken_away_goes_on_without_its_worker(acceptor, agent):
    acceptor.wants_rotation = True
    agent._companion = worker = Worker()

    agent.step()

    assert worker.num_stops == 1
    assert agent._companion is None


def test_an_agent_takes_over_what_the_command_wrote_beside_it(acceptor, host_dir, agent):
    rotate(host_dir)

    def is_heard() -> bool:
        agent.step()
        return bool(acceptor.beats)

    wait_for(is_heard)


def test_an_agent_that_is_locked_out_goes_on_asking(acceptor, agent, caplog):
    acceptor.credentials.clear()

    agent.step()

    assert "enrol this host again with a new token" in caplog.text
