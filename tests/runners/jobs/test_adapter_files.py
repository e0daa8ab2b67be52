"""What is read of an adapter's folder, and what is refused by name before it answers anybody."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from runners.jobs.adapter_files import base_digest, opened_adapter, read_adapter
from runners.jobs.adapters import weights_digest
from runners.jobs.loading import fresh_model, load_folder
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import DemoModel, FolderModel
from tests.runners.jobs.adapter_making import CPU, make_adapter
from tests.runners.jobs.tiny import TINY_CONFIG

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(5)
    fresh_model(TINY_CONFIG, torch.float32).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "one"
    make_adapter(base, folder, seed=1)
    return folder


@pytest.fixture
def adapter(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "one")


@pytest.fixture
def model(base):
    return load_folder(base, "fp32", CPU)


def with_config(folder, **changes):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def with_tensor(folder, change):
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    save_file({**tensors, name: change(tensors[name])}, folder / WEIGHTS)


def test_every_adapted_layer_has_its_two_matrices(adapter, model, base):
    found = read_adapter("one", adapter, model, weights_digest(base))

    assert len(found.pairs) == 2 * 7
    pair = found.pairs["model.layers.0.mlp.down_proj"]
    assert (pair.down.shape, pair.up.shape) == ((4, 128), (64, 4))


def test_the_scale_is_alpha_over_rank_or_over_its_root(adapter, model):
    plain = read_adapter("one", adapter, model, None)
    with_config(adapter, use_rslora=True)

    stable = read_adapter("one", adapter, model, None)

    name = "model.layers.0.mlp.down_proj"
    assert torch.allclose(stable.pairs[name].up, 2 * plain.pairs[name].up)


def test_the_base_is_known_by_its_weights(adapter, model):
    with pytest.raises(BadInputError, match="adapter one was trained on other weights"):
        read_adapter("one", adapter, model, "f" * 64)


def test_compressed_or_random_weights_are_not_held_to_a_digest(base, tmp_path):
    shutil.copytree(base, tmp_path / "models" / "packed")
    with_quantisation = tmp_path / "models" / "packed" / "config.json"
    config = json.loads(with_quantisation.read_text())
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with_quantisation.write_text(json.dumps(config | {"quantization_config": packed}))

    assert base_digest(FolderModel(path="packed"), tmp_path) is None
    assert base_digest(DemoModel(), tmp_path) is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("peft_type", "IA3", "is of peft_type 'IA3', not LORA"),
        ("use_dora", True, "has use_dora 'True', which is not applied here"),
        ("modules_to_save", ["lm_head"], "has modules_to_save"),
        ("bias", "all", "has bias 'all'"),
        ("r", 0, "has r '0'; 1 to 1024"),
        ("r", "4", "has r '4'; 1 to 1024"),
        ("lora_alpha", None, "has lora_alpha 'None', which is no number"),
        ("rank_pattern", {"q_proj": 2}, "has a rank_pattern"),
    ],
)
def test_what_is_not_applied_is_refused_by_its_field(adapter, model, field, value, words):
    with_config(adapter, **{field: value})

    with pytest.raises(BadInputError, match=f"adapter one {words}"):
        read_adapter("one", adapter, model, None)


def test_an_adapter_of_another_shape_is_refused_with_both_shapes(adapter, model):
    with_tensor(adapter, lambda each: each[:, :-1].contiguous())

    with pytest.raises(BadInputError, match=r"has matrices .* for model\.layers.* inputs and"):
        read_adapter("one", adapter, model, None)


def test_an_adapter_of_a_deeper_model_names_the_layer_that_is_not_there(adapter, base):
    shallow = fresh_model(TINY_CONFIG | {"num_hidden_layers": 1}, torch.float32)

    with pytest.raises(BadInputError, match=r"changes model\.layers\.1.*does not have"):
        read_adapter("one", adapter, shallow, None)


def test_no_number_in_an_adapter_is_nan(adapter, model):
    with_tensor(adapter, lambda each: each * float("nan"))

    with pytest.raises(BadInputError, match="has NaN or infinity in base_model"):
        read_adapter("one", adapter, model, None)


def test_a_file_that_is_cut_off_is_named(adapter, model):
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[: len(data) // 2])

    with pytest.raises(BadInputError, match="adapter one is cut off"):
        read_adapter("one", adapter, model, None)


def test_half_a_pair_is_refused(adapter, model):
    tensors = load_file(adapter / WEIGHTS)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, adapter / WEIGHTS)

    with pytest.raises(BadInputError, match="holds one of two matrices of model"):
        read_adapter("one", adapter, model, None)


def test_a_tensor_that_is_no_matrix_of_lora_is_named(adapter, model):
    save_file({"base_model.model.lm_head.weight": torch.zeros(2)}, adapter / WEIGHTS)

    with pytest.raises(BadInputError, match=r"holds base_model\.model\.lm_head\.weight, which is"):
        read_adapter("one", adapter, model, None)


def test_pickled_weights_are_refused_as_pickle(adapter, tmp_path):
    place = tmp_path / "models" / "pickled"
    shutil.copytree(adapter, place)
    (place / WEIGHTS).rename(place / "adapter_model.bin")

    with pytest.raises(MissingModelError, match=r"adapter_model\.bin is pickle, which is never"):
        opened_adapter(FolderModel(path="pickled"), tmp_path)
