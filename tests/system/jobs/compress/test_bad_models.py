"""Model folders that cannot be compressed: an error by name, and nothing half made is left."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from runners.jobs.compress.job import work
from runners.jobs.compress.layerwise import check_disk
from runners.jobs.loading import LayerwiseModel
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import CompressSpec, FolderModel

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(trained, host, tmp_path_factory):
    target = host.path / "models" / tmp_path_factory.mktemp("bad").name
    shutil.copytree(trained.folder / "output" / "model", target)
    return target


def change(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def opened(folder):
    return LayerwiseModel(folder, CPU, torch.bfloat16)


def test_a_file_that_was_cut_off_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(
        BadInputError, match=r"model.safetensors is not a complete safetensors file"
    ):
        opened(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named_when_its_layer_is_read(folder, value):
    change(folder, lambda weights: weights[DOWN].__setitem__((0, 0), value))

    with pytest.raises(BadInputError, match=f"{DOWN} holds NaN or infinity"):
        opened(folder).load_layer(1)


def test_a_config_of_another_width_is_told_which_tensor_differs(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 160}))

    with pytest.raises(BadInputError, match=r"is \[64, 128\] in the weights and \[64, 160\] by"):
        opened(folder)


def test_a_config_of_more_layers_is_told_what_lacks(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))

    with pytest.raises(BadInputError, match=r"they lack model.layers.2.* and 6 more"):
        opened(folder)


def test_a_tensor_that_nobody_asked_for_is_named(folder):
    change(folder, lambda weights: weights.update({"adapter.weight": torch.ones(2)}))

    with pytest.raises(BadInputError, match=r"they also hold adapter\.weight"):
        opened(folder)


def test_a_disk_that_is_too_small_is_told_with_its_free_bytes(tmp_path):
    free = shutil.disk_usage(tmp_path).free

    with pytest.raises(BadInputError, match=r"has \d+ free; remove old attempts"):
        check_disk(tmp_path, 2 * free)
    check_disk(tmp_path, 1000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "gptq", "group_size": 48}, "rows of 64 weights, .* groups of 48"),
        ({"method": "rtn", "group_size": 1024}, "choose another group_size"),
    ],
)
def test_groups_that_do_not_divide_the_rows_are_refused(folder, make_job, fields, message):
    spec = CompressSpec(
        model=FolderModel(path=folder.name), prompt_tokens=8, output_tokens=2, **fields
    )

    with pytest.raises(BadInputError, match=message):
        work(make_job(spec))


def test_without_a_tokenizer_nothing_begins_and_nothing_is_left(folder, make_job):
    (folder / "tokenizer.json").unlink()
    job = make_job(CompressSpec(model=FolderModel(path=folder.name), method="gptq"))

    with pytest.raises(MissingModelError, match=r"no tokenizer.json, which the calibration text"):
        work(job)
    assert not (job.attempt_dir / "scratch").exists()
    assert not (job.attempt_dir / "checkpoint").exists()
    assert not (job.attempt_dir / "output").exists()
