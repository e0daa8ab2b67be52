"""Offloading: what leaves the device takes no room there and time on the way."""

import pytest

from planner.cost.memory import expert_hit_ratio
from planner.errors import NotPossibleError
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, MIXTRAL, TRAIN, ask, held

NEAR = {"model": LLAMA_8B, "workload": GENERATE, "device": "rtx-4090", "engine": "vllm"}


def half_away(**fields):
    return ask(**{**NEAR, **fields}, strategy={"offload": {"weights_cpu": 0.5}})


def test_half_the_weights_leave_half_the_weights_on_the_device():
    assert held(half_away(), "weights") == pytest.approx(held(ask(**NEAR), "weights") / 2, abs=1)


@pytest.mark.parametrize(("engine", "copies"), [("vllm", 1.65), ("sglang", 1.0)])
def test_what_left_is_on_the_host(engine, copies):
    whole = held(ask(**{**NEAR, "engine": engine}), "weights")

    found = half_away(engine=engine).memory.host_bytes
    assert found == pytest.approx(copies * whole / 2, abs=2)


@pytest.mark.parametrize(("offloaded", "used"), [(305, 504), (12, 23)])
def test_vllm_pins_more_than_it_offloads(offloaded, used):
    """vllm-project/vllm issues 58178 (GiB on a Grace host) and 56410 (1.9 times 12 GiB)."""
    found = ask(**NEAR, strategy={"offload": {"weights_cpu": 1.0}})
    ratio = found.memory.host_bytes / held(ask(**NEAR), "weights")

    assert offloaded * ratio == pytest.approx(used, rel=0.15)


def test_all_the_weights_can_leave():
    found = ask(**NEAR, strategy={"offload": {"weights_cpu": 1.0}})

    assert held(found, "weights") == 0
    assert found.memory.host_bytes == pytest.approx(1.65 * held(ask(**NEAR), "weights"), abs=1)


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


def test_a_host_without_room_is_refused_with_the_numbers():
    cluster = {"device": "rtx-4090", "host_memory_bytes": 1024**3}
    found = half_away(cluster=cluster)

    assert any("GiB of host memory, 1.0 GiB are there" in warning for warning in found.warnings)
    assert not found.fits
    assert found.bound_by == "memory_capacity"


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


# One batch that is large enough for its cache and its waiting tokens to matter.
BATCH = {"kind": "generate", "batch_size": 64, "input_tokens": 512, "output_tokens": 32}


def placed(model=LLAMA_8B, engine="flexgen", micro=None, **offload):
    cluster = {"device": "a100-sxm4-80gb", "host_memory_bandwidth_bytes_per_second": 100e9}
    strategy = {"offload": offload, "micro_batch_size": micro, "weight_dtype": "bf16"}
    return ask(model=model, cluster=cluster, engine=engine, workload=BATCH, strategy=strategy)


@pytest.mark.parametrize(
    ("share", "tensor", "field"),
    [
        ("weights_cpu", "weights", "host_bytes"),
        ("weights_disk", "weights", "disk_bytes"),
        ("kv_cpu", "kv_cache", "host_bytes"),
        ("kv_disk", "kv_cache", "disk_bytes"),
    ],
)
def test_what_leaves_the_device_is_held_by_its_tier_to_the_byte(share, tensor, field):
    away, home = placed(**{share: 0.5}), placed()

    assert held(away, tensor) == pytest.approx(held(home, tensor) / 2, abs=1)
    assert getattr(away.memory, field) == pytest.approx(held(home, tensor) / 2, abs=1)


def test_streaming_needs_room_for_the_layer_on_its_way():
    assert held(placed(weights_cpu=0.5), "buffers") > 0
    assert held(placed(weights_cpu=1.0), "buffers") > held(placed(weights_cpu=0.5), "buffers")


def test_waiting_micro_batches_keep_their_tokens_on_the_device_or_on_the_host():
    home, away = placed(micro=8), placed(micro=8, activations_cpu=1.0)

    assert held(away, "activations") < held(home, "activations")
    assert away.memory.host_bytes > 0


def test_smaller_micro_batches_need_a_smaller_working_set():
    assert held(placed(micro=8), "activations") < held(placed(), "activations")


