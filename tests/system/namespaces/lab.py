"""A network of the test's own: a server and hosts in namespaces, joined by a switch in another.

Nothing outside the namespaces is touched or reached. Root and iproute2 are needed.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
SERVER = "server"
SERVER_ADDRESS = "10.77.0.1"


def why_not() -> str:
    """Return why no network can be made here; nothing where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip of the Debian package iproute2"
    name = f"slw{os.getpid()}-try"
    made = _ip("netns", "add", name, must_work=False)
    if made.returncode:
        return f"this machine makes no network namespaces: {made.stderr.strip()}"
    links = _ip("-n", name, "link", "add", "br0", "type", "bridge", must_work=False)
    _ip("netns", "del", name)
    return f"no bridge can be made here: {links.stderr.strip()}" if links.returncode else ""


def _ip(*arguments: str, must_work: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=must_work)


MARKS = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


class Lab:
    """Machines on one switch; a link can be cut at the switch, as by pulling a cable there."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts
        self._prefix = f"slw{os.getpid()}"
        self._machines = [SERVER, *hosts]

    def __enter__(self) -> "Lab":
        """Lay the network out."""
        _ip("netns", "add", self.space("switch"))
        self._in("switch", "link", "add", "br0", "type", "bridge")
        self._in("switch", "link", "set", "br0", "up")
        for name in self._machines:
            self._plug(name)
        return self

    def __exit__(self, *_: object) -> None:
        """Take it away; whoever still runs in a namespace is ended."""
        for name in [*self._machines, "switch"]:
            pids = _ip("netns", "pids", self.space(name), must_work=False).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    if int(pid) != os.getpid():
                        os.kill(int(pid), 9)
            _ip("netns", "del", self.space(name), must_work=False)

    def space(self, name: str) -> str:
        """Return the namespace of a machine."""
        return f"{self._prefix}-{name}"

    def address(self, name: str) -> str:
        """Return a machine's address."""
        return SERVER_ADDRESS if name == SERVER else f"10.77.0.{11 + self.hosts.index(name)}"

    def address6(self, name: str) -> str:
        """Return a machine's IPv6 address."""
        return f"fd77::{self.address(name).rpartition('.')[2]}"

    def _plug(self, name: str) -> None:
        _ip("netns", "add", self.space(name))
        self._in("switch", "link", "add", f"p-{name}", "type", "veth", "peer", "name", "eth0",
                 "netns", self.space(name))  # fmt: skip
        self._in("switch", "link", "set", f"p-{name}", "master", "br0", "up")
        self._in(name, "link", "set", "lo", "up")
        self._in(name, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        self._in(name, "address", "add", f"{self.address6(name)}/64", "dev", "eth0", "nodad")
        self._in(name, "link", "set", "eth0", "up")

    def _in(self, name: str, *arguments: str) -> None:
        _ip("-n", self.space(name), *arguments)

    def cut(self, name: str) -> None:
        """Cut a machine off."""
        self._in("switch", "link", "set", f"p-{name}", "down")

    def heal(self, name: str) -> None:
        """Connect it again."""
        self._in("switch", "link", "set", f"p-{name}", "up")

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return a command that runs on a machine."""
        return ["ip", "netns", "exec", self.space(name), *arguments]


@contextlib.contextmanager
def inside(space: str) -> Iterator[None]:
    """Have this thread, and what it starts, live in a namespace while the block runs."""
    with (
        Path("/proc/thread-self/ns/net").open() as own,
        Path(f"/run/netns/{space}").open() as there,
    ):
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
