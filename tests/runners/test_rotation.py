"""What host and server agree on: new secrets, the epoch, addresses of Redis, a scale of time."""

import os
import stat
import subprocess
import sys

import pytest

from runners.__main__ import main
from runners.host.agent import Agent
from runners.host.enrolment import EPOCH, EpochMemory, RotationError, rotate
from runners.host.redis_access import celery_options, connect
from runners.host.shipping import RefusedError, UnreachableError
from runners.shared import timing
from runners.shared.messages import BeatReply, EpochShown, StopOrder, WantedAttempt
from runners.shared.reasons import Reason
from runners.shared.redis_address import UnsafeAddressError, bare, celery_url, with_user
from runners.supervision import child
from tests.runners.test_agent import MICROBENCH
from tests.runners.tools import wait_for

# New secrets: made on the host, taken by the server at once, never lost between the two.


@pytest.fixture
def enrolled(host_dir, credential):
    host_dir.save_credential(credential)
    return credential


def test_a_rotated_host_speaks_under_a_secret_that_it_made_itself(acceptor, host_dir, enrolled):
    """The server is told digests alone, and the old secret ends at once."""
    fresh = rotate(host_dir)
    assert host_dir.credential() == fresh
    assert fresh.credential != enrolled.credential
    assert fresh.command_key == "fresh-key"
    assert acceptor.knows(fresh.credential)
    assert not acceptor.knows(enrolled.credential)
    assert fresh.credential not in acceptor.credentials | acceptor.digests


def test_a_lost_reply_is_made_good_by_the_next_try(acceptor, host_dir, enrolled):
    acceptor.lose_replies = 1
    with pytest.raises(RefusedError):
        rotate(host_dir)
    assert host_dir.credential() == enrolled
    files = [host_dir.path / name for name in ("credential.json", "credential.next.json")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]
    fresh = rotate(host_dir)
    assert acceptor.knows(fresh.credential)
    assert not (host_dir.path / "credential.next.json").exists()


def test_two_rotations_at_once_do_not_mix_and_a_damaged_note_is_written_anew(
    acceptor, host_dir, enrolled
):
    (host_dir.path / "credential.next.json").write_text("{")
    assert acceptor.knows(rotate(host_dir).credential)
    with child.locked(host_dir.path / "rotate.lock"):
        with pytest.raises(RotationError, match="another process"):
            rotate(host_dir)


def test_an_absent_server_leaves_the_old_secrets(host_dir, enrolled):
    host_dir.save_credential(enrolled.model_copy(update={"server": "http://127.0.0.1:9"}))
    with pytest.raises(UnreachableError):
        rotate(host_dir)
    assert host_dir.credential().credential == enrolled.credential


def test_a_host_that_is_locked_out_is_told_to_enrol_again(acceptor, host_dir, enrolled, capsys):
    acceptor.credentials.clear()
    assert main(["rotate", "--dir", str(host_dir.path)]) == 1
    assert "enrol this host again" in capsys.readouterr().err


def test_the_command_says_what_happens_to_a_running_agent(acceptor, host_dir, enrolled, capsys):
    assert main(["rotate", "--dir", str(host_dir.path)]) == 0
    assert "uses them from its next heartbeat" in capsys.readouterr().out


class Worker:
    """What lives beside the agent and reads its secret as it starts."""

    def __init__(self) -> None:
        self.num_stops = 0

    def keep_running(self) -> None:
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
    """Its Redis was taken away as well: it goes on without its worker."""
    acceptor.wants_rotation = True
    agent._companion = worker = Worker()
    agent.step()
    fresh = host_dir.credential()
    assert acceptor.knows(fresh.credential)
    assert (worker.num_stops, agent._companion) == (1, None)
    num_beats = len(acceptor.beats)
    agent.step()
    assert len(acceptor.beats) == num_beats + 1


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


# A host remembers how far its server had come, across restarts of its agent.


def reply(number: int | None, **changes) -> BeatReply:
    said = None if number is None else EpochShown(number=number, proof="a" * 64)
    return BeatReply(server_time_ms=1, epoch=said, **changes)


ORDERS = {
    "wanted": (WantedAttempt(attempt_id="01", fence="f"),),
    "stop": (StopOrder(attempt_id="02", reason=Reason.STOPPED_BY_USER),),
    "forget": ("03",),
    "rotate": True,
    "acked": {"04": 7},
}


@pytest.fixture
def memory(tmp_path) -> EpochMemory:
    memory = EpochMemory(tmp_path)
    memory.without_unsafe_orders(reply(7))
    return memory


