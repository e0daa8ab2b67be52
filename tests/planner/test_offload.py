"""Offloading: what leaves the device takes no room there and time on the way."""

import pytest

from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, TRAIN, ask, held

NEAR = {"model": LLAMA_8B, "workload": GENERATE, "device": "rtx-4090", "engine": "vllm"}


def half_away(**fields):
    return ask(**{**NEAR, **fields}, strategy={"offload": {"weights_cpu": 0.5}})


def test_half_the_weights_leave_half_the_weights_on_the_device():
    assert held(half_away(), "weights") == pytest.approx(held(ask(**NEAR), "weights") / 2, abs=1)


def test_what_left_is_on_the_host():
    assert half_away().memory.host_bytes == pytest.approx(held(ask(**NEAR), "weights") / 2, abs=1)


def test_all_the_weights_can_leave():
    found = ask(**NEAR, strategy={"offload": {"weights_cpu": 1.0}})

    assert held(found, "weights") == 0
    assert found.memory.host_bytes == held(ask(**NEAR), "weights")


def test_streamed_weights_dominate_the_decode_step():
    found = half_away()

    assert found.performance.tpot_seconds > 5 * ask(**NEAR).performance.tpot_seconds
    assert found.bound_by == "communication"


def test_a_faster_host_link_streams_faster():
    cluster = {"device": "rtx-4090", "host_to_device_bandwidth_bytes_per_second": 1e12}

    fast = half_away(cluster=cluster).performance

    assert fast.tpot_seconds < half_away().performance.tpot_seconds


def test_a_model_that_does_not_fit_can_be_offloaded_to_fit():
    request = {"model": LLAMA_70B, "workload": GENERATE, "engine": "vllm"}

    assert not ask(**request).fits
    assert ask(**request, strategy={"offload": {"weights_cpu": 0.6}}).fits


def test_a_host_without_room_is_warned_about():
    cluster = {"device": "rtx-4090", "host_memory_bytes": 1024**3}
    found = half_away(cluster=cluster)

    assert any("GiB of host memory, 1.0 GiB are there" in warning for warning in found.warnings)


@pytest.mark.parametrize(("place", "field"), [("cpu", "host_bytes"), ("nvme", "disk_bytes")])
def test_optimiser_states_go_where_they_are_sent(place, field):
    base = {"workload": TRAIN, "engine": "megatron"}
    away = ask(**base, strategy={"offload": {"optimizer": place}})

    assert getattr(away.memory, field) == held(ask(**base), "optimizer_states")
    assert held(away, "optimizer_states") == 0


def test_a_disk_updates_more_slowly_than_host_memory():
    base = {"workload": TRAIN, "engine": "megatron"}
    times = [
        ask(**base, strategy={"offload": {"optimizer": place}}).performance.step_seconds
        for place in ("none", "cpu", "nvme")
    ]

    assert times == sorted(times)
    assert times[0] < times[1] < times[2]
