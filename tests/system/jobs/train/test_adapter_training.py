"""A LoRA fine-tune as a real job: small states, peft opens the outcome, a kill costs little."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file

from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.loading import fresh_model, load_folder
from runners.jobs.train import job as train
from runners.jobs.train.checkpoint_files import stored_tensors
from runners.jobs.train.evaluator import HeldOutData
from runners.jobs.train.rows import TextBatches
from runners.jobs.train.trainer import Trainer
from runners.shared.messages import ArtefactBody
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.test_integers import LORA, logits, tuning
from tests.system.jobs.harness import wait_until


@pytest.fixture(scope="module")
def tuned(host, trained_model):
    return host.run_here("tuned", tuning(trained_model), train.work)


@pytest.fixture
def base(trained, tuned):
    return load_folder(trained.folder / "output" / "model", "fp32", torch.device("cpu"))


def test_it_leaves_an_adapter_and_a_model(tuned):
    left = [ArtefactBody.model_validate(body) for body in tuned.bodies("artefact")]

    assert [each.kind for each in left] == ["adapter", "model"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(left[0].files)


def test_peft_opens_the_adapter_and_answers_as_the_merged_model(tuned, base):
    output = tuned.folder / "output"
    merged = load_folder(output / "model", "fp32", torch.device("cpu"))
    plain = logits(base)

    opened = PeftModel.from_pretrained(base, str(output / "adapter")).eval()

    assert torch.allclose(logits(opened), logits(merged), atol=1e-4)
    assert not torch.allclose(logits(merged), plain, atol=1e-2)


def test_only_the_adapter_has_gradients_and_states(tuned, trained):
    adapter, whole = tuned.measured, trained.measured

    gradients = tuned.metric("held_gradients_bytes")[0]
    assert (
        gradients == tuned.metric("held_adapters_bytes")[0] == 4 * adapter["trainable_parameters"]
    )
    assert adapter["optimizer_bytes"] == pytest.approx(2 * gradients, rel=0.05)
    assert whole["optimizer_bytes"] > 5 * adapter["optimizer_bytes"]
    assert whole["trainable_parameters"] == whole["parameters"]


def test_merging_keeps_the_perplexity_and_the_number_of_parameters(tuned, trained):
    measured = tuned.measured

    assert measured["perplexity"] == pytest.approx(measured["adapter_perplexity"], rel=1e-4)
    assert measured["parameters"] == trained.measured["parameters"]


def test_an_adapter_alone_learns_what_repeats_itself(make_job):
    spec = tiny_training(max_steps=40)
    torch.manual_seed(spec.seed)
    model = fresh_model(TINY_CONFIG, torch.float32)
    Lora(model, LORA)
    frozen = {n: each.clone() for n, each in model.named_parameters() if not each.requires_grad}
    ids = np.tile(np.arange(8, dtype=np.int32), 40)
    batches = TextBatches(ids, spec)
    trainer = Trainer(make_job(spec), spec, model, batches, HeldOutData(ids), torch.device("cpu"))
    before = float(trainer.layout.gradients([batches.micro_batch(0, 0)]).loss)

    trainer.run()

    assert trainer.last_loss < 0.9 * before
    assert all(torch.equal(model.get_parameter(name), each) for name, each in frozen.items())


def test_the_adapters_file_names_the_base_by_its_weights(tuned, trained):
    digest = weights_digest(trained.folder / "output" / "model")
    path = tuned.folder / "output" / "adapter" / "adapter_model.safetensors"

    with safe_open(path, "pt") as file:
        assert file.metadata()["base_sha256"] == digest


@pytest.mark.faults
def test_after_a_kill_the_adapter_goes_on_from_its_checkpoint(host, trained_model):
    spec = {"max_steps": 100_000, "checkpoint_every_seconds": 0.2}
    folder = host.attempt("tuning-killed", tuning(trained_model, **spec))
    process = host.start(folder)
    wait_until(folder / "checkpoint", "step-*", process)
    process.kill()
    process.wait()
    [checkpoint] = (folder / "checkpoint").glob("step-*")
    names = set(stored_tensors(checkpoint).weights)
    at = int(checkpoint.name.split("-")[1])

    again = host.run("tuning-killed", tuning(trained_model, max_steps=at + 5))

    assert all(".lora_" in name for name in names)
    assert again.bodies("result")[-1]["measured"]["steps"] == at + 5
    assert f"step {at}" in again.bodies("result")[-1]["notes"]["resumed"]


@pytest.fixture(scope="module")
def over_four_bits(host, trained_model):
    options = LORA.model_copy(update={"base_dtype": "nf4"})
    return host.run_here("qlora", tuning(trained_model, lora=options, max_steps=20), train.work)


def test_qlora_holds_its_base_in_four_bits(over_four_bits, tuned):
    narrow, wide = (each.metric("held_weights_bytes")[0] for each in (over_four_bits, tuned))

    embeddings = 2 * 512 * 64
    assert narrow < 0.6 * wide
    assert narrow - 2 * embeddings == pytest.approx((wide - 4 * embeddings) / 8, rel=0.2)


def test_qlora_is_merged_into_the_base_of_the_full_width(over_four_bits, base):
    output = over_four_bits.folder / "output"
    merged = load_folder(output / "model", "fp32", torch.device("cpu"))

    opened = PeftModel.from_pretrained(base, str(output / "adapter")).eval()

    assert torch.allclose(logits(opened), logits(merged), atol=1e-4)
    assert (
        "merged into the base of the full width"
        in over_four_bits.bodies("result")[0]["notes"]["lora"]
    )


def test_dora_trains_the_length_of_each_row_too(host, trained_model, base):
    options = LORA.model_copy(update={"is_dora": True})
    spec = tuning(trained_model, lora=options, max_steps=3)

    done = host.run_here("dora", spec, train.work)

    output = done.folder / "output"
    assert any(
        "magnitude" in name for name in load_file(output / "adapter" / "adapter_model.safetensors")
    )
    opened = PeftModel.from_pretrained(base, str(output / "adapter")).eval()
    merged = load_folder(output / "model", "fp32", torch.device("cpu"))
    assert torch.allclose(logits(opened), logits(merged), atol=1e-4)


def test_an_adapter_may_be_all_that_is_left(host, trained_model):
    options = LORA.model_copy(update={"is_merged": False, "targets": "query_value"})

    done = host.run_here("unmerged", tuning(trained_model, lora=options, max_steps=2), train.work)

    assert [each["kind"] for each in done.bodies("artefact")] == ["adapter"]
    assert done.measured["disk_bytes"] == done.measured["adapter_disk_bytes"]
    tensors = load_file(done.folder / "output" / "adapter" / "adapter_model.safetensors")
    assert all("q_proj" in name or "v_proj" in name for name in tensors)
