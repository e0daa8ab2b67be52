"""Products in 8-bit floats learn what bf16 learns, however ranks and recomputation share them."""

import json

import numpy as np
import pytest
import torch
from torchao.float8.float8_linear import Float8Linear

from runners.jobs.loading import demo_config
from runners.jobs.ranks import ALONE
from runners.jobs.train import job as train
from runners.jobs.train.trainer import random_token_trainer
from runners.jobspec import DemoModel
from tests.runners.jobs.tiny import tiny_training
from tests.runners.jobs.train.training import losses_of, tiny_trainer
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.laid_out import NARROW, run_case

# Forward a number is wrong by up to 1/16, backward by 1/8, where bf16's is by 1/256; over the
# hundreds of terms of a product errors mostly cancel: 0.3 % were seen over twenty steps.
NEAR_BF16 = 0.01  # of the loss, in every step
SAME = 5e-3  # nats: the same products, summed in another order before they are rounded


def trained(make_job, **changes):
    trainer = tiny_trainer(make_job(tiny_training(**{"max_steps": 20, **changes})))
    return trainer, losses_of(trainer)


def demo_losses(tmp_path, dtype, steps=20):
    """Return the demo model and its losses on numbers that repeat, at a rate for calm steps."""
    ids = np.tile(np.arange(600, dtype=np.int32) * 5 % 4096, 60)
    fields = {
        "compute_dtype": dtype, "max_steps": steps, "time_budget_seconds": None,
        "sequence_length": 64, "micro_batch_size": 2, "learning_rate": 8e-4,
    }  # fmt: skip
    folder = tmp_path / dtype
    folder.mkdir()
    trainer = random_token_trainer(fields, demo_config(DemoModel()), folder, ids=ids)
    trainer.model.train()
    losses = []
    for _ in range(steps):
        losses.append(float(trainer.make_step()["loss"]))
        trainer.state.step += 1
    return trainer.model, losses


def test_the_demo_model_learns_what_bf16_learns_with_master_weights_in_fp32(tmp_path):
    _, wide = demo_losses(tmp_path, "bf16")
    model, narrow = demo_losses(tmp_path, "fp8")

    assert narrow[-1] < narrow[0] - 0.5
    assert narrow == pytest.approx(wide, rel=NEAR_BF16)
    assert narrow != wide
    layers = [each for each in model.modules() if isinstance(each, Float8Linear)]
    assert len(layers) == 7 * DemoModel().num_hidden_layers
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert type(model.get_output_embeddings()) is torch.nn.Linear


@pytest.mark.parametrize("how", ["selective", "full"])
def test_what_is_computed_again_is_the_same(make_job, how):
    _, kept = trained(make_job, compute_dtype="fp8", max_steps=6)
    _, again = trained(make_job, compute_dtype="fp8", max_steps=6, activation_recomputation=how)

    assert again == pytest.approx(kept, abs=1e-6)


@pytest.mark.slow
def test_copies_and_shards_learn_what_one_process_learns(tmp_path):
    alone = run_case("llama", None, ALONE, tmp_path / "alone", narrow=True)
    run_script("laid_out", tmp_path, "narrow", seconds=280)
    found = json.loads((tmp_path / "2-0.json").read_text())
    for name in NARROW:
        assert found[name]["losses"] == pytest.approx(alone["losses"], abs=SAME), name
        assert found[name]["losses"][-1] < 0.95 * found[name]["losses"][0], name


@pytest.mark.slow
def test_a_job_names_its_products_resumes_and_leaves_a_plain_model(host):
    spec = tiny_training(compute_dtype="fp8", max_steps=30)
    whole = host.run_here("narrow", spec, train.work)

    notes = whole.bodies("result")[0]["notes"]
    assert "the layers' products in 8-bit floats (torchao" in notes["products"]
    assert "emulated: this device has no units for them" in notes["products"]
    assert whole.measured["final_loss"] < whole.metric("loss")[0]
    config = json.loads((whole.folder / "output" / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_a_checkpoint_goes_on_as_if_it_had_not_been_broken_off(make_job):
    _, losses = trained(make_job, compute_dtype="fp8", max_steps=8)
    job = make_job(tiny_training(compute_dtype="fp8", max_steps=8))
    first = tiny_trainer(job)
    first.model.train()
    for _ in range(4):
        first._after_step(first.make_step(), 0.0)
    first.checkpoint()
    second = tiny_trainer(job)
    second.resume()
    second.run()

    assert second.resumed_at_step == 4
    assert second.last_loss == pytest.approx(losses[-1], abs=1e-6)
