"""Fused kernels of a training: compiled layers and fused attention learn what plain ones learn."""

import shutil

import pytest

from runners.jobs.train.kernels import PLAIN_STEPS
from tests.plugins.extent import first
from tests.runners.jobs.tiny import tiny_training
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
