"""The table of times that several processes must agree on, and the scale of all times.

A time that one process alone needs stands beside its use. ``tests/architecture/test_timing.py``
holds how those of the table compare: who waits for whom.

``SLIPWAY_TIME_SCALE`` (default 1) multiplies every period and timeout of server and host, so
that a test of ninety seconds of silence takes three. Both sides must use the same scale.
Standard library only: the supervisor imports it too.
"""

import os

VARIABLE = "SLIPWAY_TIME_SCALE"


def scale_of(text: str) -> float:
    """Return the scale of a setting.

    Raises:
        ValueError: the setting is not a number above 0 and at most 1.
    """
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor <= 1.0:
        raise ValueError(
            f"{VARIABLE} is {text!r}; it must be a number above 0 and at most 1. Unset it to "
            "wait as long as the documentation says."
        )
    return factor


SCALE = scale_of(os.environ.get(VARIABLE) or "1")


def scale_duration(seconds: float, *, least: float = 0.0) -> float:
    """Return a scaled duration, never shortened below ``least``."""
    return max(seconds * SCALE, min(seconds, least))


# Contact: the agent sends heartbeats, the server waits for them.
LONGEST_BEAT_SECONDS = 10.0  # that an agent accepts unless its configuration says otherwise
BEAT_SECONDS = scale_duration(LONGEST_BEAT_SECONDS, least=0.2)  # between heartbeats, at enrolment
LIVE_BEAT_SECONDS = scale_duration(2.0, least=0.2)  # while the server awaits an answer
REFUSED_BEAT_SECONDS = scale_duration(30.0, least=0.5)  # of a host that the server turned away
DEGRADED_AFTER_SECONDS = scale_duration(30.0)  # of silence, a host gets no new jobs
UNREACHABLE_AFTER_SECONDS = scale_duration(90.0)  # of silence, it counts as lost
# The server suspects no host for this long after it starts or was suspended: all must be heard.
CONTACT_PAUSE_SECONDS = scale_duration(60.0, least=2.0)
# Between two looks of the server at its hosts; after a longer one it was suspended itself.
LONGEST_GAP_SECONDS = scale_duration(15.0, least=2.0)
CLAIM_TIMEOUT_SECONDS = scale_duration(120.0, least=8.0)  # from an allocation to the host's claim

# A stop: SIGTERM to a job's processes, the grace, SIGKILL. All in it wait for less than the next.
STOP_GRACE_SECONDS = scale_duration(15.0, least=0.5)  # supervisor for job: a checkpoint is saved
ENDPOINT_DRAIN_SECONDS = scale_duration(8.0, least=0.3)  # endpoint for its open requests
ENDPOINT_LAST_WORDS_SECONDS = 2  # then: endpoint for clients to receive an error, whole seconds
ENGINE_SHUTDOWN_SECONDS = 10  # an engine's process for its requests, whole seconds
EXPLAIN_KILL_SECONDS = 5.0  # supervisor for a scheduler's word of why it was ended
OUTPUT_DRAIN_SECONDS = 1.0  # supervisor for the last output of processes that have ended
SUPERVISOR_END_SECONDS = 5.0  # agent for a supervisor that has reported the exit
STOP_ALL_SECONDS = 30.0  # ``slipway-host stop-all`` for every supervisor of the host
PEERS_STOP_SECONDS = 30.0  # a rank whose peers were stopped, for the stop of its own host
BENCHMARKED_ENDPOINT_STOP_SECONDS = 60.0  # a load benchmark for the endpoint that it started
DOORBELL_STOP_SECONDS = 5.0  # agent for its Celery worker; ``up`` gives the agent itself ten

# A start: hundreds of GB from a slow disk, then kernel compilation.
ENGINE_START_SECONDS = 1800.0  # endpoint for the engine that it starts
BENCHMARKED_ENDPOINT_START_SECONDS = 1860.0  # a load benchmark for the endpoint that it started

# A scheduler: nodes see a shared folder late, and a job ends at its limit whatever it does.
SCHEDULER_SETTLE_SECONDS = scale_duration(30.0, least=2.0)  # until a folder shows a node's writes
SCHEDULER_KILL_MARGIN_SECONDS = scale_duration(30.0, least=2.0)  # after the grace: it is killed
SCHEDULER_END_MARGIN_SECONDS = 30.0  # before its limit, the supervisor stops the job

# Doorbell: signed Celery messages from the server wake the agent.
WORKER_PING_SECONDS = scale_duration(60.0, least=2.0)  # between the server's pings of a worker
WORKER_SILENCE_SECONDS = scale_duration(180.0, least=6.0)  # without a ping, a worker is stalled
DOORBELL_LIFETIME_SECONDS = 300  # of a signed message
CLOCK_SKEW_SECONDS = 30  # between server and host, for a signed message
PONG_WAIT_SECONDS = 3.0  # server for the answer to a test of a queue
PONG_LIFETIME_SECONDS = 60  # of an answer in Redis

# A lock that somebody may hold for an instant, to see whether it is held: for this long whoever
# takes it waits, so that no probe turns it down.
LOCK_PROBE_SECONDS = 1.0

# Tunnels: each end pings the other, and so notices one that is gone without a word. No scale
# shortens them, as a loaded machine is slow to answer.
TUNNEL_PING_SECONDS = 20.0  # between two pings
TUNNEL_PONG_SECONDS = 20.0  # for the answer; without one, the connection is lost

# Server-sent events: proxies and clients cut silent connections.
STREAM_PING_SECONDS = 15.0
CLIENT_SILENCE_SECONDS = 60.0  # after which the Python client gives a connection up
