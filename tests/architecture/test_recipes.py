"""The pictures and recipes of the architecture page name functions that exist and are connected.

A picture is a block of stations: number, indentation, ``file: function``, an arrow, and what is
handed on. The nearest station above that is indented less calls a station; ``⇒`` hands over to
another process, where the next station begins anew.
"""

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import get_args

import pytest

from runners.client.replies.deployments import KeyReply
from runners.host.schedulers import SCHEDULERS
from runners.hub.names import parse
from runners.hub.settings import HUGGING_FACE, PASSED, SOURCES, STORES, TOKENS
from runners.jobspec import JobSpec
from runners.jobspec.base import SCHEDULER_OPTIONS, HubName, SchedulerKind, SchedulerOption
from runners.jobspec.engines import ENGINES, OWN, ROWS
from runners.jobspec.kinds import KINDS, KindName
from runners.plans.launch import Launch
from runners.shared.config import HostConfig, SchedulerSettings
from runners.shared.schedulers import SCHEDULER_TERMS
from webapp.boot.suite import ROOT
from webapp.charts.plots import BY_KIND
from webapp.deployments.forms import KeyForm
from webapp.deployments.keys import KeyOptions
from webapp.deployments.models import ServingKey
from webapp.gateway.routes import Key
from webapp.hosts.install_commands import install_commands
from webapp.hosts.models import Host
from webapp.jobs.launching import EXPLANATIONS

PAGE = (ROOT / "templates" / "docs" / "architecture.md").read_text("utf-8")
STATION = re.compile(r" ?(\d+) ( *)([\w./]+?)(?:: ([\w.]+))? +([→⇒]) (.+)")
CROSSINGS = ("HTTP", "Redis", "FIFO", "DOM", "database", "disk", "pipe", "process")
NAMED = re.compile(r"`([\w./]+\.py): ([\w.]+)`")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Of each picture: who changes what lies on a way must know every one.
MOST_STATIONS = {
    "A plan's way": 22,
    "A launch's way": 34,
    "A metric's way": 24,
    "A doorbell's way": 5,
    "A page's signal": 7,
}


@dataclass(frozen=True)
class Station:
    """One line of a picture."""

    number: int
    depth: int
    path: str
    name: str
    crosses: bool
    handed: str

    def __str__(self) -> str:
        return f"{self.number} {self.path}: {self.name}"


