"""Server-side preflight: check a host by its last heartbeat before a queued job starts.

It is cheap and avoids starts that must fail; the host checks its current state again before
it claims (``runners/preflight.py``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.models import Device, Host, HostState
from webapp.jobs.models import Job
from webapp.jobs.places import free_port, meeting_address

MIN_FREE_DISK_BYTES = 1024**3
GIB = 1024**3


class Check(NamedTuple):
    """A preflight check of a host: result, sentence and remedy."""

    name: str
    is_ok: bool
    sentence: str
    remedy: str = ""  # what to do if the check failed

    def as_detail(self) -> dict[str, Any]:
        """Return the check as the detail of an event."""
        remedy = "" if self.is_ok else self.remedy
        return {"name": self.name, "ok": self.is_ok, "sentence": self.sentence, "remedy": remedy}


def run_checks(job: Job, host: Host, devices: Sequence[Device] = ()) -> list[Check]:
    """Return all checks of ``job`` on ``host`` and its devices, from the last heartbeat.

    Predicted memory is checked on each GPU, or on the host if the job has none.
    """
    gpus = [device for device in devices if device.kind == "gpu"]
    memory = [_gpu_memory(job, host, gpu) for gpu in gpus] or [_memory(job, host)]
    checks = [_state(host), _contact(host), _disk(host), *memory]
    return [*checks, *_rendezvous(job, host)] if job.is_shared_out else checks


def _rendezvous(job: Job, host: Host) -> list[Check]:
    """Return whether the job's other hosts can reach this one and a port is free."""
    address = meeting_address(job, host)
    address_words = (
        f"Others reach the host at {address}." if address else "The host has no address."
    )
    remedy = "Connect it to the others' network and restart its agent, or take it out of the pool."
    port = free_port(host)
    port_words = (
        f"Port {port} is free for meeting." if port else "Every port for meeting is in use."
    )
    port_remedy = 'Widen "first_gang_port" to "last_gang_port" in its config.json, or wait.'
    return [
        Check("address", bool(address), address_words, remedy),
        Check("meeting port", port is not None, port_words, port_remedy),
    ]


def _state(host: Host) -> Check:
    label = host.get_state_display().lower()
    remedy = "Let an operator make it ready again on its page, or choose another host."
    return Check("state", host.state == HostState.READY, f"The host is {label}.", remedy)


def _contact(host: Host) -> Check:
    silent = silent_seconds(host)
    words = "has never reported" if silent is None else f"was heard {silent:.0f} s ago"
    remedy = "See whether the host is on and its agent runs; the job starts when it is back."
    is_heard = contact_of(host) in {Contact.LIVE, Contact.DEGRADED}
    return Check("contact", is_heard, f"The host {words}.", remedy)


def _disk(host: Host) -> Check:
    free = int(host.last_beat.get("disk_free_bytes") or 0)
    is_ok = free >= MIN_FREE_DISK_BYTES
    sentence = (
        f"{free / GIB:.1f} GiB of disk are free; a job needs {MIN_FREE_DISK_BYTES / GIB:.0f}."
    )
    return Check("disk", is_ok, sentence, "Free some space on the host.")


def gpu_load(host: Host, device: Device) -> dict[str, Any]:
    """Return the GPU's load from the host's last heartbeat; empty if it has none."""
    loads = host.last_beat.get("gpus") or ()
    return next((load for load in loads if load.get("uuid") == device.uuid), {})


def _gpu_memory(job: Job, host: Host, gpu: Device) -> Check:
    name, required = f"memory of GPU {gpu.index}", _required_bytes(job)
    if required is None:
        return Check(name, is_ok=True, sentence="No peak memory was predicted for this job.")
    free = gpu.memory_bytes - int(gpu_load(host, gpu).get("memory_used_bytes") or 0)
    sentence = (
        f"{free / GIB:.2f} GiB of GPU {gpu.index} are free; "
        f"the job is predicted to need at least {required / GIB:.2f} of it."
    )
    remedy = "See on the host's page what else uses the GPU, or cordon it until that has ended."
    return Check(name, free >= required, sentence, remedy)


def _required_bytes(job: Job) -> float | None:
    peak = job.prediction.get("peak_memory_bytes") or {}
    return peak.get("low") or peak.get("value")


def _memory(job: Job, host: Host) -> Check:
    if host.kind == "slurm":
        return Check("memory", is_ok=True, sentence="Slurm gives the job memory of its own node.")
    available = int(host.last_beat.get("memory_available_bytes") or 0)
    required = _required_bytes(job)
    if required is None:
        return Check("memory", is_ok=True, sentence="No peak memory was predicted for this job.")
    sentence = (
        f"{available / GIB:.2f} GiB of memory are available; "
        f"the job is predicted to need at least {required / GIB:.2f}."
    )
    remedy = "Free memory there, or plan again with a smaller batch or a narrower weight dtype."
    return Check("memory", available >= required, sentence, remedy)
