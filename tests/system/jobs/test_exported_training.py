"""The torchrun export of a plan, run to its end on this machine's processor."""

import json
import os
import subprocess
import sys

import pytest

from planner.exports.registry import export
from tests.planner.exports.making import trained
from tests.plugins.extent import first


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a model of a few thousand weights, its tokenizer and a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = {word: at for at, word in enumerate([*"abcdefg", "[UNK]"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "data.txt").write_text("a b c d e f g " * 40)
    return folder


def run_script(tiny, folder, case):
    """Run what the torchrun export writes and starts, on this machine's processor."""
    text = export("torchrun", case).text
    launcher = folder / "torchrun"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    launcher.chmod(0o700)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MODEL": str(tiny),
        "DATA": str(tiny / "data.txt"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        ["bash", "-euc", text], cwd=folder, env=environment, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip


METHODS = ("qlora", "full", "lora", "pretrain")


@pytest.mark.slow
@pytest.mark.parametrize("method", first(METHODS, 1))
def test_the_torchrun_script_trains_to_its_end(tiny, tmp_path, method):
    pytest.importorskip("bitsandbytes" if method == "qlora" else "peft")
    case = trained(
        micro_batch_size=1,
        gradient_accumulation_steps=2,
        workload={"method": method, "lora_rank": 4, "sequence_length": 8, "global_batch_size": 2,
                  "tokens": 48},
    )  # fmt: skip

    done = run_script(tiny, tmp_path, case)

    assert done.returncode == 0, done.stderr[-2000:]
    assert "train_samples_per_second" in done.stdout
    kept = {path.name for path in (tmp_path / "trained").iterdir()}
    if method in {"lora", "qlora"}:
        config = json.loads((tmp_path / "trained" / "adapter_config.json").read_text())
        assert config["r"] == 4
        assert "adapter_model.safetensors" in kept
    else:
        assert "model.safetensors" in kept
