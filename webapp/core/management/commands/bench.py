"""Measure what the house promises about speed, as seconds and as ratios of one run."""

import json
import os
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
from planner.specs.estimate import EstimateRequest
from planner.specs.plan import PlanRequest
from runners import weights_bench
from runners.ratios import KeptRatio, Ratio
from webapp.core.benches import compression, crowd, layout_page, layouts, memory, site
from webapp.core.benches.ratios import keep
from webapp.core.peers.bench import Answer, answers, rows

ROUNDS = 5
IMPORT_GOAL = "below 0.3"
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
    ratio: Ratio | None = None  # with its interval, where it was taken as one

    @classmethod
    def of(cls, ratio: Ratio) -> "Figure":
        """Return a ratio as a figure."""
        return cls(f"{ratio.name}, {ratio.of}", ratio.value, "ratio", ratio=ratio)

    @property
    def remark(self) -> str:
        """Return what is said behind the number."""
        if self.ratio is None:
            return f"   goal: {self.goal}" if self.goal else ""
        return f"   {self.ratio.low:.4g} to {self.ratio.high:.4g}, n = {self.ratio.n}"


def planner_import() -> Iterator[Figure]:
    """Measure `import planner.api` against a Python that imports nothing, round by round.

    An installed planner has its bytecode beside it, as pip writes it. The first start after a
    change has to compile it, which is told as well. A door loads what answers with its first
    question: what a program waits for until it has one estimate, or one plan, is told too.
    """
    named = {
        "empty": "pass",
        "planner": "import planner",
        "doors": "import planner.api",
        "estimate": _first("estimate", "EstimateRequest", "estimate"),
        "plan": _first("plan", "PlanRequest", "plan"),
    }
    taken: dict[str, list[float]] = {name: [] for name in (*named, "compiling")}
    with tempfile.TemporaryDirectory() as kept:
        for code in named.values():
            _python(code, bytecode=kept)
        for _ in range(ROUNDS):
            for name, code in named.items():
                taken[name].append(_timed(partial(_python, code, bytecode=kept)))
            taken["compiling"].append(_timed(lambda: _python(named["doors"])))
    empty, planner, doors, estimated, planned, compiling = map(median, taken.values())
    yield Figure("Python alone", empty, "s")
    yield Figure("import planner", planner - empty, "s", IMPORT_GOAL)
    yield Figure("import planner.api", doors - empty, "s", IMPORT_GOAL)
    yield Figure("import planner.api, compiled anew", compiling - empty, "s")
    yield Figure("import planner.api and estimate once", estimated - empty, "s")
    yield Figure("import planner.api and plan once", planned - empty, "s")


def _first(door: str, document: str, module: str) -> str:
    """Return a program that imports the doors and asks one of them one question."""
    return (
        f"from planner.api import {door}; from planner.specs.{module} import {document}; "
        f"{door}({document}.model_validate({SERVE!r}))"
    )


def estimates() -> Iterator[Figure]:
    """Measure how many fixed strategies are costed per second."""
    request = EstimateRequest.model_validate(SERVE | {"strategy": {"tensor_parallel_size": 2}})
    estimate(request)
    seconds = median(_timed(lambda: estimate(request)) for _ in range(100))
    yield Figure("one estimate", seconds, "s")
    yield Figure("estimates", 1 / seconds, "1/s")


def replan() -> Iterator[Figure]:
    """Measure what the wizard waits for after each change, against one estimate."""
    request = PlanRequest.model_validate(SERVE)
    fixed = EstimateRequest.model_validate(SERVE | {"strategy": {"tensor_parallel_size": 2}})
    seconds = speed.planning_seconds(request, ROUNDS)
    one = median(_timed(lambda: estimate(fixed)) for _ in range(ROUNDS))
    yield Figure("re-plan", seconds, "s")
    yield Figure("re-plan / one estimate", seconds / one, "ratio")


def search() -> Iterator[Figure]:
    """Measure how many strategies the search scores, and how long complete plans take."""
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
    """Measure what 500 hosts of 8 GPUs, each heard every ten seconds, cost the server."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as data:
        yield from (Figure(*row) for row in crowd.figures(Path(data)))


def generation() -> Iterator[Figure]:
    """Measure what each way of generating brings over the plain one, in a process with torch."""
    yield from _of_module("runners.jobs.generate.bench")


def tuning() -> Iterator[Figure]:
    """Measure what an adapter spares against training every weight."""
    yield from _of_module("runners.jobs.tuning_bench")


def adapters() -> Iterator[Figure]:
    """Measure what many adapters in one batch bring over one by one."""
    yield from _of_module("runners.jobs.serve.bench")


def offload() -> Iterator[Figure]:
    """Measure the planner's policy against accelerate's map under one cap of the kernel's."""
    yield from _of_module("runners.jobs.offload_bench")


