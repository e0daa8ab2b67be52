"""Fused kernels of a training: compiled layers and fused attention learn what plain ones learn."""

import pytest
import torch
from pydantic import ValidationError

from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.train.kernels import CompiledLayers
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import tiny_trainer


def test_what_compiling_brought_is_told_from_steps_that_were_steady():
    layers = object.__new__(CompiledLayers)
    layers._layers = [1, 2]

    said = layers.note([9.0, 3.0, 1.0, 1.2, 30.0, 0.9, 0.5, 0.6, 0.55])

    assert said == (
        "2 layers by torch.compile from step 5 on, which took 30.0 s: a step of 1.100 s as it "
        "was takes 0.550 s, 2.00 times as fast"
    )
    assert layers.note([1.0] * 5).endswith("too few steps to say what it brought")


def test_layers_run_as_they_are_while_something_is_judged(tmp_path):
    model = fresh_model(TINY_CONFIG, torch.float32)
    layers = CompiledLayers(model, tmp_path)
    for each in layers._layers:
        each._compiled_call_impl = lambda *_args, **_kwargs: pytest.fail("compiled")

    with layers.aside(), torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))

    assert all(each._compiled_call_impl for each in layers._layers)
    layers.end()
    assert not any(each._compiled_call_impl for each in layers._layers)


def test_a_host_without_a_compiler_is_told_by_name(make_job, monkeypatch):
    monkeypatch.setenv("PATH", "")

    with pytest.raises(BadInputError, match=r"compiled needs g\+\+, which this host lacks"):
        tiny_trainer(make_job(tiny_training(compiled=True)))


def test_a_model_without_layers_is_told_by_name(tmp_path):
    model = fresh_model(TINY_CONFIG, torch.float32)
    model.model.layers = torch.nn.ModuleList()

    with pytest.raises(BadInputError, match="LlamaForCausalLM has no layers to compile"):
        CompiledLayers(model, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "qft"}, "do not go with optimizer qft; leave compiled out"),
        ({"activation_offload": "disk"}, "activation_offload disk"),
        ({"activation_recomputation": "selective"}, "recomputation selective"),
        ({"layout": {"tensor_parallel_size": 2}}, "a layout that divides the model"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(changes, words):
    with pytest.raises(ValidationError, match=words):
        tiny_training(compiled=True, **changes)
