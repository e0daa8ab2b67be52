"""``manage.py bench``: measure the product's speed, as seconds and as ratios of one run."""

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from planner import speed
from planner.api import estimate
from planner.specs.estimate import EstimateRequest, PlanRequest
from runners.host import bench
from runners.host.bench import Ratio, StoredRatio
from webapp.bench import (
    compression,
    first_line,
    gateway,
    host_load,
    layouts,
    live_path,
    long_history,
    memory,
    site,
    supervising,
)
from webapp.bench.peers import Answer, answers, cohort_figures, rows
from webapp.bench.ratios import keep

ROUNDS = 5
IMPORT_GOAL = "below 0.3"
COMMAND_LINE = {
    "slipway --help": (["--help"], "at most 0.2"),
    "slipway plan serve": (["plan", "serve", "llama-3.1-8b", "--on", "h100-sxm"], "at most 1.0"),
}
SERVE = {
    "model": "meta-llama/Llama-3.1-8B",
    "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 1},
    "workload": {"kind": "serve", "input_tokens": 2048, "output_tokens": 128},
}


class Figure(NamedTuple):
    """One measured number."""

    name: str
    value: float
    unit: str
    goal: str = ""
    ratio: Ratio | None = None  # with its interval, if it was measured as a ratio

    @classmethod
    def of(cls, ratio: Ratio) -> "Figure":
        """Return a ratio as a figure."""
        return cls(f"{ratio.name}, {ratio.of}", ratio.value, "ratio", ratio=ratio)

    @property
    def remark(self) -> str:
        """Return the text after the number: the goal, or the interval."""
        if self.ratio is None:
            return f"   goal: {self.goal}" if self.goal else ""
        return f"   {self.ratio.low:.4g} to {self.ratio.high:.4g}, n = {self.ratio.n}"


def planner_import() -> Iterator[Figure]:
    """Measure the CPU time of `import planner.api` beyond a Python that imports nothing.

    An installed planner has compiled bytecode, as pip writes it; the first import after a change,
    which compiles it, is measured as well. The API functions import their implementation at the
    first call, so the time to one estimate and to one plan is measured too.
    """
    named = {
        "empty": "pass",
        "planner": "import planner",
        "doors": "import planner.api",
        "estimate": _first_call_program("estimate", "EstimateRequest"),
        "plan": _first_call_program("plan", "PlanRequest"),
    }
    times: dict[str, list[float]] = {name: [] for name in (*named, "compiling")}
    with tempfile.TemporaryDirectory() as cache:
        for code in named.values():
            _python(code, bytecode=cache)
        for _ in range(ROUNDS):
            for name, code in named.items():
                times[name].append(_cpu_seconds(partial(_python, code, bytecode=cache)))
            times["compiling"].append(_cpu_seconds(lambda: _python(named["doors"])))
    empty, planner, doors, estimated, planned, compiling = map(median, times.values())
    yield Figure("Python alone", empty, "s")
    yield Figure("import planner", planner - empty, "s", IMPORT_GOAL)
    yield Figure("import planner.api", doors - empty, "s", IMPORT_GOAL)
    yield Figure("import planner.api, compiled anew", compiling - empty, "s")
    yield Figure("import planner.api and estimate once", estimated - empty, "s")
    yield Figure("import planner.api and plan once", planned - empty, "s")


def _first_call_program(function: str, document: str) -> str:
    """Return a program that imports an API function and calls it once."""
    return (
        f"from planner.api import {function}; from planner.specs.estimate import {document}; "
        f"{function}({document}.model_validate({SERVE!r}))"
    )


def command_line() -> Iterator[Figure]:
    """Measure the CPU time of `slipway --help` and `slipway plan`, each in a process of its own.

    The bytecode is compiled before, as pip does it: where PYTHONDONTWRITEBYTECODE is set in a
    checkout, every process compiles the planner again, which costs a third of a second more. The
    ratio to a loop of twenty million additions does not depend on the machine's clock rate.
    """
    loop = "x = 0\nfor i in range(20_000_000): x += 1"
    programs = {"twenty million additions": loop}
    for name, (arguments, _) in COMMAND_LINE.items():
        programs[name] = (
            f"import sys; sys.argv[1:] = {arguments!r}; from runners.cli.main import run; run()"
        )
    times: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as cache:
        for code in programs.values():
            _python(code, bytecode=cache, is_quiet=True)
        for _ in range(ROUNDS):
            for name, code in programs.items():
                run = partial(_python, code, bytecode=cache, is_quiet=True)
                times[name].append(_cpu_seconds(run))
    seconds = {name: median(each) for name, each in times.items()}
    additions = seconds.pop("twenty million additions")
    yield Figure("twenty million additions, CPU time", additions, "s")
    for name, taken in seconds.items():
        yield Figure(f"{name}, CPU time", taken, "s", COMMAND_LINE[name][1])
        yield Figure(f"{name} / twenty million additions", taken / additions, "ratio")


