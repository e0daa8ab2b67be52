"""Weights that are not all in memory write what weights in memory write."""

import json

import pytest
import torch
from accelerate import infer_auto_device_map
from pydantic import ValidationError
from safetensors.torch import save_file

from runners.jobs.generate import placement
from runners.jobs.generate.placement import StreamedLayers, held_bytes
from runners.jobs.generate.static import Limits, run_batch
from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.skeleton import LayerwiseModel
from runners.jobs.weights import StoredTensors
from runners.jobspec import DemoModel, GenerateSpec
from runners.jobspec.compress import QUANTISED_DTYPES
from runners.jobspec.generate import LayerStreaming, MappedWeights
from tests.runners.jobs.tiny import TINY_CONFIG

PROMPTS = [[5, 7, 11, 13], [17, 19, 23]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder of six layers."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("six-layers") / "model"
    fresh_model({**TINY_CONFIG, "num_hidden_layers": 6}, torch.float32).save_pretrained(str(path))
    return path


def streamed(folder, **asked) -> StreamedLayers:
    skeleton = LayerwiseModel(folder, torch.device("cpu"), torch.float32)
    return StreamedLayers(skeleton, folder, LayerStreaming(**asked))


@pytest.mark.equality
def test_layers_from_all_three_places_write_the_same(folder):
    spread = streamed(folder, layers_resident=1, layers_in_host=2)

    found = run_batch(spread.model, PROMPTS, Limits(8)).answers

    assert (
        found == run_batch(streamed(folder, layers_resident=6).model, PROMPTS, Limits(8)).answers
    )
    told = "1 of 6 layers stay, 2 come from host memory and 3 come from disk in every pass"
    assert spread.where.startswith(told)


def test_more_layers_in_both_places_than_there_are_is_refused(folder):
    with pytest.raises(BadInputError, match="layers_in_host is 7; the model has 6 layers"):
        streamed(folder, layers_resident=3, layers_in_host=4)


def test_between_two_passes_no_streamed_layer_is_held(folder):
    whole = held_bytes(streamed(folder, layers_resident=6).model)
    model = streamed(folder, layers_resident=2, look_ahead=False).model

    run_batch(model, PROMPTS, Limits(3))

    one_layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    assert held_bytes(model) == whole - 4 * one_layer


def test_within_a_pass_one_streamed_layer_at_a_time_has_weights(folder):
    model = streamed(folder).model
    seen = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda *_: seen.append(sum(not next(each.parameters()).is_meta for each in layers))
        )
    layers = model.model.layers

    run_batch(model, PROMPTS, Limits(1))

    assert seen == [1] * 6


def test_a_stored_tensor_is_read_as_it_was_written(tmp_path):
    wanted = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(wanted, str(tmp_path / "model.safetensors"))

    found = StoredTensors(tmp_path)

    assert set(found.names) == set(wanted)
    assert all(torch.equal(found.read(name), tensor) for name, tensor in wanted.items())


def test_a_tensor_of_another_dtype_is_refused_by_name(tmp_path):
    save_file({"codes": torch.ones(4, dtype=torch.int8)}, str(tmp_path / "model.safetensors"))

    with pytest.raises(BadInputError, match="codes is stored as I8; layers are streamed from F32"):
        StoredTensors(tmp_path)


def test_a_layer_with_nan_is_refused_before_the_first_prompt(folder, tmp_path):
    model = fresh_model({**TINY_CONFIG, "num_hidden_layers": 2}, torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(str(tmp_path))

    with pytest.raises(BadInputError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        streamed(tmp_path)


def test_more_resident_layers_than_there_are_is_refused(folder):
    with pytest.raises(BadInputError, match="layers_resident is 7; the model has 6 layers"):
        streamed(folder, layers_resident=7)


@pytest.mark.parametrize(
    "changes", [{"batching": "continuous"}, *({"weight_dtype": each} for each in QUANTISED_DTYPES)]
)
def test_offload_is_refused_where_it_does_not_run(changes):
    fields = {"model": DemoModel(), "offload": LayerStreaming(), **changes}

    with pytest.raises(ValidationError, match="offload stream runs with fp32, bf16 or fp16"):
        GenerateSpec.model_validate(fields)


def test_a_spec_with_offload_survives_its_own_json():
    spec = GenerateSpec(model=DemoModel(), offload=MappedWeights(memory_bytes=5))

    assert GenerateSpec.model_validate(json.loads(spec.model_dump_json())) == spec


def test_what_a_gpu_does_not_hold_stays_in_host_memory_before_the_disk(monkeypatch):
    model = fresh_model(TINY_CONFIG, torch.float32)
    size = sum(each.nbytes for each in model.parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    places = {}
    for free in (10 * size, 0):
        monkeypatch.setattr(placement, "free_host_bytes", lambda free=free: free)
        room = placement.device_room(size // 2)
        places[free] = set(infer_auto_device_map(model, room).values())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert places == {10 * size: {0, "cpu"}, 0: {0, "disk"}}
    assert placement.device_room(size) == {"cpu": size}
