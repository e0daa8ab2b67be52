"""The operator profile: rows of both phases, classes by what bounds them, and the artefact."""

import math
from types import SimpleNamespace

import pytest
import torch

from runners.jobs.benchmark import Rates, bound_of, flops_of, profile_model, rows_of
from runners.jobs.evaluation import Workload
from runners.jobs.loading import fresh_model
from runners.jobspec.benchmark import MAX_ROWS
from tests.runners.jobs.tiny import TINY_CONFIG

RATES = Rates(flops_per_second=1e9, bytes_per_second=1e9)


def event(name="aten::mm", micros=1000.0, shapes=((8, 8), (8, 8)), flops=0, count=1, device=0.0):
    return SimpleNamespace(
        key=name,
        self_cpu_time_total=micros,
        self_device_time_total=device,
        input_shapes=[list(each) for each in shapes],
        flops=flops,
        count=count,
        device_type=SimpleNamespace(name="CPU"),
    )


@pytest.fixture(scope="module")
def report():
    model = fresh_model(TINY_CONFIG, torch.float32).eval()
    return profile_model(model, Workload(2, 16, 4, seed=1))


def test_the_products_of_a_prompt_are_counted_to_the_operation(report):
    layers, hidden, kv, mlp, tokens = 2, 64, 32, 128, 2 * 16
    per_token = layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * mlp)
    head = 2 * 2 * hidden * 512  # the last position of each of two

    products = [row for row in report.of("prefill") if row.name in {"aten::mm", "aten::addmm"}]

    assert sum(row.flops for row in products) == 2 * per_token * tokens + head


def test_shares_add_up_and_the_profiler_says_what_it_costs(report):
    bounds = report.seconds_by_bound("decode")

    assert sum(bounds.values()) == pytest.approx(sum(row.seconds for row in report.of("decode")))
    assert report.decode_steps == 3
    assert report.slowdown_ratio > 0


@pytest.mark.parametrize(
    ("name", "seconds", "flops", "moved", "bound"),
    [
        ("aten::mm", 1.0, 9e8, 1e8, "compute"),
        ("aten::mm", 1.0, 1e8, 9e8, "memory_bandwidth"),
        ("aten::mm", 1.0, 1e7, 1e7, "overhead"),
        ("aten::view", 1.0, 0.0, 9e9, "overhead"),
    ],
)
def test_an_operator_belongs_to_what_takes_its_time(name, seconds, flops, moved, bound):
    assert bound_of(name, seconds, flops, moved, RATES) == bound


def test_fused_attention_is_counted_by_its_shapes_and_unknown_work_is_none():
    shapes = [[2, 4, 16, 8], [2, 4, 32, 8], [2, 4, 32, 8]]

    counted = flops_of("aten::_scaled_dot_product_flash_attention_for_cpu", shapes, 0.0, 3)

    assert counted == 3 * 4 * 2 * 4 * 16 * 32 * 8
    assert flops_of("aten::silu", [[2, 2]], 0.0, 1) is None


def test_an_operators_own_time_on_its_device_counts_where_it_has_one():
    rows = rows_of("decode", [event(micros=5.0, device=300.0)], RATES, 4)

    assert rows[0].seconds == pytest.approx(300e-6)


def test_many_short_operators_are_one_row_and_no_time_is_lost():
    events = [event(f"aten::op{at}", micros=float(at + 1)) for at in range(MAX_ROWS + 7)]

    rows = rows_of("prefill", events, RATES, 4)

    assert rows[-1].name == "7 others"
    assert math.fsum(row.seconds for row in rows) == pytest.approx(
        sum(each.self_cpu_time_total for each in events) / 1e6
    )