def test_one_load_of_the_weights_serves_every_micro_batch():
    """FlexGen's block schedule: the loads of a step do not grow with its micro-batches."""
    loads = [
        next(
            term.value
            for term in placed(micro=size, weights_cpu=1.0).terms
            if term.key == "offload"
        )
        for size in (64, 8)
    ]

    assert loads[0] == pytest.approx(loads[1])


def test_loads_hide_behind_enough_work():
    small = placed(weights_cpu=1.0).performance
    few = ask(
        model=LLAMA_8B,
        cluster={"device": "a100-sxm4-80gb"},
        engine="flexgen",
        workload={**BATCH, "batch_size": 1},
        strategy={"offload": {"weights_cpu": 1.0}},
    ).performance

    assert small.ttft_seconds == pytest.approx(placed().performance.ttft_seconds, rel=0.05)
    assert few.tokens_per_second < small.tokens_per_second / 10


def test_the_disk_bounds_what_the_link_does_not():
    host, disk = placed(weights_cpu=1.0), placed(weights_disk=1.0)

    assert disk.performance.tpot_seconds > 5 * host.performance.tpot_seconds


def test_attention_over_a_cache_on_the_host_is_done_there():
    names = {term.name for term in placed(kv_cpu=1.0).terms}

    assert "Attention on the host" in names


def test_a_quantised_cache_is_brought_back_to_the_device():
    strategy = {"offload": {"kv_cpu": 1.0}, "kv_cache_dtype": "int4"}
    found = ask(device="a100-sxm4-80gb", engine="flexgen", workload=BATCH, strategy=strategy)

    assert "Attention on the host" not in {term.name for term in found.terms}


def test_shares_beyond_the_whole_are_refused():
    with pytest.raises(NotPossibleError, match=r"sum to 1\.4") as caught:
        placed(weights_cpu=0.7, weights_disk=0.7)

    assert caught.value.field == "strategy.offload.weights_disk"


def test_a_full_disk_is_refused_with_the_numbers():
    cluster = {"device": "a100-sxm4-80gb", "disk_capacity_bytes": 1024**3}
    found = ask(
        cluster=cluster, workload=BATCH, strategy={"offload": {"weights_disk": 1.0}}, engine="vllm"
    )

    assert not found.fits
    assert any("GiB of disk, 1.0 GiB are there" in warning for warning in found.warnings)


def moe(share, engine="vllm", **workload):
    return ask(
        model=MIXTRAL,
        device="rtx-4090",
        engine=engine,
        workload={**GENERATE, **workload},
        strategy={"offload": {"weights_cpu": share}, "weight_dtype": "bf16"},
    ).performance


def test_experts_leave_first_and_few_of_them_are_fetched():
    """A token visits two of eight experts, so a step fetches far less than what is away."""
    link = 1.6e10 * 2
    away_bytes = 0.8 * 2 * 46.7e9

    assert moe(0.8).tpot_seconds < 0.5 * away_bytes / link


def test_more_cached_experts_are_met_more_often():
    times = [moe(share).tpot_seconds for share in (0.5, 0.7, 0.9)]

    assert times == sorted(times)


def test_a_larger_batch_visits_more_experts():
    assert moe(0.8, batch_size=16).tpot_seconds > moe(0.8).tpot_seconds


@pytest.mark.parametrize("cached", [0.0, 0.25, 0.5, 1.0])
def test_skew_makes_hits_likelier_than_the_cached_share(cached):
    hits = expert_hit_ratio(cached_share=cached, skew_ratio=0.3)

    assert cached <= hits <= 1
    assert expert_hit_ratio(cached_share=cached, skew_ratio=0.0) == cached


def test_llama_cpp_computes_its_offloaded_layers_on_the_host():
    """Decode reads them through the host's memory, which is faster than the link to the card."""
    host, link = moe(0.8, "llama_cpp").tpot_seconds, moe(0.8, "vllm").tpot_seconds

    assert host < link


def test_more_layers_on_the_host_are_slower():
    strategies = [{"offload": {"weights_cpu": share}} for share in (0.0, 0.3, 0.6)]
    times = [
        ask(**{**NEAR, "engine": "llama_cpp"}, strategy=one).performance.tpot_seconds
        for one in strategies
    ]

    assert times == sorted(times)
    assert times[0] < times[2] / 3
