"""Offloading: what leaves the device, ranked beside what fits; the best shares over the tiers."""

from itertools import pairwise

import numpy as np
import pytest

from planner.catalog.engines import get_engine
from planner.cost.memory import expert_hit_ratio
from planner.fitting.offload_examples import T4_HOST, reproduced_rows
from planner.search import suggest
from planner.search.placement import (
    SHARES,
    best_batch,
    best_placement,
    linear_programme,
    memory_tier_limits,
    micro_sizes,
    offload_fractions_of,
    offload_pieces,
    placed_strategy,
    placement_costs,
    placements,
    solve,
    tokens_per_second,
)
from planner.specs.base import NotPossibleError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.workload import OffloadSpec
from planner.workload.costing import estimate_request
from planner.workload.resolve import resolve
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, MIXTRAL, TRAIN, ask, held, search

NEAR = {"model": LLAMA_8B, "workload": GENERATE, "device": "rtx-4090", "engine": "vllm"}


def half_away(**fields):
    return ask(**{**NEAR, **fields}, strategy={"offload": {"weights_cpu": 0.5}})


def test_weights_that_leave_are_on_the_host_by_their_share_and_pinned_by_vllm():
    assert held(half_away(), "weights") == pytest.approx(held(ask(**NEAR), "weights") / 2, abs=1)
    for engine, copies in (("vllm", 1.65), ("sglang", 1.0)):
        whole = held(ask(**{**NEAR, "engine": engine}), "weights")
        found = half_away(engine=engine).memory.host_bytes
        assert found == pytest.approx(copies * whole / 2, abs=2), (engine, copies)
    found = ask(**NEAR, strategy={"offload": {"weights_cpu": 1.0}})
    assert held(found, "weights") == 0
    assert found.memory.host_bytes == pytest.approx(1.65 * held(ask(**NEAR), "weights"), abs=1)

    # vllm-project/vllm issues 58178 (GiB on a Grace host) and 56410 (1.9 times 12 GiB).
    ratio = found.memory.host_bytes / held(ask(**NEAR), "weights")
    for offloaded, used in ((305, 504), (12, 23)):
        assert offloaded * ratio == pytest.approx(used, rel=0.15), (offloaded, used)


def test_streamed_weights_dominate_the_decode_step_and_a_faster_link_shortens_it():
    found = half_away()
    assert found.performance.tpot_seconds > 5 * ask(**NEAR).performance.tpot_seconds
    assert found.bound_by == "communication"
    cluster = {"device": "rtx-4090", "host_to_device_bandwidth_bytes_per_second": 1e12}
    fast = half_away(cluster=cluster).performance
    assert fast.tpot_seconds < half_away().performance.tpot_seconds


def test_what_does_not_fit_can_be_offloaded_unless_the_host_has_no_room_either():
    request = {"model": LLAMA_70B, "workload": GENERATE, "engine": "vllm"}
    assert not ask(**request).fits
    assert ask(**request, strategy={"offload": {"weights_cpu": 0.6}}).fits
    cluster = {"device": "rtx-4090", "host_memory_bytes": 1024**3}
    found = half_away(cluster=cluster)
    assert any("GiB of host memory, 1.0 GiB are there" in warning for warning in found.warnings)
    assert not found.fits
    assert found.bound_by == "memory_capacity"


def test_optimiser_states_go_where_they_are_sent_and_a_disk_updates_more_slowly():
    base = {"workload": TRAIN, "engine": "megatron"}
    for place, field in (("cpu", "host_bytes"), ("nvme", "disk_bytes")):
        away = ask(**base, strategy={"offload": {"optimizer": place}})
        assert getattr(away.memory, field) == held(ask(**base), "optimizer_states"), (place, field)
        assert held(away, "optimizer_states") == 0, (place, field)

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


