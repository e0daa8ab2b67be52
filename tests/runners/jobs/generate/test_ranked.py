"""Ranks that share a model write what one process writes."""

import pytest
from pydantic import ValidationError
from transformers import AutoConfig

from runners.jobs.generate.ranked import check_divides, part_of
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import BadInputError
from runners.jobspec import DemoModel, DemoPrompts, GenerateSpec, PromptLookup
from runners.jobspec.generate import ExpertCache, TensorSplit

DEFAULTS = {
    "prompts": DemoPrompts(count=5, input_tokens=24, shortest=4),
    "batch_size": 4,
    "output_tokens": 12,
}


def spec_of(model, **fields) -> GenerateSpec:
    return GenerateSpec(model=model, weight_dtype="fp32", **DEFAULTS, **fields)


def test_ranks_need_a_folder_to_read_their_part_from(make_job):
    job = make_job(spec_of(DemoModel(), split=TensorSplit()))

    with pytest.raises(BadInputError, match="from a model folder; source demo has none"):
        part_of(job, job.spec, Ranks(0, 2))


@pytest.mark.parametrize(("size", "field"), [(3, "num_attention_heads"), (4, "num_key_value")])
def test_ranks_that_do_not_divide_the_heads_are_refused_by_name(size, field):
    config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2)

    with pytest.raises(BadInputError, match=f"{field}.*which {size} ranks do not divide"):
        check_divides(config, size)


def test_ranks_that_do_not_divide_the_experts_are_refused_by_name():
    config = AutoConfig.for_model("mixtral", num_local_experts=6)

    with pytest.raises(BadInputError, match="num_experts is 6, which 4 ranks do not divide"):
        check_divides(config, 4, by_experts=True)


def test_a_model_without_experts_is_not_divided_by_them():
    config = AutoConfig.for_model("llama")

    with pytest.raises(BadInputError, match="a 'llama' model has no experts to divide"):
        check_divides(config, 2, by_experts=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"batching": "continuous"},
        {"batching": "packed"},
        {"kv_cache": "int4"},
        {"weight_dtype": "int8"},
        {"speculation": PromptLookup()},
        {"offload": ExpertCache()},
    ],
)
def test_what_no_split_runs_is_refused_by_name(changes):
    fields = {"model": DemoModel(), "weight_dtype": "fp32", "split": TensorSplit(), **changes}
    (name,) = changes

    with pytest.raises(ValidationError, match=f"split tensor runs with .*not with {name} "):
        GenerateSpec.model_validate(fields)
