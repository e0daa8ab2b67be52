"""A compiled decode step over a cache of fixed room writes what plain greedy decoding writes."""

import os
import tempfile

import pytest
import torch
import torch._inductor.config
from pydantic import ValidationError

from runners.jobs.generate.compiled import CompiledStep
from runners.jobs.generate.static import Limits, StopRequestedError, run_batch
from runners.jobs.loading import fresh_model, ready
from runners.jobs.runtime import BadInputError, check_compiler
from runners.jobspec import DemoModel, GenerateSpec, PromptLookup
from runners.jobspec.generate import LayerStreaming
from tests.runners.jobs.tiny import TINY_CONFIG

PROMPTS = [[5, 7, 11, 13], [17, 19, 23], [29] * 9]


@pytest.fixture
def step():
    """A step of four rows that is not compiled: the same function, at once."""
    torch.manual_seed(3)
    model = ready(fresh_model(TINY_CONFIG, torch.float32))
    found = CompiledStep(model, rows=4, length=24)
    found._compiled = found.forward
    return found


@pytest.mark.equality
def test_a_cache_of_fixed_room_writes_the_same_with_fewer_prompts_than_rows(step):
    wanted = [each.ids for each in run_batch(step.model, PROMPTS, Limits(12)).answers]

    found = step.run_batch(PROMPTS, Limits(12))

    assert [each.ids for each in found.answers] == wanted
    assert found.num_steps == 11


@pytest.mark.equality
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_step_is_one_graph_of_fixed_shapes_and_runs_plainly_if_it_does_not_compile(
    step, is_broken
):
    wanted = step.run_batch(PROMPTS, Limits(12)).answers
    graphs = []

    def backend(graph, _inputs):
        if is_broken:
            raise RuntimeError("no such instruction")
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    step._compiled = torch.compile(step.forward, fullgraph=True, dynamic=False, backend=backend)

    assert step.run_batch(PROMPTS, Limits(12)).answers == wanted
    assert step.run_batch(PROMPTS[:1], Limits(12)).answers == wanted[:1]
    assert len(graphs) == (not is_broken)  # compiled once for all positions
    assert ("no such instruction" in step.plain_reason) == is_broken


def test_a_batch_finds_the_cache_empty(step):
    first = step.run_batch(PROMPTS, Limits(8)).answers

    assert step.run_batch(PROMPTS, Limits(8)).answers == first


def test_the_cache_takes_its_whole_room_from_the_start(step):
    few, many = (step.run_batch(PROMPTS, Limits(count)).kv_cache_bytes for count in (1, 12))

    assert few == many > 0


def test_a_stop_ends_it_between_two_tokens(step):
    with pytest.raises(StopRequestedError):
        step.run_batch(PROMPTS, Limits(8, should_stop=lambda: True))


def test_without_a_compiler_the_job_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BadInputError, match=r"compiled_step needs g\+\+.*leave it out"):
        check_compiler(tmp_path, "compiled_step")


def test_a_job_compiles_in_its_own_folder_unless_the_operator_names_one(tmp_path, monkeypatch):
    shared = f"{tempfile.gettempdir()}/torchinductor_root"
    for given, expected in (
        ("", tmp_path),
        (shared, tmp_path),
        ("/data/kernels", "/data/kernels"),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given or shared)
        if not given:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

        check_compiler(tmp_path, "compiled_step")

        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(expected)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batching": "packed"}, "batching packed"),
        ({"kv_cache": "fp8"}, "kv_cache fp8"),
        ({"speculation": PromptLookup()}, "speculation lookup"),
        ({"offload": LayerStreaming()}, "offload stream"),
        ({"weight_dtype": "int8"}, "weight_dtype int8"),
    ],
)
def test_what_is_not_compiled_is_refused_by_name(changes, told):
    with pytest.raises(ValidationError, match=f"not with .*{told}"):
        GenerateSpec(model=DemoModel(), compiled_step=True, **changes)