def test_what_leaves_is_held_to_the_byte_and_streaming_needs_room_for_a_layer():
    for share, tensor, field in (
        ("weights_cpu", "weights", "host_bytes"),
        ("weights_disk", "weights", "disk_bytes"),
        ("kv_cpu", "kv_cache", "host_bytes"),
        ("kv_disk", "kv_cache", "disk_bytes"),
    ):
        away, home = placed(**{share: 0.5}), placed()
        assert held(away, tensor) == pytest.approx(held(home, tensor) / 2, abs=1)
        assert getattr(away.memory, field) == pytest.approx(held(home, tensor) / 2, abs=1)

    assert held(placed(weights_cpu=0.5), "buffers") > 0
    assert held(placed(weights_cpu=1.0), "buffers") > held(placed(weights_cpu=0.5), "buffers")


def test_smaller_micro_batches_wait_with_their_tokens_and_need_a_smaller_working_set():
    home, away = placed(micro=8), placed(micro=8, activations_cpu=1.0)
    assert held(away, "activations") < held(home, "activations")
    assert away.memory.host_bytes > 0
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


def test_attention_over_a_cache_on_the_host_is_done_there_unless_it_is_quantised():
    names = {term.name for term in placed(kv_cpu=1.0).terms}
    assert "Attention on the host" in names
    strategy = {"offload": {"kv_cpu": 1.0}, "kv_cache_dtype": "int4"}
    found = ask(device="a100-sxm4-80gb", engine="flexgen", workload=BATCH, strategy=strategy)
    assert "Attention on the host" not in {term.name for term in found.terms}


def test_shares_beyond_the_whole_and_a_full_disk_are_refused_with_the_numbers():
    with pytest.raises(NotPossibleError, match=r"sum to 1\.4") as caught:
        placed(weights_cpu=0.7, weights_disk=0.7)
    assert caught.value.field == "strategy.offload.weights_disk"

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


def test_experts_leave_first_and_are_met_by_share_batch_and_skew():
    # A token visits two of eight experts, so a step fetches far less than what is away.
    link = 1.6e10 * 2
    away_bytes = 0.8 * 2 * 46.7e9
    assert moe(0.8).tpot_seconds < 0.5 * away_bytes / link

    times = [moe(share).tpot_seconds for share in (0.5, 0.7, 0.9)]
    assert times == sorted(times)
    assert moe(0.8, batch_size=16).tpot_seconds > moe(0.8).tpot_seconds

    for cached in (0.0, 0.25, 0.5, 1.0):
        hits = expert_hit_ratio(cached_share=cached, skew_ratio=0.3)
        assert cached <= hits <= 1, cached
        assert expert_hit_ratio(cached_share=cached, skew_ratio=0.0) == cached, cached


def test_llama_cpp_computes_on_the_host_and_more_layers_there_are_slower():
    # Decode reads them through the host's memory, which is faster than the link to the card.
    host, link = moe(0.8, "llama_cpp").tpot_seconds, moe(0.8, "vllm").tpot_seconds
    assert host < link

    strategies = [{"offload": {"weights_cpu": share}} for share in (0.0, 0.3, 0.6)]
    times = [
        ask(**{**NEAR, "engine": "llama_cpp"}, strategy=one).performance.tpot_seconds
        for one in strategies
    ]
    assert times == sorted(times)
    assert times[0] < times[2] / 3


def test_a_prompt_waits_for_each_layer_that_llama_cpp_copies_to_the_device():
    """A layer's copy and its products take turns (ggml-org/llama.cpp pull requests 6083, 7315)."""

    def prompt_tokens_per_second(model, device, quantization, tokens, share):
        performance = ask(
            model=model,
            cluster={"device": device, "host_memory_bytes": 128 * GB},
            engine="llama_cpp",
            workload={**GENERATE, "batch_size": 1, "input_tokens": tokens, "output_tokens": 2},
            strategy={"quantization": quantization, "offload": {"weights_cpu": share}},
        ).performance
        return tokens / performance.prefill_seconds

    for model, device, quantization, tokens in (
        ("meta-llama/Llama-2-7b", "rtx-3090-ti", "gguf:q4_0", 1024),
        ("Qwen/Qwen3-8B", "rtx-4080", "gguf:q4_k_m", 32_768),
    ):
        rates = [
            prompt_tokens_per_second(model, device, quantization, tokens, share)
            for share in (0.0, 0.3125, 0.4375, 1.0)
        ]
        assert all(more > less for more, less in pairwise(rates)), (model, rates)

    # tetherto/qvac-fabric-llm.cpp pull request 233, baseline: pp2048 in steps of 512, 36 of the 64
    # dense feed-forward blocks of Qwen3.5-27B, which are 0.636 of its parameters, in host memory.
    for device, published in (("rtx-5090", 1511), ("rtx-3090", 817)):
        rate = prompt_tokens_per_second(
            "Qwen/Qwen3.5-27B", device, "gguf:q4_k_m", 2048, 36 / 64 * 0.636
        )
        assert rate == pytest.approx(published, rel=0.3), device


