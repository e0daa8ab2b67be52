"""The one progress figure of a job with unequal parts."""

import pytest

from runners.jobs.events import Stages, read_events


@pytest.fixture
def progress(emitter, events_path):
    def read():
        emitter.close()
        found = read_events(events_path)
        return [each["body"] for each in found if each["kind"] == "progress"]

    return read


def test_a_part_begins_where_the_shares_before_it_end(emitter, progress):
    stages = Stages(emitter, {"one": 1.0, "two": 3.0})

    stages.begin("two")

    assert progress()[0]["done"] == pytest.approx(25.0)


def test_a_part_advances_within_its_own_share(emitter, progress):
    stages = Stages(emitter, {"one": 1.0, "two": 3.0})
    stages.begin("two")

    stages.advance(0.5)

    assert progress()[-1]["done"] == pytest.approx(62.5)


def test_progress_never_runs_backwards(emitter, progress):
    stages = Stages(emitter, {"one": 1.0, "two": 3.0})
    for name in ("one", "two"):
        stages.begin(name)
        for fraction in (0.1, 0.9, 1.0, 1.2):
            stages.advance(fraction)

    done = [each["done"] for each in progress()]

    assert done == sorted(done)
    assert done[-1] == pytest.approx(100.0)


def test_no_time_is_promised_before_anything_is_done(emitter, progress):
    stages = Stages(emitter, {"one": 1.0})

    stages.begin("one")

    assert progress()[0]["eta_seconds"] is None


def test_each_part_is_announced_as_a_phase(emitter, events_path):
    stages = Stages(emitter, {"one": 1.0})
    stages.begin("one")
    emitter.close()

    assert {"kind": "phase", "body": {"name": "one"}} in read_events(events_path)
