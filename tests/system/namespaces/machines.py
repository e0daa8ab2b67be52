"""A site on the server of the lab, started by `up`, and shells on its hosts-to-be."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Self

from tests.stack import PASSWORD, ROOT, copy_migrated
from tests.system.boot.test_whole_up import spare_the_benchmark
from tests.system.namespaces.lab import SERVER, Lab
from tests.system.running_up import RunningUp
from tests.webapp.conftest import make_microbench

CHOOSE_PASSWORD = f"""
from django.contrib.auth.models import User
user = User.objects.get(username="admin")
user.set_password({PASSWORD!r})
user.save()
"""


class Machines:
    """The site on the server, and shells on the hosts."""

    def __init__(
        self, folder: Path, lab: Lab, name: str, port: int, *options: str, **environment: str
    ) -> None:
        """Start the site; the hosts know it by a name, at its IPv6 address."""
        self.folder, self.lab = folder, lab
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{lab.address6(SERVER)} {name}\n")
        copy_migrated(folder / "data")
        environment = {"SLIPWAY_DRILLS": "1", **environment}
        self.up = RunningUp(folder / "data", port, *options, **environment)
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Wait for the site, whose own host needs no micro-benchmark."""
        try:
            spare_the_benchmark(self.up.wait_until_ready())
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _command(self, name: str, words: str) -> tuple[list[str], dict[str, str]]:
        """Return a shell's command on a host, and its environment."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        mount = f'mount --bind {self.folder / "hosts"} /etc/hosts && exec sh -c "$1"'
        paths = f"{Path(sys.executable).parent}:{os.defpath}:/usr/sbin:/sbin"
        environment = {"HOME": str(home), "PATH": paths, "PYTHONPATH": str(ROOT)}
        return self.lab.command(name, "sh", "-c", mount, "sh", words), environment

    def type(self, name: str, words: str) -> str:
        """Run a command on a host to its end, and return what it printed."""
        command, environment = self._command(name, words)
        done = subprocess.run(
            command,
            check=False,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done.stdout + done.stderr

    def leave(self, name: str, words: str) -> None:
        """Start a command on a host, and let it run."""
        command, environment = self._command(name, words)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            )

    def manage(self, *words: str) -> str:
        """Run a command of the site on the server."""
        variables = os.environ | {"SLIPWAY_DATA_DIR": str(self.up.data), "SLIPWAY_DRILLS": "1"}
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            check=False,
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @cached_property
    def password(self) -> str:
        """The administrator's password, replaced on the server as `changepassword` does."""
        self.manage("shell", "-c", CHOOSE_PASSWORD)
        return PASSWORD

    def rows(self, query: str, *values: str) -> list[tuple]:
        """Return what the site's database answers."""
        with closing(sqlite3.connect(self.up.data / "slipway.sqlite3", timeout=60)) as rows, rows:
            return rows.execute(query, values).fetchall()

    def spare_benchmarks(self) -> None:
        """Let every host count as measured."""
        bench = make_microbench().model_dump_json()
        self.rows("update hosts_host set microbench = ? where microbench = '{}'", bench)

    def credential(self, name: str) -> dict[str, str]:
        """Return what enrolment gave a host."""
        return json.loads((self.folder / name / ".slipway/host/credential.json").read_text())

    def end(self) -> None:
        """End the agents and the site."""
        for agent in self.agents:
            agent.terminate()
            agent.wait(60)
        self.up.end_by_force()
