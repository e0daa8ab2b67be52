"""Launches a job on several devices or hosts with torchrun, and finds the network interface.

Each host starts one torchrun; the first host's serves the rendezvous at the address and port
reserved by the server. The job sets the timeout for a silent rank, from which all other
timeouts are derived, except the start timeout: loading the libraries takes longer.
"""

import os
import socket
from collections.abc import Sequence

import psutil

from runners.jobspec import DataParallel
from runners.messages import Gang

MEETING = "runners.jobs.meeting"  # starts torchrun when the rendezvous is reachable
SHORTEST_LAST_CALL_SECONDS = 5
LONGEST_LAST_CALL_SECONDS = 30


class NoSuchAddressError(Exception):
    """The configured address is not one of this host's addresses."""


def torchrun_argv(command: Sequence[str], gang: Gang, parallel: DataParallel) -> list[str]:
    """Return the torchrun command that runs this host's ranks of ``command``.

    ``command`` begins with a Python interpreter; the rest goes to each rank. Hosts other than
    the rendezvous host wait until it is reachable, which torchrun alone does not.
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
        "rdzv-conf": ",".join(
            f"{key}={value}" for key, value in _rendezvous_timeouts(gang, parallel).items()
        ),
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
    """Return the number of restarts of all ranks: ``max_restarts``, or one per host to lose."""
    return parallel.max_restarts if parallel.on_lost_rank == "restart" else may_lose


def _rendezvous_timeouts(gang: Gang, parallel: DataParallel) -> dict[str, int | str]:
    """Return torchrun's rendezvous timeouts in seconds, derived from the rank timeout."""
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
    """Return ``address:port``, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def gang_env(gang: Gang) -> dict[str, str]:
    """Return the additional environment variables of a gang's processes.

    Interfaces that the agent's own environment names stay: NCCL's may be InfiniBand's.

    Raises:
        NoSuchAddressError: this host has no such address.
    """
    interface = interface_of(gang.own_address)
    return {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", interface),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface),
        # One store per rendezvous round: a lost round leaves no stale keys.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # One malloc arena, because contending threads get fragmented arenas of their own: a
        # training on two ranks peaked at 627 to 680 MiB, and at 621 to 628 MiB with one arena.
        "MALLOC_ARENA_MAX": "1",
    }


def interface_of(address: str) -> str:
    """Return the network interface that has an address.

    Raises:
        NoSuchAddressError: no interface has it.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(_plain(each.address) == address for each in addresses):
            return interface
    known = ", ".join(own_addresses()) or "none"
    raise NoSuchAddressError(
        f"{address} is not an address of this host (it has {known}); choose another on the "
        "host's page, or enrol it again with --address"
    )


def own_addresses(chosen: str | None = None) -> tuple[str, ...]:
    """Return this host's addresses for other hosts, the chosen one first.

    IPv4 comes before IPv6; loopback and link-local addresses are left out.
    """
    stats = psutil.net_if_stats()
    reachable = [
        _plain(each.address)
        for interface, addresses in psutil.net_if_addrs().items()
        if interface in stats and stats[interface].isup
        for each in addresses
        if each.family in {socket.AF_INET, socket.AF_INET6} and _is_reachable(each.address)
    ]
    by_kind = sorted(dict.fromkeys(reachable), key=lambda address: ":" in address)
    first = (chosen,) if chosen else ()
    return (*first, *(address for address in by_kind if address != chosen))


def _plain(address: str) -> str:
    return address.partition("%")[0]


def _is_reachable(address: str) -> bool:
    return not address.startswith(("127.", "169.254.", "fe80:")) and address != "::1"
