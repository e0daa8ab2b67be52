"""The bench of adapters: in one batch each prompt is answered as it is alone, in fewer passes."""

import pytest
import torch

from runners.jobs.adapter_files import MixedAdapters
from runners.jobs.loading import demo_config, fresh_model, ready
from runners.jobs.serve import bench
from runners.jobs.serve.paging import PagedCache, check_paging
from tests.runners.jobs.tiny import TINY

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6]]


@pytest.fixture
def paged():
    torch.manual_seed(1)
    model = ready(fresh_model(demo_config(TINY), torch.float32))
    adapters = MixedAdapters(model, [bench._adapter(model, str(at)) for at in range(3)])
    check_paging(model, cache := PagedCache(8), TINY.vocab_size)
    return bench.Paged(model, cache, adapters, 6)


@pytest.mark.equality
def test_together_each_prompt_is_answered_as_by_its_adapter_alone(paged):
    alone = [paged.write([each], [at])[0] for at, each in enumerate(PROMPTS)]

    assert paged.write(PROMPTS, range(3)) == alone


def test_adapters_in_one_batch_take_the_passes_of_one_of_them(paged, monkeypatch):
    passes, real = [], bench.forward
    monkeypatch.setattr(bench, "forward", lambda *a: (passes.append(1), real(*a))[1])

    paged.write(PROMPTS, range(3))

    assert len(passes) == 6


def test_every_ratio_is_taken_and_named():
    effort = bench.Effort(rounds=1, num_adapters=2, prompt_tokens=4, output_tokens=2)

    assert [each.name for each in bench.ratios(effort, TINY)] == [
        "adapters in turn within a batch / side by side",
        "adapters one by one / in one batch",
    ]