def test_a_server_that_is_no_further_back_is_heeded(memory):
    for number in [7, 8, None]:
        assert memory.without_unsafe_orders(reply(number, **ORDERS)) == (
            reply(number, **ORDERS),
            "",
        ), number


def test_a_server_that_went_back_starts_stops_and_forgets_nothing(memory):
    held, words = memory.without_unsafe_orders(reply(6, **ORDERS))
    assert (held.wanted, held.stop, held.forget, held.rotate) == ((), (), (), False)
    assert held.acked == {"04": 7}
    assert "shows epoch 6, but this host has seen 7" in words


def test_it_is_remembered_by_the_next_agent_and_a_damaged_memory_is_none(memory, tmp_path):
    assert EpochMemory(tmp_path).without_unsafe_orders(reply(6))[1]
    assert oct((tmp_path / EPOCH).stat().st_mode)[-3:] == "600"
    (tmp_path / EPOCH).write_text("{")
    assert EpochMemory(tmp_path).seen is None


def test_after_it_was_raised_the_server_is_heeded_again(memory):
    memory.without_unsafe_orders(reply(6, **ORDERS))
    assert memory.without_unsafe_orders(reply(8, **ORDERS))[1] == ""
    assert memory.seen is not None
    assert memory.seen.number == 8


def test_a_host_that_is_enrolled_anew_begins_anew(memory, tmp_path):
    memory.forget()
    assert EpochMemory(tmp_path).without_unsafe_orders(reply(1, **ORDERS)) == (
        reply(1, **ORDERS),
        "",
    )


# Addresses of Redis: users, secrets, and checks that none may switch off.

ADDRESSES = [
    ("redis://h:6379/0", "redis://u:s@h:6379/0"),
    ("rediss://h/1?health_check_interval=5", "rediss://u:s@h/1?health_check_interval=5"),
    ("unix:///run/r.sock", "unix://u:s@/run/r.sock"),
    ("unix:///run/r.sock?db=2", "unix://u:s@/run/r.sock?db=2"),
]


def test_an_address_takes_a_user_and_gives_up_every_secret():
    for plain, named in ADDRESSES:
        assert with_user(plain, "u", "s") == named, (plain, named)
        assert bare(named) == plain, (plain, named)
        assert with_user(named, "u", "s") == named, (plain, named)
    assert bare("unix:///r.sock?db=1&password=secret&username=me") == "unix:///r.sock?db=1"
    url = with_user("unix:///run/r.sock?db=2", "u", "s")
    assert celery_url(url) == "redis+socket://u:s@/run/r.sock?virtual_host=2"


def test_an_address_that_switches_the_check_off_is_refused():
    for speak in [connect, celery_options]:
        for query in ["ssl_cert_reqs=none", "ssl_cert_reqs=optional", "ssl_check_hostname=False"]:  # fmt: skip
            with pytest.raises(UnsafeAddressError, match="SLIPWAY_REDIS_CA"):
                speak(f"rediss://broker:6380/0?{query}")


# One scale shortens what server and host wait for, and never below what a machine can keep.

ASK = (
    "from runners.host import agent; from runners.supervision import supervisor;"
    "from webapp.hosts import services;"
    "print(agent.LIVE_BEAT_SECONDS, supervisor.TICK_SECONDS, services.UNREACHABLE_AFTER_SECONDS)"
)


def test_a_scale_that_makes_no_sense_is_refused_with_the_way_out():
    for text in ["0", "-1", "2", "nan", "soon"]:
        with pytest.raises(ValueError, match=f"SLIPWAY_TIME_SCALE is '{text}'.*Unset it"):
            timing.scale_of(text)


def test_a_span_is_as_documented_or_shortened_to_its_least(monkeypatch):
    assert timing.SCALE == 1
    assert timing.scale_duration(90.0, least=2.0) == 90.0
    monkeypatch.setattr(timing, "SCALE", 0.02)
    spans = [
        timing.scale_duration(90.0),
        timing.scale_duration(2.0, least=0.5),
        timing.scale_duration(0.25, least=0.5),
    ]
    assert spans == [1.8, 0.5, 0.25]


def test_server_and_host_read_the_same_setting():
    environment = os.environ | {
        "SLIPWAY_TIME_SCALE": "0.1",
        "DJANGO_SETTINGS_MODULE": "webapp.settings",
    }
    code = f"import django; django.setup(); {ASK}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"0.2", b"0.2", b"9.0"]
