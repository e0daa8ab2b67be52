"""Joules of a job: trapezoids, counters that begin anew, gaps that are named, tokens they made."""

import pynvml
import pytest

from runners.jobs import nvml
from runners.jobs.energy import EnergyMeter, Work, Zones, zones
from tests.system.jobs.powercap_tree import RANGE, zone

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

    assert nvml.visible_sample()() == {"gpu0_power_watts": pytest.approx(312.4)}
