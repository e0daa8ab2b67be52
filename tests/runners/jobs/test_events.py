"""Events leave a job as JSON lines that the wire's messages accept."""

import json
import os
import threading

import pytest

from runners.jobs.events import EVENT_FD_VARIABLE, STDOUT_FD, Emitter, read_events
from runners.messages import ArtefactBody, MetricPoint, PhaseBody, ProgressBody, ResultBody

BODIES = {
    "phase": PhaseBody,
    "progress": ProgressBody,
    "metric": MetricPoint,
    "result": ResultBody,
    "artefact": ArtefactBody,
}


def test_every_kind_of_event_is_a_valid_message(emitter, events_path):
    emitter.phase("Training")
    emitter.progress(1, 10, "steps", 9.0)
    emitter.metric({"loss": 2.5}, step=1)
    emitter.artefact(ArtefactBody(name="m", kind="model", total_bytes=0, files={}, sha256={}))
    emitter.result({"perplexity": 3.0}, {"perplexity": "how"})
    emitter.close()

    events = read_events(events_path)

    assert [each["kind"] for each in events] == [
        "phase",
        "progress",
        "metric",
        "artefact",
        "result",
    ]
    for event in events:
        BODIES[event["kind"]].model_validate(event["body"])


def test_figures_that_json_cannot_hold_are_left_out(emitter, events_path):
    emitter.metric({"loss": float("nan"), "step_seconds": 0.5})
    emitter.metric({"loss": float("inf")})
    emitter.close()

    assert [each["body"]["values"] for each in read_events(events_path)] == [{"step_seconds": 0.5}]


def test_more_values_than_one_point_takes_are_several_points(emitter, events_path):
    emitter.metric({f"source{n}_weight": 1.0 for n in range(300)})
    emitter.progress(1, 2, "steps", float("inf"))
    emitter.close()

    sizes = [len(each["body"].get("values", ())) for each in read_events(events_path)]
    assert sizes == [256, 44, 0]


def test_a_result_that_is_not_finite_is_refused_by_name(emitter):
    with pytest.raises(ValueError, match="perplexity"):
        emitter.result({"perplexity": float("inf"), "steps": 1.0}, {})


def test_a_negative_time_left_is_none_left(emitter, events_path):
    emitter.progress(11, 10, "steps", -2.0)
    emitter.close()

    body = read_events(events_path)[0]["body"]

    assert (body["done"], body["eta_seconds"]) == (10, 0.0)


def test_many_threads_never_mix_their_lines(emitter, events_path):
    def work(name):
        for step in range(200):
            emitter.metric({name: float(step)}, step=step)

    threads = [threading.Thread(target=work, args=(f"m{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    emitter.close()

    assert len(read_events(events_path)) == 800


def test_a_reader_that_died_does_not_end_the_job():
    reading, writing = os.pipe()
    emitter = Emitter(writing)
    os.close(reading)

    emitter.phase("on")
    emitter.close()
    emitter.phase("and on")


def test_a_reader_that_sleeps_does_not_stop_the_job():
    reading, writing = os.pipe()
    emitter = Emitter(writing)
    for step in range(12_000):
        emitter.metric({"loss": 1.0}, step=step)

    assert emitter.dropped > 0
    os.close(reading)


def test_closing_gives_up_on_a_reader_that_sleeps():
    reading, writing = os.pipe()
    emitter = Emitter(writing)
    for step in range(3_000):
        emitter.metric({"loss": 1.0}, step=step)

    emitter.close(timeout_seconds=0.2)  # or the test hangs

    os.close(reading)


def test_the_supervisors_pipe_is_named_by_the_environment(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv(EVENT_FD_VARIABLE, str(writing))

    emitter = Emitter.from_environment()
    emitter.phase("Training")
    emitter.close()

    assert json.loads(os.read(reading, 4096)) == {"kind": "phase", "body": {"name": "Training"}}


def test_without_a_supervisor_events_go_to_standard_output(monkeypatch):
    monkeypatch.delenv(EVENT_FD_VARIABLE, raising=False)

    assert Emitter.from_environment().fd == 1


def test_run_by_hand_stdout_belongs_to_the_events(capfd):
    Emitter(STDOUT_FD).log("a line of log")

    assert capfd.readouterr().out == ""


def test_under_a_supervisor_a_line_goes_to_the_log(tmp_path, capfd):
    fd = os.open(tmp_path / "events", os.O_WRONLY | os.O_CREAT)
    Emitter(fd).log("a line of log")
    os.close(fd)

    assert capfd.readouterr().out == "a line of log\n"
