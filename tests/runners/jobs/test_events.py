"""What a job tells while it runs: events, one progress figure, GPU figures, joules."""

import json
import os
import threading
import time

import pynvml
import pytest
import torch

from runners.jobs import energy, runtime
from runners.jobs.energy import EnergyMeter, Work, Zones, zones
from runners.jobs.events import EVENT_FD_VARIABLE, STDOUT_FD, Emitter, Stages, read_events
from runners.shared.messages import ArtefactBody, MetricPoint, PhaseBody, ProgressBody, ResultBody
from tests.runners.jobs.tiny import tiny_training
from tests.system.jobs.powercap_tree import RANGE, zone

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


def test_a_result_that_is_not_finite_is_refused_and_a_negative_time_left_is_none(
    emitter, events_path
):
    with pytest.raises(ValueError, match="perplexity"):
        emitter.result({"perplexity": float("inf"), "steps": 1.0}, {})
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


def test_a_reader_that_sleeps_stops_neither_the_job_nor_its_end():
    reading, writing = os.pipe()
    emitter = Emitter(writing)
    for step in range(12_000):
        emitter.metric({"loss": 1.0}, step=step)
    assert emitter.dropped > 0
    os.close(reading)

    reading, writing = os.pipe()
    emitter = Emitter(writing)
    for step in range(3_000):
        emitter.metric({"loss": 1.0}, step=step)
    emitter.close(timeout_seconds=0.2)  # or the test hangs
    os.close(reading)


