"""The bench of generation: every technique has its ratio, measured and not written down."""

import itertools

import pytest
import torch

from runners.jobs.generate.bench import SHAPE, Bench, Effort, prompts, rows
from runners.jobs.generate.static import Limits
from runners.jobs.loading import demo_config, fresh_model

SMALL = Effort(rounds=1, num_prompts=6, longest=24, output_tokens=6)


@pytest.fixture(scope="module")
def bench():
    torch.manual_seed(1)
    return Bench(fresh_model(demo_config(SHAPE), torch.float32).eval(), rounds=1)


@pytest.mark.slow
def test_every_technique_has_a_ratio_above_nothing():
    found = {name: value for name, value, _unit in rows(SMALL)}

    for word in (
        "continuous",
        "paged",
        "TurboTransformers",
        "padding-free",
        "lookup",
        "int4",
        "streamed",
    ):
        assert any(word in name for name in found)
    assert all(value > 0 for value in found.values())


@pytest.mark.proven
def test_a_narrow_cache_holds_less_the_fewer_bits_it_has(bench):
    ratios = [value for _name, value, _unit in bench.caches(prompts(4, 30, 40))]

    assert ratios == sorted(ratios)
    assert ratios[0] > 3.5


@pytest.mark.proven
def test_a_batch_pays_once_for_layers_that_come_from_disk(bench):
    found = {name: value for name, value, _ in bench.offloaded([[7] * 8] * 6, Limits(2))}

    assert found["streamed for a batch over one by one, speed"] > 1


@pytest.mark.proven
def test_no_work_on_padding_is_less_work(bench):
    ((_name, ratio, _unit),) = bench.packed([[7] * 200, *([5] * 8 for _ in range(15))])

    assert ratio > 1


@pytest.mark.proven
def test_sorting_and_the_dynamic_programme_save_padding(bench):
    pile = list(itertools.chain(*([[7] * 200, *([5] * 8 for _ in range(7))] for _ in range(3))))

    found = {name: value for name, value, _unit in bench.batches(pile, Limits(1))}

    assert found["TurboTransformers over given order, speed"] > 1


def test_the_pile_of_the_bench_has_many_short_prompts_and_few_long_ones():
    lengths = sorted(map(len, prompts(100, 4, 200)))

    assert lengths[0] >= 4
    assert lengths[-1] <= 200
    assert lengths[50] < 100