GB = 10**9
WORK = {"kind": "generate", "batch_size": 96, "input_tokens": 512, "output_tokens": 32}
RTX = {"device": "rtx-4090", "host_memory_bytes": 256 * GB}


def request(model="facebook/opt-30b", batch_size=96, engine="flexgen", **cluster):
    return EstimateRequest.model_validate(
        {
            "model": model,
            "cluster": {**T4_HOST, **cluster},
            "workload": {**WORK, "batch_size": batch_size},
            "strategy": {"weight_dtype": "fp16", "kv_cache_dtype": "fp16"},
            "engine": engine,
        }
    )


def found(**fields):
    return search(**{"model": "facebook/opt-30b", "cluster": T4_HOST, "workload": WORK, **fields})


def moved(plan):
    return plan.strategy.offload


def test_a_model_too_large_for_its_card_is_ranked_with_the_programmes_shares():
    answer = found(engine="flexgen", objective="throughput")
    formats = [plan.strategy.weight_dtype for plan in answer.plans]
    assert sorted(formats) == ["fp16", "int4", "int8"]
    assert all(plan.fits and moved(plan).weights_cpu > 0.2 for plan in answer.plans)
    speeds = [plan.performance.tokens_per_second for plan in answer.plans]
    assert speeds == sorted(speeds, reverse=True)


def test_a_placement_is_the_programmes_beside_what_fits_and_names_its_family():
    answer = found(engine="flexgen", pins={"weight_dtype": "fp16", "kv_cache_dtype": "fp16"})
    best = best_placement(request())
    assert moved(answer.plans[0]) == best.offload
    assert answer.plans[0].strategy.micro_batch_size == best.micro_batch_size

    answer = found(engine="flexgen")
    assert "flexgen" in answer.plans[0].techniques
    assert not answer.suggestions

    answer = found(model=LLAMA_8B, cluster=RTX, workload={**WORK, "batch_size": 4})
    assert all(moved(plan) is None for plan in answer.plans)

    cluster = {**RTX, "device": "rtx-6000-ada"}
    answer = found(model=LLAMA_70B, cluster=cluster, workload={**WORK, "batch_size": 1})
    away = {plan.strategy.weight_dtype: moved(plan) for plan in answer.plans}
    assert away["int4"] is None
    assert away["bf16"].weights_cpu > 0.5


def test_no_host_or_disk_is_used_that_nobody_described_or_that_is_not_needed():
    answer = found(cluster={"device": "t4"})
    assert not answer.plans
    answer = found(cluster={"device": "t4", "host_memory_bytes": 208 * GB})
    assert answer.plans
    assert all(moved(plan).weights_disk == moved(plan).kv_disk == 0 for plan in answer.plans)
    answer = found(engine="flexgen")
    assert all(moved(plan).weights_disk == 0 for plan in answer.plans)


def test_pins_hold_for_placements():
    answer = found(pins={"micro_batch_size": 4, "weight_dtype": "bf16"})
    assert [plan.strategy.micro_batch_size for plan in answer.plans] == [4]
    assert not found(pins={"offload": {"weights_cpu": 0.1}}).plans


