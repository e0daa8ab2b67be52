"""The bench of layouts asks the planner of what runs, and its page says what was kept."""

import pytest

from planner.specs.cluster import ClusterSpec, DeviceSpec
from runners.bench_cases import CollectiveTime, Ratio
from runners.jobspec.train import LayoutOptions
from webapp.core.benches import layouts
from webapp.core.benches.layouts import (
    ALONE,
    COPIES,
    MODELS,
    RANKS,
    Found,
    Machine,
    _options,
    calibrated,
    cases,
    first_choice,
    machine_of,
    predicted_seconds,
)
from webapp.plans.training import layout_of

DEVICE = DeviceSpec(
    id="host-x", kind="cpu", memory_bytes=2**34, memory_bandwidth_bytes_per_second=2e10,
    peak_flops_per_second={"fp32": 9e10}, op_overhead_seconds=2e-6, provenance="measured",
)  # fmt: skip
ALONE_CLUSTER = ClusterSpec(device=DEVICE)
MACHINE = Machine(
    ALONE_CLUSTER,
    ALONE_CLUSTER.as_ranks_of_cpu(RANKS, 2).model_copy(
        update={
            "intra_node_bandwidth_bytes_per_second": 6e8,
            "collective_latency_seconds": 7e-3,
            "hand_over_latency_seconds": 2e-3,
        }
    ),
)
MEASURED = {ALONE: [1.1], COPIES: [0.5, 0.7]}
EACH = pytest.mark.parametrize("case", MODELS, ids=[case.name for case in MODELS])


@EACH
def test_every_layout_takes_all_ranks_and_no_two_are_the_same(case):
    found = {name: _options(name, strategy) for name, strategy in cases(case).items()}

    assert len(found) > 50
    assert {each.world_size for each in found.values()} == {RANKS}
    assert len({each.model_dump_json() for each in found.values()}) == len(found)


@EACH
def test_what_the_planner_chooses_is_one_of_the_layouts_that_run(case):
    calibration = calibrated(case, MACHINE, MEASURED)

    chosen = layout_of(first_choice(case, MACHINE, calibration))
    known = [_options(name, strategy) for name, strategy in cases(case).items()]
    assert (chosen or LayoutOptions(data_parallel_size=RANKS)) in known


@EACH
def test_no_layout_is_predicted_to_be_faster_than_the_choice(case):
    calibration = calibrated(case, MACHINE, MEASURED)
    choice = first_choice(case, MACHINE, calibration)

    chosen = predicted_seconds(case, MACHINE.ranks, choice, calibration)
    for name, strategy in cases(case).items():
        seconds = predicted_seconds(case, MACHINE.ranks, strategy, calibration)
        assert seconds >= 0.999 * chosen, name


def test_runs_that_took_twice_as_long_make_the_host_slower():
    case = MODELS[0]
    slower = {name: [2 * each for each in own] for name, own in MEASURED.items()}

    once, twice = (calibrated(case, MACHINE, own).factors for own in (MEASURED, slower))
    assert once.keys() == twice.keys()
    assert all(twice[name].factor > once[name].factor for name in once)


def test_this_machine_is_told_to_the_planner_as_a_host_and_as_its_ranks(measured_host):
    exchanges = [
        CollectiveTime(collective=name, ranks=4, latency_seconds=wait, bytes_per_second=1e9)
        for name, wait in (("all_reduce", 7e-3), ("send", 2e-3))
    ]
    found = machine_of(measured_host, exchanges)

    assert found.alone.num_devices == 1
    assert found.ranks.num_devices == RANKS
    assert found.ranks.collective_latency_seconds == 7e-3
    assert found.ranks.hand_over_latency_seconds == 2e-3


@pytest.fixture
def measured_host():
    from runners.facts import DeviceMeasurement, Microbench

    cpu = DeviceMeasurement(
        device="cpu", memory_bandwidth_bytes_per_second=2e10, flops_per_second={"fp32": 9e10},
        op_overhead_seconds=2e-6,
    )  # fmt: skip
    return Microbench(
        measured_at_ms=1, duration_seconds=1.0, torch_version="2.13", num_threads=2,
        devices=(cpu,), disk_write_bytes_per_second=1e9,
    )  # fmt: skip


def test_the_page_is_what_the_kept_rows_say():
    assert layouts.DOCS.read_text() == layouts.page(layouts.stored())


def test_each_model_kept_its_first_choice_in_every_round():
    for kept in layouts.stored():
        assert len(kept["seconds"][kept["first"]]) >= kept["regret"]["n"]
        assert kept["seconds"].keys() == kept["predicted"].keys()


def test_a_regret_is_kept_under_its_models_name():
    ratio = Ratio("other", 0.9, 0.8, 1.0, 5, "step seconds")
    found = Found("wide", "a", {"a": 1.0}, {"a": [1.0]}, ratio, {})

    (kept,) = layouts.regrets([found])
    assert kept == ratio._replace(name="fastest other layout / planner's first choice, wide model")


def test_a_regret_above_five_per_cent_is_called_so():
    kept = layouts.stored()[0]
    lost = {**kept["regret"], "value": 0.9, "low": 0.85, "high": 0.94}

    text = layouts.page([{**kept, "regret": lost}])
    assert "11.1 % (6.4 to 17.6)" in text
    assert text.count("| no |") == 1
