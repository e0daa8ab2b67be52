"""Fused kernels of a training: compiled layers and fused attention learn what plain ones learn."""

import shutil

import pytest
import torch
from pydantic import ValidationError

from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.train.compiled_layers import PLAIN_STEPS, CompiledLayers
from tests.plugins.extent import first
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import losses_of, tiny_trainer

STEPS = PLAIN_STEPS + 6
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("how", first(["full", "none"]))  # each is compiled anew, for 30 s
def test_compiled_layers_learn_what_plain_ones_learn(make_job, monkeypatch, how):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes
    asked = {"max_steps": STEPS, "activation_recomputation": how}
    plain = losses_of(tiny_trainer(make_job(tiny_training(**asked))))
    trainer = tiny_trainer(make_job(tiny_training(compiled=True, **asked)))

    compiled = losses_of(trainer)

    assert compiled == pytest.approx(plain, abs=2e-4)
    assert compiled[:PLAIN_STEPS] == plain[:PLAIN_STEPS]
    assert compiled[PLAIN_STEPS:] != plain[PLAIN_STEPS:]  # other kernels round otherwise
    assert "times as fast" in trainer.compiled.note(trainer.step_seconds)


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


def test_either_attention_learns_the_same(make_job):
    found = []
    for way in ("eager", "sdpa"):
        trainer = tiny_trainer(make_job(tiny_training(max_steps=6)))
        trainer.model.set_attn_implementation(way)
        found.append(losses_of(trainer))

    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[0] != found[1]


def test_the_jobs_notes_name_its_attention_and_its_update(host):
    spec = tiny_training(max_steps=4, attention="flash")

    notes = host.run("fused", spec).bodies("result")[-1]["notes"]

    assert notes["attention"] == "torch's fused attention (SDPA)"
    assert notes["optimizer"].startswith("AdamW, all of a weight's update in one kernel")


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
