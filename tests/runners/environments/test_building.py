"""Environments built for real from tiny wheels: whole or not at all, once, by one at a time."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pydantic
import pytest

from runners.environments.builder import BuildError, EnvironmentBusyError, PinsError, Store, ensure
from tests.runners.environments.wheels import PINS, make_pins, make_wheel

PATIENCE_SECONDS = 120.0


def until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def rest_of(store: Store, name: str = "tiny") -> set[str]:
    """Return what lies beside the build."""
    pins = store.pins(name)
    return {path.name for path in store.home(name).iterdir()} - {pins.digest, "build.lock"}


@pytest.fixture
def building(host_dir, store):
    """Start builds as processes; none outlives the test."""
    started = []

    def start(name: str = "tiny") -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "runners.environments.builder",
            str(host_dir.path),
            name,
            "o1",
        ]
        process = subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_build_holds_exactly_its_pins_and_tells_each_step(store):
    steps = []
    ensure(store, store.pins("tiny"), steps.append)
    asked = "import tiny_whole, tiny_part; print(tiny_whole.VERSION, tiny_part.VERSION)"
    python = store.python(store.pins("tiny"))
    assert subprocess.check_output([python, "-I", "-c", asked], text=True) == "2.0 1.0\n"
    assert [step.words for step in steps[1:3]] == ["Fetching tiny_part", "Fetching tiny_whole"]
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert rest_of(store) == {"last.json"}


def test_what_is_built_is_ready_with_its_size_and_not_built_again(built):
    again = []
    ensure(built, built.pins("tiny"), again.append, "order-1")
    state = built.state("tiny")
    assert (state.stage, state.order_id, again) == ("ready", "order-1", [])
    assert state.size_bytes > 1000
    assert built.states()[0].name == "main"


def test_two_builds_at_once_are_one(store, building):
    both = [building(), building()]
    ends = [process.wait(PATIENCE_SECONDS) for process in both]
    assert ends == [0, 0]
    assert sum("Unpacking" in process.stdout.read() for process in both) == 1
    assert store.state("tiny").stage == "ready"


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_build_leaves_nothing(store, building, number):
    process = building()
    until(lambda: list(store.home("tiny").glob(".building-*")), "the build did not begin")
    process.send_signal(number)
    process.wait(PATIENCE_SECONDS)
    store.sweep()
    assert rest_of(store) <= {"last.json", "progress.json"}
    assert store.state("tiny").stage == "absent"
    with store.building("tiny"):  # it holds nothing any more
        pass


def test_a_version_that_the_index_lacks_fails_by_name_and_leaves_nothing(host_dir, store):
    (host_dir.path / "environments" / "pins" / "tiny.txt").write_text(
        PINS.format(probe="tiny_whole").replace("2.0", "3.0")
    )
    with pytest.raises(BuildError, match=r"no ready-made build .*tiny-whole==3\.0"):
        ensure(store, store.pins("tiny"), print)
    state = store.state("tiny")
    assert state.stage == "failed"
    assert "tiny-whole==3.0" in state.words
    assert rest_of(store) == {"last.json"}


def test_an_index_that_cannot_be_reached_is_named(store, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")  # it tells what it tries again
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(BuildError, match="the package index cannot be reached"):
        ensure(store, store.pins("tiny"), print)


@pytest.mark.slow
def test_packages_that_do_not_agree_are_never_published(host_dir, store, wheels):
    make_wheel(wheels, "tiny-whole", "9.0", needs="tiny-part>=7")
    (host_dir.path / "environments" / "pins" / "odd.txt").write_text(
        PINS.format(probe="tiny_whole").replace("2.0", "9.0")
    )
    with pytest.raises(BuildError, match="conflicting requirements"):
        ensure(store, store.pins("odd"), print)
    assert not store.is_ready(store.pins("odd"))


@pytest.mark.slow
def test_beside_the_agents_packages_it_imports_both_and_may_do_without_some(
    host_dir, store, wheels
):
    make_wheel(wheels, "tiny-whole", "5.0", needs="tiny-lacking")
    text = PINS.format(probe="tiny_whole pydantic").replace("2.0", "5.0")
    path = host_dir.path / "environments" / "pins" / "beside.txt"
    path.write_text(text.replace("# tried", "# beside: main\n# tried"))
    with pytest.raises(BuildError, match=r"conflicting requirements.*tiny-lacking"):
        ensure(store, store.pins("beside"), print)
    path.write_text(text.replace("# tried", "# beside: main\n# without: tiny-lacking\n# tried"))

    ensure(store, store.pins("beside"), print)

    python = store.python(store.pins("beside"))
    where = "import tiny_whole, pydantic; print(tiny_whole.__file__, pydantic.__file__)"
    ours, theirs = subprocess.check_output([python, "-I", "-c", where], text=True).split()
    assert ours.startswith(str(store.folder(store.pins("beside"))))
    assert theirs == pydantic.__file__


def test_what_does_not_import_is_never_published(host_dir, store):
    make_pins(host_dir, "odd", probe="tiny_hole")
    with pytest.raises(BuildError, match=r"it does not import.*tiny_hole"):
        ensure(store, store.pins("odd"), print)
    assert not store.is_ready(store.pins("odd"))


def test_a_disk_that_is_too_small_is_named_before_anything_is_fetched(host_dir, store):
    pins = store.pins("tiny")._replace(size_bytes=2**60)
    with pytest.raises(BuildError, match=r"needs .* GiB of free disk to be built"):
        ensure(store, pins, print)
    assert rest_of(store) == {"last.json"}


def test_a_name_that_nobody_pinned_is_refused_with_those_there_are(store):
    with pytest.raises(PinsError, match=r"has the environments main, llamacpp.* not 'nobody'"):
        store.pins("nobody")
    with pytest.raises(PinsError):
        store.pins("../tiny")


def test_an_environment_in_use_is_not_removed_until_its_job_ends(built):
    held = built.hold("tiny")
    job = subprocess.Popen(["sleep", "600"], pass_fds=[held])
    os.close(held)
    with pytest.raises(EnvironmentBusyError, match="a job runs in the environment tiny"):
        built.remove("tiny")
    job.kill()
    job.wait()
    built.remove("tiny")
    assert built.state("tiny").stage == "absent"
    assert not list(built.home("tiny").glob("*/*"))


def test_new_pins_make_a_build_outdated_and_their_build_takes_its_place(host_dir, built):
    old = built.folder(built.pins("tiny"))
    path = host_dir.path / "environments" / "pins" / "tiny.txt"
    path.write_text(path.read_text() + "tiny-more==1.0\n")
    before = built.state("tiny").stage
    shutil.copytree(old, built.folder(built.pins("tiny")), symlinks=True)
    built.sweep()
    assert (before, built.state("tiny").stage) == ("outdated", "ready")
    assert not old.exists()