def test_an_engine_keeps_off_the_device_what_it_can_and_no_more():
    for engine, shares in (
        ("torch", SHARES), ("flexgen", SHARES), ("vllm", ("weights_cpu",)),
        ("llama_cpp", ("weights_cpu",)), ("tensorrt_llm", ()),
    ):  # fmt: skip
        assert offload_fractions_of(get_engine(engine, "gpu")) == shares, (engine, shares)

    assert not found(model=LLAMA_70B, cluster=RTX, engine="tensorrt_llm").plans

    answer = found(model=LLAMA_70B, cluster=RTX, engine="vllm", workload={**WORK, "batch_size": 4})
    assert answer.plans
    assert all(moved(plan).kv_cpu == moved(plan).activations_cpu == 0 for plan in answer.plans)
    assert all(plan.strategy.micro_batch_size is None for plan in answer.plans)


def test_every_device_holds_a_replica():
    cluster = {**T4_HOST, "devices_per_node": 4, "host_memory_bytes": 800 * GB}
    answer = found(cluster=cluster, engine="flexgen", objective="throughput")
    one = found(engine="flexgen", objective="throughput").plans[0].performance
    assert answer.plans[0].strategy.data_parallel_size == 4
    assert answer.plans[0].performance.tokens_per_second > one.tokens_per_second


def test_micro_batches_and_their_columns_are_solved_as_each_alone():
    asked = request()
    together = {one.micro_batch_size: one for one in placements(asked, [8, 32, 96])}
    for size, one in together.items():
        alone = next(placements(asked, [size]))
        assert tokens_per_second(one) == pytest.approx(tokens_per_second(alone), rel=1e-3)

    setting = resolve(request())
    away = OffloadSpec(weights_cpu=0.7, kv_cpu=0.5)
    together = placement_costs(setting, away, [4, 16, 96])
    for index, size in enumerate((4, 16, 96)):
        alone = placement_costs(setting, away, [size])
        np.testing.assert_allclose(together.channels_s[..., index], alone.channels_s[..., 0])
        np.testing.assert_allclose(together.tiers_bytes[:, index], alone.tiers_bytes[:, 0])


def mixtral(share):
    asked = request(model=MIXTRAL, batch_size=1, device="rtx-4090")
    strategy = asked.strategy.model_copy(
        update={"offload": OffloadSpec(weights_cpu=share), "micro_batch_size": 1}
    )
    return estimate_request(asked.model_copy(update={"strategy": strategy}), explain=False)


def test_experts_leave_piece_by_piece():
    setting = resolve(request(model=MIXTRAL, batch_size=1, device="rtx-4090"))
    pieces = [move for move in offload_pieces(setting) if move.share == "weights_cpu"]
    times = [mixtral(move.end).performance.tpot_seconds for move in pieces]
    slopes = np.diff([mixtral(0.0).performance.tpot_seconds, *times]) / [m.width for m in pieces]
    assert len(pieces) == 5
    assert sum(move.width for move in pieces) == pytest.approx(1.0)
    assert all(slopes[1:] >= slopes[:-1] * 0.999)  # convex: what the programme relies on


def test_no_share_of_experts_on_the_host_beats_the_programmes():
    best = best_placement(request(model=MIXTRAL, batch_size=1, device="rtx-4090"))
    others = [mixtral(share / 50) for share in range(51)]
    fitting = [one.performance.tokens_per_second for one in others if one.fits]
    assert best.offload.weights_disk == 0
    assert tokens_per_second(best) >= 0.995 * max(fitting)


def question(model="facebook/opt-30b", batch_size=96, **cluster):
    return EstimateRequest.model_validate(
        {
            "model": model,
            "cluster": {**T4_HOST, **cluster},
            "workload": {**WORK, "batch_size": batch_size},
            "strategy": {"weight_dtype": "fp16", "kv_cache_dtype": "fp16"},
            "engine": "flexgen",
        }
    )


def with_shares(request, micro, **shares):
    strategy = request.strategy.model_copy(update={"micro_batch_size": micro})
    document = {**strategy.model_dump(), "offload": shares}
    return estimate_request(
        EstimateRequest.model_validate({**dict(request), "strategy": document}), explain=False
    )