def pictures() -> dict[str, list[Station]]:
    """Return the stations of each picture by its heading."""
    found = re.findall(r"^### (.+?)$\n+.*?```way\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    return {title: [station(line) for line in block.splitlines()] for title, block in found}


def station(line: str) -> Station:
    match = STATION.fullmatch(line)
    assert match, line
    number, indent, path, name, arrow, handed = match.groups()
    return Station(int(number), len(indent) // 2, path, name or "", arrow == "⇒", handed)


PICTURES = pictures()


# What a module defines, imports and uses


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


def names_of(node: ast.AST) -> set[str]:
    """Return the names that a statement of a module or class defines."""
    if isinstance(node, (*FUNCTION, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {each.id for each in targets if isinstance(each, ast.Name)}


@cache
def defined(path: str) -> frozenset[str]:
    """Return what a module defines: ``name``, and ``Class.name`` of its classes."""
    names: set[str] = set()
    for node in tree(path).body:
        names |= names_of(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for part in node.body for name in names_of(part)}
    return frozenset(names)


def read_by(node: ast.AST) -> set[str]:
    """Return the names and attributes that a part of a module reads."""
    nodes = list(ast.walk(node))
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    return names | {each.attr for each in nodes if isinstance(each, ast.Attribute)}


@cache
def reached(path: str, name: str) -> frozenset[str]:
    """Return what a function reads, itself or through others of its module, by bare names."""
    if not name:
        return frozenset(read_by(tree(path)))
    functions: dict[str, set[str]] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, FUNCTION):
            functions.setdefault(node.name, set()).update(read_by(node))
    names, due = set(), [name.rpartition(".")[2]]
    while due:
        fresh = functions.pop(due.pop(), set()) - names
        names |= fresh
        due += fresh
    return frozenset(names)


def file_of(module: str) -> str | None:
    """Return the file of a module of the project, by its dotted name."""
    path = module.replace(".", "/")
    found = (each for each in (f"{path}.py", f"{path}/__init__.py") if (ROOT / each).is_file())
    return next(found, None)


@cache
def imported(path: str) -> frozenset[str]:
    """Return the project's files that a module imports, within functions too."""
    modules: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(each for module in modules if (each := file_of(module)))


def calls(caller: Station, here: Station) -> bool:
    """Return whether a station imports the next one's module and calls its function."""
    is_known = caller.path == here.path or here.path in imported(caller.path)
    return is_known and here.name.rpartition(".")[2] in reached(caller.path, caller.name)


def faults_of(stations: list[Station]) -> list[str]:
    """Return what is wrong with the order and the connections of a picture."""
    found: list[str] = []
    callers: list[Station] = []
    for before, here in zip([None, *stations], stations, strict=False):
        del callers[here.depth :]
        if before and before.crosses != (here.depth == 0):
            found.append(f"{here}: another process begins after ⇒, and only there")
        elif len(callers) != here.depth:
            found.append(f"{here}: indented more than one step")
        elif callers and not calls(callers[-1], here):
            found.append(f"{here}: not called by {callers[-1]}")
        if here.crosses and not here.handed.startswith(tuple(f"{by}: " for by in CROSSINGS)):
            found.append(f"{here}: ⇒ names none of {', '.join(CROSSINGS)}")
        callers.append(here)
    return found


def test_each_picture_is_numbered_and_its_stations_are_connected():
    assert PICTURES.keys() == MOST_STATIONS.keys()
    for title, stations in PICTURES.items():
        numbers = [each.number for each in stations]
        assert numbers == list(range(1, len(numbers) + 1)), title
        assert len(numbers) <= MOST_STATIONS[title], title
        assert faults_of(stations) == [], title


def test_every_function_of_the_pictures_and_recipes_exists():
    stations = [each for picture in PICTURES.values() for each in picture]
    named = {(each.path, each.name) for each in stations if each.name}
    named |= set(NAMED.findall(PAGE))
    assert len(named) > 100
    assert [each.path for each in stations if not (ROOT / each.path).is_file()] == []
    wrong = [
        f"{path}: {name}"
        for path, name in sorted(named)
        if not (ROOT / path).is_file() or name not in defined(path)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (
            [" 1 planner/api.py: plan → x", " 2   runners/launchers/launch.py: confine ⇒ HTTP: y"],
            "not called",
        ),
        ([" 1 planner/api.py: plan → x", " 2 planner/api.py: plan → y"], "only there"),
        ([" 1 planner/api.py: plan ⇒ pigeon: x"], "⇒ names none"),
        ([" 1 planner/api.py: plan → x", " 2     planner/api.py: plan → y"], "one step"),
    ],
)
def test_a_station_without_connection_is_told(lines, fault):
    found = faults_of([station(line) for line in lines])
    assert len(found) == 1
    assert fault in found[0]


# What the recipes say that must agree


def test_a_kind_of_job_is_in_every_table():
    specs = get_args(get_args(JobSpec)[0])
    kinds = {each.model_fields["kind"].default for each in specs}
    for table in (KINDS, get_args(KindName), BY_KIND):
        assert set(table) == kinds
    without_plan = {"drill", "prove", "publish"}
    assert kinds - set(EXPLANATIONS) == without_plan


def test_a_kind_or_engine_starts_a_module_that_exists():
    modules = {
        *(each.module for each in KINDS.values()),
        *(each.module for each in ENGINES.values()),
    }
    for module in modules:
        spec = importlib.util.find_spec(module)
        assert spec, module
        package = spec.submodule_search_locations
        assert not package or importlib.util.find_spec(f"{module}.__main__"), module


def test_a_source_of_models_is_a_row_and_no_other_module_knows_its_name():
    configuration = (ROOT / "templates/docs/configuration.md").read_text("utf-8")
    assert set(SOURCES) == set(get_args(HubName))
    for name, source in SOURCES.items():
        assert {source.endpoint_variable, *source.usual_variables} <= {*PASSED}, name
        for variable in (source.endpoint_variable, source.token_name, *source.usual_variables):
            assert f"`{variable}`" in configuration, variable
        if source is HUGGING_FACE:
            continue
        typed = f"{source.scheme}org/name"
        assert (parse(typed).hub, str(parse(typed))) == (name, typed)
        users = [path for path in modules() if name.upper() in read_by(tree(path))]
        assert users == [f"runners/hub/{name}.py", "runners/hub/settings.py"]
        assert comparisons(modules(), lambda node, name=name: name in constants(node)) == []
    for name, source in STORES.items():  # whose addresses are no repositories
        assert source.name == name not in get_args(HubName)
        assert {*source.secrets} <= {*TOKENS}  # dropped before a job's program
        assert comparisons(modules(), lambda node, name=name: name in constants(node)) == []


def test_a_scheduler_is_in_every_table():
    kinds = set(get_args(SchedulerKind))
    assert set(SCHEDULERS) == set(SCHEDULER_OPTIONS) == set(SCHEDULER_TERMS) == kinds
    offered = {name for names in SCHEDULER_OPTIONS.values() for name in names}
    assert offered == set(get_args(SchedulerOption)) <= set(Launch.model_fields)
    settings = {each.KIND for each in get_args(SchedulerSettings)}
    assert settings == {each.launcher.KIND for each in SCHEDULERS.values()} == kinds
    assert kinds <= set(HostConfig.model_fields)
    assert kinds <= {value for value, _ in Host._meta.get_field("kind").choices}
    assert kinds <= {each.key for each in install_commands("http://site", "token")}
    assert all((ROOT / f"templates/docs/{kind}.md").is_file() for kind in kinds)


def test_every_setting_of_a_host_is_in_the_docs():
    page = (ROOT / "templates/docs/hosts.md").read_text("utf-8")
    lacking = [name for name in HostConfig.model_fields if not re.search(rf"\b{name}\b", page)]
    assert lacking == []


def test_a_limit_of_a_key_is_known_everywhere():
    limits = {
        name for name, field in KeyOptions.model_fields.items() if field.annotation == int | None
    }
    assert limits
    for known in (
        {each.name for each in ServingKey._meta.get_fields()},
        Key.__dataclass_fields__,
        KeyForm.base_fields,
        KeyReply.model_fields,
    ):
        assert limits <= set(known)
    told = (ROOT / "webapp/gateway/key_limits.py").read_text("utf-8")
    assert {name for name in limits if f'"{name}"' not in told} == set()


def test_an_engines_name_stands_in_its_row_and_its_package_alone():
    """A module that compares an engine's name would have to know of every new one."""
    packages = {f"{each.module.replace('.', '/')}/" for each in ROWS if each.name != OWN}
    others = [path for path in modules() if not path.startswith(tuple(packages))]
    assert comparisons(others, compares_an_engine) == []


@cache
def modules() -> tuple[str, ...]:
    """Return the files of the runners and the site."""
    paths = (each for top in ("runners", "webapp") for each in (ROOT / top).rglob("*.py"))
    return tuple(sorted(each.relative_to(ROOT).as_posix() for each in paths))


def comparisons(paths: Iterable[str], is_meant: Callable[[ast.Compare], bool]) -> list[str]:
    """Return the places of the comparisons that are meant, as ``file:line``."""
    return [
        f"{path}:{node.lineno}"
        for path in paths
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare) and is_meant(node)
    ]


def constants(node: ast.AST) -> set[object]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}


def compares_an_engine(node: ast.Compare) -> bool:
    """Return whether a comparison names an engine; "slipway" alone is the program's name too."""
    found = ENGINES.keys() & constants(node)
    return bool(found - {OWN} or (found and "engine" in ast.unparse(node)))
