"""A LoRA fine-tune as a real job: small states, peft opens the outcome, a kill costs little."""

import pytest
import torch
from pydantic import ValidationError

from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobspec import ArtefactModel, FolderModel
from runners.jobspec.base import LoraOptions
from tests.runners.jobs.tiny import TINY, TINY_CONFIG, tiny_training

LORA = LoraOptions(rank=4, alpha=8)
TOKENS = torch.arange(40)[None]


def tuning(model, **changes):
    """Return a short LoRA fine-tune of a model."""
    fields = {"model": model, "lora": LORA, "learning_rate": 1e-2, "max_steps": 40}
    return tiny_training(**{**fields, **changes})


@torch.inference_mode()
def logits(model):
    return model(input_ids=TOKENS).logits


def test_a_fresh_adapter_changes_nothing():
    model = fresh_model(TINY_CONFIG, torch.float32).eval()
    before = logits(model)

    Lora(model, LORA)

    assert torch.equal(logits(model), before)


def test_an_architecture_without_the_papers_layers_is_refused_by_name(monkeypatch):
    model = fresh_model(TINY_CONFIG, torch.float32)
    monkeypatch.setattr(type(model.config), "model_type", "unheard-of")

    with pytest.raises(BadInputError, match=r"lora\.targets query_value names no layers of Llama"):
        Lora(model, LoraOptions(targets="query_value"))


def test_a_model_without_trained_weights_takes_no_adapter():
    with pytest.raises(ValidationError, match="lora adapts trained weights, and a 'demo' model"):
        tuning(TINY)


@pytest.mark.parametrize("model", [FolderModel(path="m"), ArtefactModel(attempt_id="a")])
def test_trained_weights_take_an_adapter(model):
    assert tuning(model).lora == LORA


def test_weights_of_another_training_have_another_digest(tmp_path):
    for name, fill in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(fill * 100_000)

    digests = [weights_digest(tmp_path / name) for name in "abc"]

    assert digests[0] == digests[2] != digests[1]
