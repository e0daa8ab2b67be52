"""The Celery app of one host; it only receives wake-up messages.

The agent starts it as ``celery -A runners.app worker`` with ``SLIPWAY_HOST_DIR`` set. All keys
of the host have one prefix, so that a Redis user limited to it suffices.
"""

import os
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_process_init

from runners.config import Credential, HostDir
from runners.parentage import die_with
from runners.redis_access import celery_options
from runners.redis_address import key_prefix
from runners.timing import scaled

QUEUE = "jobs"
TASK_MODULE = "runners.tasks"
HOST_DIR_VARIABLE = "SLIPWAY_HOST_DIR"
AGENT_VARIABLE = "SLIPWAY_AGENT_PID"


def settings(credential: Credential, ca_file: Path | str | None = None) -> dict[str, Any]:
    """Return the worker's settings, which were tested against kills of broker and worker.

    Raises:
        UnsafeAddressError: the address disables certificate verification.
    """
    broker = celery_options(credential.worker_url or "", ca_file)
    is_socket = broker["broker_url"].startswith("redis+socket")
    return broker | {
        "broker_transport_options": {
            "visibility_timeout": scaled(120, least=2),
            "unacked_restore_interval": scaled(5, least=0.5),
            "unacked_restore_throttle": 1,
            "socket_timeout": 5,
            "socket_connect_timeout": 2,
            "socket_keepalive": not is_socket,
            "health_check_interval": 10,
            "global_keyprefix": key_prefix(credential.host_id),
        },
        "task_default_queue": QUEUE,
        "imports": (TASK_MODULE,),
        # If off, a message acknowledged during an outage blocks its slot forever; if on, the
        # worker may exit after an outage, and the agent restarts it.
        "worker_enable_remote_control": True,
        "worker_send_task_events": False,
        "task_send_sent_event": False,
        "task_acks_late": True,
        "task_reject_on_worker_lost": False,
        "worker_prefetch_multiplier": 1,
        "task_time_limit": 30,
        "task_soft_time_limit": 20,
        "worker_soft_shutdown_timeout": 5,
        "worker_max_tasks_per_child": 200,
        "task_ignore_result": True,
        "result_backend": None,
        "accept_content": ["json"],
        "task_serializer": "json",
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_hijack_root_logger": False,
    }


def make_app() -> Celery:
    """Return the app of the host folder in ``SLIPWAY_HOST_DIR``."""
    celery = Celery("slipway-host")
    if folder := os.environ.get(HOST_DIR_VARIABLE):
        host_dir = HostDir(Path(folder))
        celery.conf.update(settings(host_dir.credential(), host_dir.redis_ca()))
    return celery


@worker_init.connect
def end_with_agent(**_: object) -> None:
    """Make the worker die with its agent."""
    if agent := os.environ.get(AGENT_VARIABLE):
        die_with(int(agent))


@worker_process_init.connect
def end_with_worker(**_: object) -> None:
    """Make each pool process die with the worker."""
    die_with(os.getppid())


app = make_app()
