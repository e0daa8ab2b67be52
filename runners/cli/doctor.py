"""``slipway doctor``: checks of this machine and of the configuration, each with a remedy."""

import datetime as dt
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from runners.cli.config import SERVER, Config, data_folder, load_config
from runners.cli.errors import CliError, ExitCode
from runners.cli.output import (
    OutputOption,
    binary_size,
    number,
    seconds,
    show,
    table,
    write_document,
)
from runners.shared.addresses import proxy_of
from runners.shared.environment import NOT_USED, environment_lines

OLDEST_PYTHON = (3, 11)
PACKAGES = ("slipway", "numpy", "scipy", "pydantic", "typer", "rich", "httpx")
LEAST_FREE_BYTES = 64 * 2**20  # plans are small
READY_SECONDS = 5.0


class Check(NamedTuple):
    """The result of one check: ``ok``, a ``note`` without which most works, or ``failed``."""

    name: str
    state: Literal["ok", "note", "failed"]
    words: str


def doctor(
    output: OutputOption = "table",
    *,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's CPU again for plans.")
    ] = False,
) -> None:
    """Check Python, packages, devices, memory, disk and the server; say what to do."""
    if measure:
        from runners.cli.hardware import measure_this_machine

        measure_this_machine()
    checks = [*machine_checks(), *config_checks(os.environ)]
    if output == "table":
        show(table(("Check", "State", "Finding"), checks, fixed=[0, 1]))
    else:
        write_document(json.dumps([check._asdict() for check in checks]), output)
    failed = [check.name for check in checks if check.state == "failed"]
    if failed:
        raise CliError(
            f"failed: {', '.join(failed)}; the table says what to do",
            code="doctor",
            exit_code=ExitCode.FAILED,
        )


def machine_checks() -> Iterator[Check]:
    """Yield the checks of Python, packages, devices, memory and disk."""
    is_new = sys.version_info[:2] >= OLDEST_PYTHON
    need = "" if is_new else "; install Python 3.11 or newer"
    yield Check("Python", "ok" if is_new else "failed", f"{platform.python_version()}{need}")
    yield _packages()
    yield from _devices()
    from runners.cli.hardware import host_memory_bytes

    yield Check("Memory", "ok", binary_size(host_memory_bytes()))
    yield _rates()
    yield _disk(data_folder())
    for line in environment_lines(os.environ):
        yield Check("Environment", "note" if NOT_USED in line else "ok", line)


def _packages() -> Check:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    missing = [name for name in missing if name != "slipway"]  # a checkout is not installed
    words = ", ".join(found)
    if missing:
        return Check("Packages", "failed", f"{words}; missing: pip install {' '.join(missing)}")
    return Check("Packages", "ok", words)


def _devices() -> Iterator[Check]:
    """Yield this machine's GPUs with their problems, or its CPU without one."""
    from runners.cli.hardware import cpu_name

    try:
        from runners.host import inventory
    except ImportError as error:
        yield Check("CPU", "ok", cpu_name())
        install = "pip install 'slipway[worker]' to read GPUs"
        yield Check("GPU", "note", f"not read, {error.name} is not installed: {install}")
        return
    from planner.catalog.devices import device_of_driver

    devices = inventory.devices()
    yield Check("CPU", "ok", cpu_name())
    for gpu in devices.gpus:
        words = f"{gpu.name}, {binary_size(gpu.memory_bytes)}"
        if device_of_driver(gpu.name) is None:
            words += "; not in the catalog: give its rates with --set 'cluster.device={…}'"
            yield Check("GPU", "note", words)
        else:
            yield Check("GPU", "ok", words)
    if not devices.gpus:
        problem = inventory.driver_problem()
        without = "none: `--on this` plans for the CPU"
        yield Check("GPU", "note" if problem else "ok", problem or without)
    for problem in devices.problems:
        yield Check("GPU driver", "note", problem)


def _rates() -> Check:
    """Return the rates that plans for this machine's CPU take, their age and their load."""
    from runners.cli.hardware import kept_rates

    kept = kept_rates()
    if kept is None:
        return Check("CPU rates", "ok", "not measured: the first plan for the CPU measures them")
    flops = kept.device.peak_flops_per_second.get("fp32", 0.0)
    age = (dt.datetime.now(dt.UTC) - kept.measured_at).total_seconds()
    words = (
        f"{number(kept.device.memory_bandwidth_bytes_per_second / 1e9)} GB/s, "
        f"{number(flops / 1e9)} GFLOP/s in fp32, measured {seconds(max(age, 1.0))} ago at a load "
        f"of {kept.load_per_core:.1f} on each core"
    )
    if kept.was_busy:
        words += ": the machine was busy; `slipway doctor --measure` when it is idle"
    return Check("CPU rates", "note" if kept.was_busy else "ok", words)


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK | os.X_OK):
        words = f"{existing} cannot be written: make it yours, or set XDG_DATA_HOME"
        return Check("Disk", "failed", words)
    if free < LEAST_FREE_BYTES:
        need = f"{binary_size(free)} free in {existing}: plans cannot be kept; free some"
        return Check("Disk", "failed", need)
    return Check("Disk", "ok", f"{binary_size(free)} free for plans in {folder}")


def config_checks(variables: Mapping[str, str]) -> Iterator[Check]:
    """Yield the checks of the configuration file and of the server that it names."""
    try:
        config = load_config(variables)
    except CliError as error:
        yield Check("Configuration", "failed", str(error))
        return
    if config.path.exists():
        if config.is_readable_by_others and config.token:
            words = f"others can read the token in it: chmod 600 {config.path}"
            yield Check("Configuration", "failed", words)
        else:
            yield Check("Configuration", "ok", str(config.path))
    yield _server(config, variables)


def _server(config: Config, variables: Mapping[str, str]) -> Check:
    if config.server is None:
        how = f'`server = "https://…"` in {config.path}, or {SERVER}'
        return Check("Server", "ok", f"none: plans are made here; a server is named by {how}")
    import httpx

    url = f"{config.server}/readyz"
    try:
        proxy = proxy_of(url, variables)
    except ImportError:  # it compares addresses with those of this machine
        words = "a proxy is set, which needs psutil: pip install psutil, or unset the proxy"
        return Check("Server", "failed", words)
    try:
        # The environment's proxies are read by proxy_of; certificates count for https alone.
        transport = httpx.HTTPTransport(
            proxy=httpx.Proxy(proxy.url) if proxy else None,
            trust_env=config.server.startswith("https:"),
        )
        with httpx.Client(transport=transport, timeout=READY_SECONDS) as client:
            reply = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        via = f" through {proxy}" if proxy else ""
        words = (
            f"{config.server} does not answer{via} ({error}): start it, or correct the address "
            f"in {config.path} or {SERVER}"
        )
        return Check("Server", "failed", words)
    if reply.status_code != HTTPStatus.OK:
        words = (
            f"{url} answers {reply.status_code} {reply.reason_phrase}: if that is Slipway, its "
            "database does not work and its log says why; else correct the address"
        )
        return Check("Server", "failed", words)
    token = "" if config.token else "; no token is set"
    return Check("Server", "ok", f"{config.server} is ready{token}")
