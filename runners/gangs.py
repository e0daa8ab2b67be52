"""A job on several devices or hosts: torchrun around its command, and the network that it needs.

Each host starts one torchrun; the first one's holds the meeting point at the address and port
that the server reserved. How long a silent rank is waited for is the job's own choice, and
every other wait follows from it; only the start, when each host loads its libraries, takes the
time that it needs.
"""

import socket
from collections.abc import Sequence

import psutil

from runners.jobspec import DataParallel
from runners.places import Gang

MEETING = "runners.jobs.meeting"  # torchrun, once there is somebody to meet
SHORTEST_LAST_CALL_SECONDS = 5
LONGEST_LAST_CALL_SECONDS = 30


class NoSuchAddressError(Exception):
    """The address by which others are to reach this host is none of its own."""


def torchrun_argv(command: Sequence[str], gang: Gang, parallel: DataParallel) -> list[str]:
    """Return the command that starts this host's ranks of ``command`` and keeps them together.

    ``command`` begins with a Python interpreter; what follows it goes to each rank. A host that
    does not hold the meeting point itself waits until it is there: torchrun alone would not.
    """
    python, *program = command
    fewest = min(parallel.min_hosts, gang.num_nodes)
    least = fewest if parallel.on_lost_rank == "shrink" else gang.num_nodes
    options = {
        "nnodes": f"{least}:{gang.num_nodes}",
        "nproc-per-node": gang.num_processes,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": endpoint(gang.master_address, gang.master_port),
        "rdzv-id": gang.rendezvous_id,
        "rdzv-conf": ",".join(f"{key}={value}" for key, value in _waits(gang, parallel).items()),
        "local-addr": gang.own_address,
        "max-restarts": _restarts(gang.num_nodes - least, parallel),
    }
    written = [f"--{name}={value}" for name, value in options.items()]
    torchrun = ["-m", "torch.distributed.run"]
    if gang.node_rank > 0:
        seconds = f"{parallel.start_timeout_seconds:g}"
        torchrun = ["-m", MEETING, gang.master_address, str(gang.master_port), seconds]
    return [python, *torchrun, *written, *program]


def _restarts(may_lose: int, parallel: DataParallel) -> int:
    """Return how often all ranks start again: once for each host that may be lost, or as said."""
    return parallel.max_restarts if parallel.on_lost_rank == "restart" else may_lose


def _waits(gang: Gang, parallel: DataParallel) -> dict[str, int | str]:
    """Return torchrun's waits in seconds: a host counts as lost when its ranks would."""
    patience = int(parallel.rank_timeout_seconds)
    last_call = min(LONGEST_LAST_CALL_SECONDS, max(SHORTEST_LAST_CALL_SECONDS, patience // 4))
    return {
        "is_host": str(gang.node_rank == 0).lower(),
        "join_timeout": int(parallel.start_timeout_seconds),
        "last_call_timeout": last_call,
        "read_timeout": patience,
        "keep_alive_interval": max(1, patience // 6),
        "keep_alive_max_attempt": 3,
    }


def endpoint(address: str, port: int) -> str:
    """Return address and port in one, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def gang_env(gang: Gang) -> dict[str, str]:
    """Return what a gang's processes find in their environment beside a job's own.

    Raises:
        NoSuchAddressError: this host has no such address.
    """
    interface = interface_of(gang.own_address)
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        # A store of its own for each round: after a round was lost, nothing of it is read again.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Threads that meet in malloc get heaps of their own, each with holes: a training on two
        # ranks peaked anywhere from 627 to 680 MiB, and from 621 to 628 with one heap.
        "MALLOC_ARENA_MAX": "1",
    }


def interface_of(address: str) -> str:
    """Return the network interface that has an address.

    Raises:
        NoSuchAddressError: none has it.
    """
    for interface, found in psutil.net_if_addrs().items():
        if any(_plain(each.address) == address for each in found):
            return interface
    known = ", ".join(own_addresses()) or "none"
    raise NoSuchAddressError(
        f"{address} is not an address of this host (it has {known}); choose another on the "
        "host's page, or enrol it again with --address"
    )


def own_addresses(chosen: str | None = None) -> tuple[str, ...]:
    """Return the addresses by which other hosts may reach this one, the chosen one first.

    IPv4 comes before IPv6; what only this machine or this link can use is left out.
    """
    stats = psutil.net_if_stats()
    found = [
        _plain(each.address)
        for interface, addresses in psutil.net_if_addrs().items()
        if interface in stats and stats[interface].isup
        for each in addresses
        if each.family in {socket.AF_INET, socket.AF_INET6} and _is_reachable(each.address)
    ]
    by_kind = sorted(dict.fromkeys(found), key=lambda address: ":" in address)
    first = (chosen,) if chosen else ()
    return (*first, *(address for address in by_kind if address != chosen))


def _plain(address: str) -> str:
    return address.partition("%")[0]


def _is_reachable(address: str) -> bool:
    return not address.startswith(("127.", "169.254.", "fe80:")) and address != "::1"
