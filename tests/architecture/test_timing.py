"""How the times that several processes must agree on compare: who waits for whom."""

import importlib.util
from types import ModuleType

import pytest

from runners.host.commands import render
from runners.shared import timing
from webapp.boot.processes import Child

FAULT_TESTS = 1 / 30  # the scale of tests/system/faults
# Times whose sum is less than that of the next column, and why.
LAWS = (
    (("LIVE_BEAT_SECONDS",), ("BEAT_SECONDS",), "an awaited answer comes sooner than the next heartbeat"),
    (("BEAT_SECONDS", "BEAT_SECONDS"), ("DEGRADED_AFTER_SECONDS",), "one lost heartbeat is no silence"),
    (("DEGRADED_AFTER_SECONDS",), ("UNREACHABLE_AFTER_SECONDS",), "a host is late before it is lost"),
    (("UNREACHABLE_AFTER_SECONDS",), ("CLAIM_TIMEOUT_SECONDS",), "a silent host is named before its job is given up"),
    (("BEAT_SECONDS", "REFUSED_BEAT_SECONDS"), ("CONTACT_PAUSE_SECONDS",), "every host is heard before one is suspected"),
    (("LIVE_BEAT_SECONDS",), ("REFUSED_BEAT_SECONDS",), "a refused host asks less often"),
    (("ENDPOINT_DRAIN_SECONDS",), ("STOP_GRACE_SECONDS",), "open requests end before the kill"),
    (("SCHEDULER_SETTLE_SECONDS",), ("STOP_GRACE_SECONDS", "SCHEDULER_KILL_MARGIN_SECONDS"), "a node's last writes are seen before its job is cancelled"),
    (("WORKER_PING_SECONDS", "WORKER_PING_SECONDS"), ("WORKER_SILENCE_SECONDS",), "one lost ping is no stall"),
    (("OUTPUT_DRAIN_SECONDS",), ("SUPERVISOR_END_SECONDS",), "a supervisor that drains its output has not hung"),
    (("LOCK_PROBE_SECONDS",), ("SUPERVISOR_END_SECONDS",), "a probe is shorter than what it may delay"),
    (("STOP_GRACE_SECONDS", "SUPERVISOR_END_SECONDS"), ("STOP_ALL_SECONDS",), "whoever stops all waits for the kill and the record"),
    (("BEAT_SECONDS", "STOP_GRACE_SECONDS"), ("PEERS_STOP_SECONDS",), "a stop reaches every host, with its grace, before a peer gives up"),
    (("STOP_GRACE_SECONDS", "OUTPUT_DRAIN_SECONDS", "EXPLAIN_KILL_SECONDS"), ("SCHEDULER_END_MARGIN_SECONDS",), "the supervisor ends a job before Slurm does"),
    (("PONG_WAIT_SECONDS",), ("PONG_LIFETIME_SECONDS",), "an answer lives until it is read"),
    (("WORKER_PING_SECONDS", "CLOCK_SKEW_SECONDS"), ("DOORBELL_LIFETIME_SECONDS",), "a doorbell lives until the next one"),
    (("STREAM_PING_SECONDS", "STREAM_PING_SECONDS"), ("CLIENT_SILENCE_SECONDS",), "one lost ping ends no stream"),
)  # fmt: skip
# Of times that no scale shortens, beside some that it does.
UNSCALED_LAWS = (
    (("LONGEST_GAP_SECONDS", "BEAT_SECONDS"), ("DEGRADED_AFTER_SECONDS",), "a short pause of the server makes no host late"),
    (("ENDPOINT_DRAIN_SECONDS",), ("ENGINE_SHUTDOWN_SECONDS",), "an engine ends no request before its endpoint does"),
    (("ENDPOINT_DRAIN_SECONDS", "ENDPOINT_LAST_WORDS_SECONDS"), ("STOP_GRACE_SECONDS",), "clients hear of the end before the kill"),
    (("ENGINE_SHUTDOWN_SECONDS",), ("STOP_GRACE_SECONDS",), "an engine ends by itself before the kill"),
    (("STOP_GRACE_SECONDS",), ("BENCHMARKED_ENDPOINT_STOP_SECONDS",), "an endpoint that was measured ends by itself"),
    (("ENGINE_START_SECONDS",), ("BENCHMARKED_ENDPOINT_START_SECONDS",), "an endpoint says itself why its engine did not start"),
    (("TUNNEL_PING_SECONDS", "TUNNEL_PONG_SECONDS"), ("UNREACHABLE_AFTER_SECONDS",), "requests to a silent host end before it counts as lost"),
    (("EXPLAIN_KILL_SECONDS",), ("SCHEDULER_KILL_MARGIN_SECONDS",), "a supervisor knows why it was ended before it is killed"),
)  # fmt: skip


def table(scale: float, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module as a process with this scale imports it."""
    monkeypatch.setenv(timing.VARIABLE, str(scale))
    spec = importlib.util.spec_from_file_location("scaled_timing", timing.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(module: ModuleType, names: tuple[str, ...]) -> float:
    return sum(getattr(module, name) for name in names)


def test_who_waits_for_somebody_waits_longer(monkeypatch):
    for scale, laws in ((1.0, LAWS + UNSCALED_LAWS), (0.1, LAWS), (FAULT_TESTS, LAWS)):
        module = table(scale, monkeypatch)
        for less, more, why in laws:
            assert seconds(module, less) < seconds(module, more), (scale, less, more, why)


def test_every_time_of_the_table_is_compared_with_another():
    compared = {
        name for laws in (LAWS, UNSCALED_LAWS) for less, more, _ in laws for name in (*less, *more)
    }
    compared |= {"LONGEST_BEAT_SECONDS", "DOORBELL_STOP_SECONDS"}  # below
    assert {name for name in vars(timing) if name.endswith("_SECONDS")} == compared


def test_an_agent_accepts_the_heartbeat_that_it_is_told():
    assert timing.BEAT_SECONDS <= timing.LONGEST_BEAT_SECONDS


def test_an_agent_has_stopped_its_worker_before_it_is_killed(tmp_path):
    unit = render(tmp_path, user="somebody")
    (limit,) = [line for line in unit.splitlines() if line.startswith("TimeoutStopSec=")]
    killed_after = min(Child("agent", []).grace_s, float(limit.partition("=")[2]))
    assert killed_after > timing.DOORBELL_STOP_SECONDS
