"""The bench of generation: every technique has its ratio, measured and not written down."""

import pytest
import torch

from runners.jobs.generate.bench import SHAPE, Bench, Effort, prompts, ratios
from runners.jobs.loading import demo_config, fresh_model

SMALL = Effort(rounds=1, num_prompts=6, longest=24, output_tokens=6, compiles=False)


@pytest.fixture(scope="module")
def bench():
    torch.manual_seed(1)
    return Bench(fresh_model(demo_config(SHAPE), torch.float32).eval(), rounds=1)


@pytest.mark.slow
def test_every_technique_has_a_ratio_above_nothing():
    found = list(ratios(SMALL))

    for word in ("continuous", "paged", "Turbo", "padding-free", "speculative", "int4", "map"):
        assert any(word in each.name for each in found)
    assert all(each.value > 0 for each in found)
    assert len({each.name for each in found}) == len(found)


@pytest.mark.proven
def test_a_narrow_cache_holds_less_the_fewer_bits_it_has(bench):
    found = [each.value for each in bench.caches(prompts(4, 30, 40))]

    assert found == sorted(found)
    assert found[0] > 3.5


def test_the_pile_of_the_bench_has_many_short_prompts_and_few_long_ones():
    lengths = sorted(map(len, prompts(100, 4, 200)))

    assert lengths[0] >= 4
    assert lengths[-1] <= 200
    assert lengths[50] < 100