def _of_module(name: str) -> Iterator[Figure]:
    """Yield the rows that a bench with torch prints, in a process of its own."""
    module = [sys.executable, "-m", name]
    found = subprocess.run(module, cwd=site.ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        raise CommandError(f"python -m {name} ended with {found.returncode}: see above")
    yield from (Figure.of(Ratio(*json.loads(line))) for line in found.stdout.splitlines())


def weights() -> Iterator[Figure]:
    """Train the demo model in fp32 and measure what fewer bits a weight bring and cost."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
        found = weights_bench.ratios(Path(folder))
        yield from map(Figure.of, found)


def compress(*, is_kept: bool = False) -> Iterator[Figure]:
    """Train the demo model and compress it in every way that runs: half an hour."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
        found = compression.figures(Path(folder), is_kept=is_kept)
        yield from (Figure(*row) for row in found)


def layout_times(*, is_kept: bool = False, load: float = 0.0) -> Iterator[Figure]:
    """Measure every layout's step on four ranks, and what the planner's choice loses: long."""
    found = list(layouts.found())
    for each in found:
        for name in each.seconds:
            yield Figure(f"{each.model}, {name}: predicted", each.predicted[name], "s")
            yield Figure(f"{each.model}, {name}: measured", each.measured(name), "s")
        yield Figure(f"{each.model}: planner's first is {each.first}", 1.0, "")
    if is_kept:
        layout_page.keep(found, load)
    yield from map(Figure.of, layout_page.regrets(found))


def memory_terms(*, is_kept: bool = False, load: float = 0.0) -> Iterator[Figure]:
    """Count what real ranks hold of each of the planner's terms."""
    found = {each.case: each for each in memory.held()}
    for each in found.values():
        for row in memory.rows_of(each):
            yield Figure(f"{row.case}, {row.term}: planned / held - 1", row.error, "ratio")
    if is_kept:
        memory.keep(found.values(), load)
    yield from map(Figure.of, memory.sharding_ratios(found))


BENCHES: dict[str, Callable[[], Iterator[Figure]]] = {
    "import": planner_import,
    "estimate": estimates,
    "replan": replan,
    "planner": search,
    "start": start,
    "beats": beats,
    "generate": generation,
    "weights": weights,
    "tune": tuning,
    "adapters": adapters,
    "offload": offload,
    "compress": compress,
    "layouts": layout_times,
    "memory": memory_terms,
}
WITH_PAGES = {"layouts": layout_times, "memory": memory_terms}  # and ratios beside their rows


class Command(BaseCommand):
    """Run one bench or all of them."""

    requires_system_checks = ()
    help = f"Measure speed: {', '.join(BENCHES)}. Without a name, all."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Offer the names and a machine-readable form."""
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
        """Print the figures; run it on a quiet machine, and compare ratios rather than seconds."""
        if options["peers"] and options["name"] not in {None, "planner"}:
            raise CommandError(f"--peers belongs to `bench planner`, not to {options['name']}")
        names = [options["name"]] if options["name"] else list(BENCHES)
        load, *_ = os.getloadavg()
        figures = []
        for name in names:
            found = list(_found(name, load, is_kept=options["keep"]))
            figures += found
            if options["keep"]:
                _keep(name, found, load)
        others = list(answers(options["peers"].resolve())) if options["peers"] else []
        figures += [Figure(*row) for answer in others for row in rows(answer)]
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


def _found(name: str, load: float, *, is_kept: bool) -> Iterator[Figure]:
    """Yield a bench's figures; of those that have a page of their own, rows and page are kept."""
    if is_kept and name == "compress":
        return compress(is_kept=True)
    if is_kept and name in WITH_PAGES:
        return WITH_PAGES[name](is_kept=True, load=load)
    return BENCHES[name]()


def _keep(name: str, figures: list[Figure], load: float) -> None:
    """Keep a bench's ratios in the place of its earlier ones; ``load`` was there before it."""
    command = f"manage.py bench {name} --keep"
    keep(KeptRatio.taken_now(each.ratio, command, load) for each in figures if each.ratio)


def _document(figures: list[Figure], silent: list[Answer]) -> list[dict[str, Any]]:
    """Return every figure, and for each planner that gave none its name and the reason."""
    absent = [{"name": answer.name, "reason": answer.reason} for answer in silent]
    return [*map(_row, figures), *absent]


def _row(figure: Figure) -> dict[str, Any]:
    taken = figure.ratio._asdict() if figure.ratio else None
    return figure._asdict() | {"ratio": taken}


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _python(code: str, bytecode: str | None = None) -> None:
    """Run a Python of its own that keeps its bytecode in a folder, or writes and reads none."""
    with tempfile.TemporaryDirectory() as unwritten:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode or unwritten}
        environment["PYTHONDONTWRITEBYTECODE"] = "" if bytecode else "1"
        subprocess.run([sys.executable, "-c", code], cwd=site.ROOT, env=environment, check=True)


def _seconds_to_first_page(data: Path) -> float:
    """Start Slipway, wait for its sign-in page, stop it, and return how long the page took."""
    with site.running(data) as up:
        return up.seconds_to_first_page