def test_flexgens_published_rows_come_out_near_and_every_policy_fits():
    for row in reproduced_rows():
        assert row.predicted / row.measured < 3, row
        assert row.predicted / row.measured > 1 / 3, row
    errors = [abs(row.error) for row in reproduced_rows() if row.engine.startswith("flexgen")]
    assert len(errors) == 6
    assert max(errors) < 1 / 3
    assert np.mean(errors) < 0.2
    assert all(row.estimate.fits for row in reproduced_rows())


def test_no_placement_beats_the_programme_whose_cost_is_linear():
    published = next(
        r for r in reproduced_rows() if (r.engine, r.model) == ("flexgen", "facebook/opt-30b")
    )
    assert (
        tokens_per_second(best_placement(question(batch_size=144))) >= 0.99 * published.predicted
    )

    request, draws = question(), np.random.default_rng(7)
    best = next(placements(request, [32]))
    for _ in range(40):
        weights, cache = draws.dirichlet((1, 1, 1)), draws.dirichlet((1, 1, 1))
        shares = dict(zip(SHARES, (*weights[1:], *cache[1:], draws.random()), strict=True))
        other = with_shares(request, 32, **{name: float(share) for name, share in shares.items()})
        if other.fits:
            assert other.performance.tokens_per_second <= 1.01 * tokens_per_second(best)

    # What the programme relies on: half of every share costs half of every change.
    request = question()
    whole = with_shares(request, 32, weights_cpu=0.8, kv_cpu=0.4)
    half = with_shares(request, 32, weights_cpu=0.4, kv_cpu=0.2)
    assert half.memory.host_bytes == pytest.approx(whole.memory.host_bytes / 2)


def test_tiers_and_blocks_are_used_as_far_as_they_are_there_and_fit():
    best = best_placement(question(model="facebook/opt-6.7b", batch_size=2))
    assert sum(getattr(best.offload, name) for name in SHARES) == 0
    tiny = question(host_memory_bytes=1 * GB, disk_capacity_bytes=1 * GB)
    assert best_placement(tiny) is None
    small = best_placement(question(host_memory_bytes=48 * GB))
    assert small.offload.weights_disk + small.offload.kv_disk > 0.1
    assert small.estimate.memory.host_bytes <= 48 * GB

    chosen = best_batch(question(), (16, 96, 192))
    assert tokens_per_second(chosen) > tokens_per_second(best_placement(question(batch_size=16)))
    assert set(micro_sizes(96)) == {1, 2, 4, 8, 16, 32, 48, 96}


def test_only_generated_batches_are_placed():
    request = EstimateRequest.model_validate(
        {"model": LLAMA_8B, "cluster": {"device": "t4"}, "workload": TRAIN}
    )
    assert best_placement(request) is None
    assert placed_strategy(request) is None


def test_an_impossible_strategy_or_no_room_at_all_has_no_placement():
    request = question().model_copy(update={"engine": "flexgen"})
    wrong = request.strategy.model_copy(update={"tensor_parallel_size": 64})
    assert placed_strategy(request.model_copy(update={"strategy": wrong})) is None
    setting = resolve(question())
    nothing = memory_tier_limits(setting, 1.0)
    assert solve(linear_programme(setting, [32]), nothing, 31.0) == [None]


def test_a_batch_that_does_not_fit_is_told_where_it_would():
    answer = search(
        model="facebook/opt-66b",
        cluster={"device": "t4"},
        workload={**WORK, "batch_size": 4},
        engine="torch",
    )
    titles = [suggestion.title for suggestion in answer.suggestions]

    assert not answer.plans
    assert "weights and cache placed over host memory and disk" in titles


def test_a_suggested_placement_keeps_what_the_host_was_measured_to_do(monkeypatch):
    asked = []
    monkeypatch.setattr(suggest, "placed_strategy", asked.append)
    factors = {"compute": {"factor": 2.0, "spread": 0.1, "n": 9}}
    document = {
        "model": "facebook/opt-66b",
        "cluster": T4_HOST,
        "workload": WORK,
        "host_calibration": {"host": "box", "factors": factors},
    }

    suggest.suggestions(PlanRequest.model_validate(document), lambda _: None)

    assert asked[0].host_calibration.factors["compute"].factor == 2.0
