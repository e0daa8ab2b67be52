"""A model whose architecture only its repository knows: loaded where its code is allowed."""

import json
from pathlib import Path

import pytest
import torch

from runners.jobs import model_files
from runners.jobs.loading import load_folder
from runners.jobs.model_files import CODE_FOLDERS_VARIABLE, code_flags, pin_folder
from runners.jobs.runtime import BadInputError
from tests.hub.models import make_model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class CodedConfig(LlamaConfig):
    model_type = "coded"

class CodedForCausalLM(LlamaForCausalLM):
    config_class = CodedConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * 2
        return found
"""
AUTO_MAP = {"AutoConfig": "coded.CodedConfig", "AutoModelForCausalLM": "coded.CodedForCausalLM"}


def logits(folder: Path) -> torch.Tensor:
    pinned = pin_folder(folder, [folder.parent])
    model = load_folder(pinned, "fp32", torch.device("cpu"))
    with torch.inference_mode():
        return model(torch.arange(8)[None]).logits


def test_the_own_code_of_a_model_runs_where_it_is_allowed_alone(tmp_path, monkeypatch):
    plain = make_model(tmp_path / "plain", "llama")
    coded = make_model(tmp_path / "coded", "llama")
    config = json.loads((coded / "config.json").read_text())
    own = {"model_type": "coded", "architectures": ["CodedForCausalLM"], "auto_map": AUTO_MAP}
    (coded / "config.json").write_text(json.dumps(config | own))
    (coded / "coded.py").write_text(CODE)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))

    monkeypatch.setenv(CODE_FOLDERS_VARIABLE, str(plain))  # that of another model
    with pytest.raises(BadInputError, match="the code that its auto_map names never runs"):
        logits(coded)
    assert not list((tmp_path / "m").rglob("*.py"))

    monkeypatch.setenv(CODE_FOLDERS_VARIABLE, str(coded))
    torch.testing.assert_close(logits(coded), 2 * logits(plain))
    assert code_flags(max(model_files._with_code)) == ("--trust-remote-code",)
    assert code_flags(coded) == ()

    (coded / "coded.py").write_text("raise OSError('no such accelerator')")
    with pytest.raises(BadInputError, match="its own code fails: no such accelerator"):
        logits(coded)
