"""The bench of layouts: real ranks that are forked, timed in turns, and judged."""

from statistics import geometric_mean

import pytest

from runners.host.bench import LayoutBenchRequest
from runners.jobspec.train import LayoutOptions
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.harness import PROJECT
from tests.system.jobs.layouts_bench_run import told

TRAINING = {
    "sequence_length": 16, "micro_batch_size": 1, "gradient_accumulation_steps": 2,
    "max_steps": 9, "time_budget_seconds": None, "compute_dtype": "fp32",
}  # fmt: skip


@pytest.mark.slow
def test_real_ranks_are_timed_round_by_round_and_judged_by_a_final():
    layouts = {"alone": None, "pair": LayoutOptions(data_parallel_size=2, zero_stage=1)}
    asked = LayoutBenchRequest(
        config=TINY_CONFIG, training=TRAINING, layouts=layouts, ranks=2, rounds=2, steps=1,
        final_rounds=3, first_choice="pair",
    )  # fmt: skip
    exchanges, steps, judged = told(asked, PROJECT)

    assert {each["collective"] for each in exchanges} == {
        "all_reduce", "all_gather", "reduce_scatter", "send",
    }  # fmt: skip
    assert all(each["latency_seconds"] > 0 < each["bytes_per_second"] for each in exchanges)
    taken = {
        name: {each["round"]: each["seconds"] for each in steps if each["layout"] == name}
        for name in layouts
    }
    assert taken["pair"].keys() == {0, 1, 2, 3, 4}
    assert taken["alone"].keys() >= {0, 2, 3, 4}
    pairs = [taken["alone"][number] / taken["pair"][number] for number in (2, 3, 4)]
    assert judged[0] == "alone"
    assert judged[4] == 3
    assert judged[1] == pytest.approx(geometric_mean(pairs))