def test_the_supervisors_pipe_is_named_by_the_environment_or_is_standard_output(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv(EVENT_FD_VARIABLE, str(writing))
    emitter = Emitter.from_environment()
    emitter.phase("Training")
    emitter.close()
    assert json.loads(os.read(reading, 4096)) == {"kind": "phase", "body": {"name": "Training"}}
    monkeypatch.delenv(EVENT_FD_VARIABLE, raising=False)
    assert Emitter.from_environment().fd == 1


def test_a_line_goes_to_the_log_unless_stdout_belongs_to_the_events(capfd, tmp_path):
    Emitter(STDOUT_FD).log("a line of log")
    assert capfd.readouterr().out == ""
    fd = os.open(tmp_path / "events", os.O_WRONLY | os.O_CREAT)
    Emitter(fd).log("a line of log")
    os.close(fd)
    assert capfd.readouterr().out == "a line of log\n"


# The one progress figure of a job with unequal parts.


@pytest.fixture
def progress(emitter, events_path):
    def read():
        emitter.close()
        found = read_events(events_path)
        return [each["body"] for each in found if each["kind"] == "progress"]

    return read


def test_a_part_begins_where_the_shares_before_it_end_and_advances_within_its_own(
    emitter, progress
):
    stages = Stages(emitter, {"one": 1.0, "two": 3.0})
    stages.begin("two")
    stages.advance(0.5)
    done = [each["done"] for each in progress()]
    assert (done[0], done[-1]) == pytest.approx((25.0, 62.5))


def test_progress_never_runs_backwards(emitter, progress):
    stages = Stages(emitter, {"one": 1.0, "two": 3.0})
    for name in ("one", "two"):
        stages.begin(name)
        for fraction in (0.1, 0.9, 1.0, 1.2):
            stages.advance(fraction)
    done = [each["done"] for each in progress()]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(100.0)


def test_each_part_is_announced_as_a_phase_with_no_promise_of_time(emitter, progress, events_path):
    Stages(emitter, {"one": 1.0}).begin("one")
    assert progress()[0]["eta_seconds"] is None
    assert {"kind": "phase", "body": {"name": "one"}} in read_events(events_path)


# GPU figures: which devices are read, and that nothing is emitted without one.


@pytest.fixture
def job(make_job, monkeypatch):
    monkeypatch.setattr(runtime, "INTERVAL_SECONDS", 0.01)
    return make_job(tiny_training())


def test_samples_come_from_source_gpu_while_the_block_runs(job, emitter, events_path):
    with runtime.job_telemetry(job, lambda: lambda: {"gpu0_utilization": 0.5}):
        time.sleep(0.2)
    emitter.close()
    first = read_events(events_path)[0]["body"]
    assert (first["source"], first["values"]) == ("gpu", {"gpu0_utilization": 0.5})


def test_nothing_is_emitted_after_the_block(job, events_path):
    with runtime.job_telemetry(job, lambda: lambda: {"gpu0_utilization": 0.5}):
        time.sleep(0.05)
    time.sleep(0.05)
    before = events_path.read_bytes()
    time.sleep(0.1)
    assert events_path.read_bytes() == before


def test_a_host_without_cuda_has_no_sampler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.nvml_sample() is None


# Joules of a job: trapezoids, counters that begin anew, gaps that are named, tokens they made.

NO_ZONES = Zones((), "no RAPL counter")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An empty powercap tree, which this process and its jobs read."""
    root = tmp_path / "powercap"
    root.mkdir()
    monkeypatch.setenv("SLIPWAY_POWERCAP_DIR", str(root))
    return root


def metered(samples, seconds, phases=(), found=NO_ZONES, hosts=1):
    """Return a meter that looked at recorded samples at those seconds."""
    answers, instants = iter([*samples, samples[-1]]), iter([*seconds, seconds[-1]])
    meter = EnergyMeter(lambda: next(answers), found, hosts, clock=lambda: next(instants))
    for at in seconds:
        name = dict(phases).get(at)
        meter.begin(name) if name else meter.read()
    return meter


def test_a_power_is_added_up_as_trapezoids_for_each_device_and_in_sum():
    ramp = [{"gpu0_power_watts": watts, "gpu1_power_watts": 100.0} for watts in (0, 200, 400)]
    measured, notes = metered(ramp, (0.0, 1.0, 3.0)).figures()
    assert measured["gpu0_energy_joules"] == pytest.approx(100.0 * 1 + 300.0 * 2)
    assert measured["gpu1_energy_joules"] == pytest.approx(300.0)
    assert measured["energy_joules"] == pytest.approx(1000.0)
    assert "gpu0, gpu1 by NVML" in notes["energy_joules"]
    assert "not counted" not in notes["energy_joules"]


def test_what_lies_between_two_samples_too_far_apart_is_named_and_not_invented():
    seconds = (0.0, 1.0, 2.0, 62.0, 63.0)
    measured, notes = metered([{"gpu0_power_watts": 300.0}] * 5, seconds).figures()
    assert measured["energy_joules"] == pytest.approx(3 * 300.0)
    assert "not counted: 60.0 of 63.0 s of gpu0, without a sample" in notes["energy_joules"]


def test_a_device_that_falls_silent_is_counted_to_its_last_sample():
    both = {"gpu0_power_watts": 100.0, "gpu1_power_watts": 50.0}
    samples = [both, both, {"gpu0_power_watts": 100.0}, {"gpu0_power_watts": 100.0}]
    measured, notes = metered(samples, (0.0, 1.0, 2.0, 3.0)).figures()
    assert measured["gpu0_energy_joules"] == pytest.approx(300.0)
    assert measured["gpu1_energy_joules"] == pytest.approx(50.0)
    assert "2.0 of 3.0 s of gpu1" in notes["energy_joules"]


def test_only_what_was_drawn_while_tokens_were_made_is_put_down_to_them():
    samples = [{"gpu0_power_watts": 100.0}] * 5
    phases = ((1.0, "Training"), (3.0, "Saving"))
    meter = metered(samples, (0.0, 1.0, 2.0, 3.0, 4.0), phases)
    measured, notes = meter.figures(Work(("Training",), 50))
    assert measured["energy_joules"] == pytest.approx(400.0)
    assert measured["energy_joules_per_token"] == pytest.approx(200.0 / 50)
    assert notes["energy_joules_per_token"].startswith("50 tokens in Training: gpu0 by NVML")


def test_hosts_that_work_together_put_no_joules_of_one_down_to_the_tokens_of_all():
    meter = metered([{"gpu0_power_watts": 100.0}] * 2, (0.0, 1.0), hosts=3)
    measured, notes = meter.figures(Work(("",), 10))
    assert measured["energy_joules"] == pytest.approx(100.0)
    assert "energy_joules_per_token" not in measured
    assert notes["energy_joules_per_token"].startswith("not measured: 3 hosts did the work")


def test_packages_and_their_memory_are_counted_and_no_part_of_them_twice(tree):
    counters = [
        zone(tree, "intel-rapl:0", "package-0", RANGE - 1_000_000),
        zone(tree, "intel-rapl:0:0", "core", 0),
        zone(tree, "intel-rapl:0:1", "dram", 5_000_000),
        zone(tree, "intel-rapl:1", "psys", 0),
    ]
    instants = iter((0.0, 2.0, 2.0))
    meter = EnergyMeter(None, zones(), clock=lambda: next(instants))
    meter.read()
    for counter, count in zip(counters, (4_000_000, 10**9, 7_000_000, 10**9), strict=True):
        counter.write_text(f"{count}\n")
    meter.read()

    measured, notes = meter.figures()

    assert measured == {
        "package_0_energy_joules": pytest.approx(5.0),  # one below the range, four above zero
        "package_0_dram_energy_joules": pytest.approx(2.0),
        "energy_joules": pytest.approx(7.0),
    }
    assert "package_0, package_0_dram by RAPL's counters" in notes["energy_joules"]


def test_a_counter_that_may_have_begun_anew_twice_says_nothing_of_that_time(tree):
    counter = zone(tree, "intel-rapl:0", "package-0", 0)
    instants = iter((0.0, 1.0, 301.0, 301.0))
    meter = EnergyMeter(None, zones(), clock=lambda: next(instants))
    for count in (0, 10_000_000, 20_000_000):
        counter.write_text(f"{count}\n")
        meter.read()

    measured, notes = meter.figures()

    assert measured["energy_joules"] == pytest.approx(10.0)
    assert "300.0 of 301.0 s of package_0" in notes["energy_joules"]


def test_a_host_without_a_sensor_or_with_a_closed_one_says_which(tree):
    bare = EnergyMeter(None, zones()).figures(Work(("Training",), 5))
    counter = zone(tree, "intel-rapl:0", "package-0", 0)
    counter.unlink()  # as unreadable as root's own is to others
    closed = EnergyMeter(None, zones()).figures()
    assert bare[0] == closed[0] == {}
    why = "not measured: this host has no power sensor: no power of a GPU through NVML, "
    assert bare[1]["energy_joules_per_token"].startswith(f"{why}no RAPL counter of a package")
    assert closed[1]["energy_joules"].startswith(f"{why}RAPL's counters below {tree} cannot be")


def test_a_gpu_that_tells_its_power_and_not_its_use_is_still_measured(monkeypatch):
    def refuse(_handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    recorded = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetPowerUsage": 312_400,
    }
    for name, answer in recorded.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    for name in ("UtilizationRates", "MemoryInfo", "MigMode", "Name"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert energy.visible_sample()() == {"gpu0_power_watts": pytest.approx(312.4)}
