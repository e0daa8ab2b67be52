"""The weights of a model folder by its files and by its config, as preflight shows them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from runners.stored_weights import LENGTH_BYTES, tensor_bytes, weights_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small Llama in two files, as transformers names its tensors."""
    layer = {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128), "input_layernorm": (64,), "post_attention_layernorm": (64,),
    }  # fmt: skip
    shapes = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(2)
        for name, shape in layer.items()
    }
    ends = {"model.embed_tokens.weight": (512, 64), "lm_head.weight": (512, 64)}
    for name, part in (("1", shapes), ("2", {**ends, "model.norm.weight": (64,)})):
        tensors = {tensor: np.zeros(shape, np.float16) for tensor, shape in part.items()}
        save_file(tensors, tmp_path / f"model-0000{name}-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_files_and_config_agree_on_a_known_model(folder):
    found = weights_of(folder, [folder.parent])

    assert found.stored_bytes == 2 * (2 * 36_992 + 2 * 512 * 64 + 64)
    assert found.counted_bytes == pytest.approx(found.stored_bytes, rel=0.01)
    assert "but" not in found.sentence


def test_a_config_of_another_model_is_told(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 5120}))

    assert "but the planner counts" in weights_of(folder, [folder.parent]).sentence


@pytest.mark.parametrize("config", ["{}", "[]", "no json", "[" * 100_000])
def test_a_config_that_the_planner_cannot_read_leaves_the_files_count(folder, config):
    (folder / "config.json").write_text(config)
    found = weights_of(folder, [folder.parent])

    assert found.counted_bytes is None
    assert "cannot read its config.json" in found.sentence


@pytest.mark.parametrize(
    "written",
    [
        b"",
        (2**40).to_bytes(LENGTH_BYTES, "little"),
        (2).to_bytes(LENGTH_BYTES, "little") + b"[]",
        (40).to_bytes(LENGTH_BYTES, "little") + b'{"a":{"data_offsets":[0,99999]}}        ',
        (40).to_bytes(LENGTH_BYTES, "little") + b'{"a":{"data_offsets":null}}             ',
    ],
)
def test_a_broken_file_is_not_counted(folder, written):
    (folder / "model-00003-of-00003.safetensors").write_bytes(written)

    assert weights_of(folder, [folder.parent]) is None


def test_files_outside_the_model_folders_are_not_opened(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model.safetensors"
    save_file({"weight": np.zeros(4, np.float32)}, elsewhere)
    (folder / "model-00003-of-00003.safetensors").symlink_to(elsewhere)

    assert tensor_bytes(elsewhere) == 16
    assert weights_of(folder, [folder]) is None
