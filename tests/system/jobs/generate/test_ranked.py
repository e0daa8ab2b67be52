"""Ranks that share a model write what one process writes."""

import pytest
import torch

from runners.jobs.generate.stage_model import load_rank_part
from runners.jobs.loading import fresh_model
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import BadInputError
from runners.jobspec import FolderModel
from runners.jobspec.generate import ExpertSplit, PipelineSplit, TensorSplit
from tests.runners.jobs.generate.test_link import (
    DEFAULTS,  # noqa: F401 -- the fixture ``generate`` reads it
    ranked_spec,
)
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.gang import run_on_ranks
from tests.system.jobs.generate.forks import run_on_forks
from tests.system.jobs.generate.reading import outputs

MIXTRAL = {
    **TINY_CONFIG,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def resident(generate):
    return generate("one-process")


@pytest.mark.slow
@pytest.mark.equality
def test_a_share_of_every_matrix_on_each_rank_writes_the_same(host, trained_model, resident):
    run = run_on_ranks(host, "ranked-tensor", ranked_spec(trained_model, split=TensorSplit()))

    assert run.returncode == 0, run.stderr
    assert outputs(run) == outputs(resident)
    assert len(run.bodies("result")) == 1
    assert "tensor parallel over 2 ranks" in run.bodies("result")[0]["notes"]["split"]
    assert run.measured["parameter_bytes"] < 0.8 * resident.measured["parameter_bytes"]
    assert run.measured["kv_cache_bytes"] == resident.measured["kv_cache_bytes"] / 2


@pytest.mark.slow
@pytest.mark.equality
def test_a_run_of_layers_on_each_rank_writes_the_same(host, trained_model, resident):
    split, batching = PipelineSplit(), "turbo"

    run = run_on_forks(
        host, "ranked-pipeline", ranked_spec(trained_model, split=split, batching=batching)
    )

    assert run.returncode == 0, run.stderr
    assert outputs(run) == outputs(resident)
    assert "pipeline parallel over 2 ranks" in run.bodies("result")[0]["notes"]["split"]
    assert run.measured["parameter_bytes"] < resident.measured["parameter_bytes"]


@pytest.mark.slow
@pytest.mark.equality
def test_whole_experts_on_each_rank_write_the_same(host, generate):
    torch.manual_seed(5)
    path = host.path / "models" / "ranked-mixtral"
    fresh_model(MIXTRAL, torch.float32).save_pretrained(str(path))
    model = FolderModel(path=path.name)
    alone = generate("experts-alone", model=model)

    run = run_on_forks(host, "ranked-experts", ranked_spec(model, split=ExpertSplit()))

    assert run.returncode == 0, run.stderr
    assert outputs(run) == outputs(alone)
    assert "expert parallel over 2 ranks" in run.bodies("result")[0]["notes"]["split"]
    assert run.measured["parameter_bytes"] < 0.8 * alone.measured["parameter_bytes"]


def test_another_number_of_ranks_than_the_plan_has_is_refused(make_job, trained_model):
    job = make_job(ranked_spec(trained_model, split=PipelineSplit(size=3)))

    with pytest.raises(BadInputError, match="pipeline has size 3, but 2 ranks were started"):
        load_rank_part(job, job.spec, Ranks(0, 2))