def estimates() -> Iterator[Figure]:
    """Measure how many fixed strategies are estimated per second of CPU time."""
    request = EstimateRequest.model_validate(SERVE | {"strategy": {"tensor_parallel_size": 2}})
    estimate(request)
    seconds = median(_cpu_seconds(lambda: estimate(request)) for _ in range(100))
    yield Figure("one estimate", seconds, "s")
    yield Figure("estimates", 1 / seconds, "1/s")


def replan() -> Iterator[Figure]:
    """Measure the CPU time of a plan after a change in the wizard, against one estimate."""
    request = PlanRequest.model_validate(SERVE)
    fixed = EstimateRequest.model_validate(SERVE | {"strategy": {"tensor_parallel_size": 2}})
    seconds = speed.planning_seconds(request, ROUNDS)
    one_estimate = median(_cpu_seconds(lambda: estimate(fixed)) for _ in range(ROUNDS))
    yield Figure("re-plan", seconds, "s")
    yield Figure("re-plan / one estimate", seconds / one_estimate, "ratio")


def search() -> Iterator[Figure]:
    """Measure the strategies per second of the search, and the time of complete plans."""
    yield from (Figure(*row) for row in speed.figures())
    yield from planner_import()


def start() -> Iterator[Figure]:
    """Measure `manage.py up` on an empty data folder, then on the same one again."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        first = _seconds_to_first_page(Path(data))
        warm = _seconds_to_first_page(Path(data))
    yield Figure("first start (database, enrolment) to first page", first, "s")
    yield Figure("warm start to first page", warm, "s")


def beats() -> Iterator[Figure]:
    """Measure the server's cost of 500 hosts of 8 GPUs, with a heartbeat every ten seconds."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in host_load.host_load_metrics(Path(data)))


def page_times() -> Iterator[Figure]:
    """Measure pages with 1,000, 10,000 and 100,000 jobs: some minutes, 8 GB of disk."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in long_history.long_history_metrics(Path(data)))


def live() -> Iterator[Figure]:
    """Measure the delivery of 200 jobs' events, once a second each, from hosts to browsers."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in live_path.live_path_metrics(Path(data)))


def screen() -> Iterator[Figure]:
    """Measure interactions of the wizard and a live job in a slowed Chromium, and page weights."""
    try:
        measured = importlib.import_module("webapp.bench.screen")
    except ImportError as missing:
        raise CommandError(
            f"`bench screen` needs playwright: pip install 'slipway[bench]' ({missing})"
        ) from missing
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in measured.screen_metrics(Path(data)))


def tunnel() -> Iterator[Figure]:
    """Measure requests through the tunnel between a gateway and a host, against direct calls."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in gateway.gateway_metrics(Path(data)))


def supervisor() -> Iterator[Figure]:
    """Measure a host's overhead for a job that writes 66 lines a second."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in supervising.supervising_metrics(Path(data)))


def first_lines() -> Iterator[Figure]:
    """Measure the time from launch to the first log line of the demo."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in first_line.first_line_metrics(Path(data)))


def generation() -> Iterator[Figure]:
    """Measure each generation technique against the plain one, in a process with torch."""
    yield from _module_figures("runners.jobs.generate.bench")


def tuning() -> Iterator[Figure]:
    """Measure the savings of an adapter against training every weight."""
    yield from _module_figures("runners.jobs.bench.tuning_bench")


def adapters() -> Iterator[Figure]:
    """Measure many adapters in one batch against one by one."""
    yield from _module_figures("runners.jobs.serve.bench")


def offload() -> Iterator[Figure]:
    """Measure the planner's offload policy against accelerate's device map, at one memory cap."""
    yield from _module_figures("runners.jobs.bench.offload_bench")


def _module_figures(name: str) -> Iterator[Figure]:
    """Yield the rows that a benchmark module prints, in a separate process with torch."""
    module = [sys.executable, "-m", name]
    process = subprocess.run(
        module, cwd=site.ROOT, check=False, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    if process.returncode:
        raise CommandError(f"python -m {name} ended with {process.returncode}: see above")
    yield from (Figure.of(Ratio(*json.loads(line))) for line in process.stdout.splitlines())


def weights() -> Iterator[Figure]:
    """Train the demo model in fp32 and measure gain and cost of fewer bits per weight."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
        ratios = bench.ratios(Path(folder))
        yield from map(Figure.of, ratios)


def compress(*, is_kept: bool = False) -> Iterator[Figure]:
    """Train the demo model and compress it with every method that runs: half an hour."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
        results = compression.compression_metrics(Path(folder), is_kept=is_kept)
        yield from (Figure(*row) for row in results)


def layout_times(*, is_kept: bool = False, load: float = 0.0) -> Iterator[Figure]:
    """Measure every layout's step on four ranks, and the regret of the planner's choice: long."""
    results = list(layouts.layout_comparisons())
    for each in results:
        for name in each.seconds:
            yield Figure(f"{each.model}, {name}: predicted", each.predicted[name], "s")
            yield Figure(f"{each.model}, {name}: measured", each.step_seconds_of(name), "s")
        yield Figure(f"{each.model}: planner's first is {each.first}", 1.0, "")
    if is_kept:
        layouts.keep(results, load)
    yield from map(Figure.of, layouts.regrets(results))


def memory_terms(*, is_kept: bool = False, load: float = 0.0) -> Iterator[Figure]:
    """Measure the memory of real ranks by the planner's terms."""
    measured = {each.case: each for each in memory.measure_memory()}
    for each in measured.values():
        for row in memory.rows_of(each):
            yield Figure(f"{row.case}, {row.term}: planned / held - 1", row.error, "ratio")
    if is_kept:
        memory.keep(measured.values(), load)
    yield from map(Figure.of, memory.sharding_ratios(measured))


BENCHES: dict[str, Callable[[], Iterator[Figure]]] = {
    "import": planner_import,
    "command-line": command_line,
    "estimate": estimates,
    "replan": replan,
    "planner": search,
    "start": start,
    "beats": beats,
    "pages": page_times,
    "live": live,
    "screen": screen,
    "gateway": tunnel,
    "supervisor": supervisor,
    "first-line": first_lines,
    "generate": generation,
    "weights": weights,
    "tune": tuning,
    "adapters": adapters,
    "offload": offload,
    "compress": compress,
    "layouts": layout_times,
    "memory": memory_terms,
}
WITH_PAGES = {"layouts": layout_times, "memory": memory_terms}  # these write a docs page


class Command(BaseCommand):
    """Run one bench or all of them."""

    requires_system_checks = ()
    help = f"Measure speed: {', '.join(BENCHES)}. Without a name, all."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the benchmark name and the output options."""
        parser.add_argument("name", nargs="?", choices=sorted(BENCHES))
        parser.add_argument("--json", action="store_true", help="one JSON document instead")
        parser.add_argument(
            "--keep",
            action="store_true",
            help="keep the ratios with date, versions and machine, as what proves techniques; of "
            "`compress`, `layouts` and `memory`, the rows of the table and its page too",
        )
        parser.add_argument(
            "--peers",
            nargs="?",
            type=Path,
            const=settings.DATA_DIR / "peers",
            metavar="FOLDER",
            help="with `planner`: ask other planners the same question, each from an environment "
            "of its own in this folder, installed there when it is missing",
        )

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """Run the benchmarks and print the figures; prefer ratios, and use an idle machine."""
        if options["peers"] and options["name"] not in {None, "planner"}:
            raise CommandError(f"--peers belongs to `bench planner`, not to {options['name']}")
        names = [options["name"]] if options["name"] else list(BENCHES)
        load, *_ = os.getloadavg()
        figures = []
        for name in names:
            with site.ended_by_sigterm():
                found = list(_figures_of(name, load, is_kept=options["keep"]))
            figures += found
            if options["keep"]:
                command = f"manage.py bench {name} --keep"
                keep(
                    StoredRatio.measured_now(each.ratio, command, load)
                    for each in found
                    if each.ratio
                )
        others = list(answers(options["peers"].resolve())) if options["peers"] else []
        figures += [Figure(*row) for answer in others for row in rows(answer)]
        if options["peers"]:
            figures += [Figure(*row) for row in cohort_figures(options["peers"].resolve(), others)]
        silent = [answer for answer in others if answer.reason]
        if options["json"]:
            self.stdout.write(json.dumps(_document(figures, silent), indent=2))
            return
        for figure in figures:
            self.stdout.write(
                f"{figure.name:60} {figure.value:12.4g} {figure.unit:5}{figure.remark}"
            )
        for answer in silent:
            self.stdout.write(f"{answer.name}: {answer.reason}")


def _figures_of(name: str, load: float, *, is_kept: bool) -> Iterator[Figure]:
    """Yield a benchmark's figures; with ``is_kept``, also write its rows and docs page."""
    if is_kept and name == "compress":
        return compress(is_kept=True)
    if is_kept and name in WITH_PAGES:
        return WITH_PAGES[name](is_kept=True, load=load)
    return BENCHES[name]()


def _document(figures: list[Figure], silent: list[Answer]) -> list[dict[str, Any]]:
    """Return every figure, and name and reason of each planner without an answer."""
    absent = [{"name": answer.name, "reason": answer.reason} for answer in silent]
    return [*map(_row, figures), *absent]


def _row(figure: Figure) -> dict[str, Any]:
    ratio = figure.ratio._asdict() if figure.ratio else None
    return figure._asdict() | {"ratio": ratio}


def _cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a function and of the processes that it starts and awaits."""
    before = _cpu_clock()
    run()
    return _cpu_clock() - before


def _cpu_clock() -> float:
    """Return the CPU time, user and system, of this process and its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _python(code: str, bytecode: str | None = None, *, is_quiet: bool = False) -> None:
    """Run a separate Python with bytecode in a folder, or without any bytecode."""
    with tempfile.TemporaryDirectory() as unwritten:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode or unwritten}
        environment["PYTHONDONTWRITEBYTECODE"] = "" if bytecode else "1"
        output = subprocess.DEVNULL if is_quiet else None
        subprocess.run(
            [sys.executable, "-c", code], cwd=site.ROOT, env=environment, check=True, stdout=output
        )


def _seconds_to_first_page(data: Path) -> float:
    """Start a site, stop it, and return the seconds until its first page."""
    with site.running(data) as up:
        return up.seconds_to_first_page
