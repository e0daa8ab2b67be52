"""Only a model's own data files are read, and what is no model or adapter is refused in words."""

import contextlib
import json
import os
import pickle
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from runners.jobs.adapters import base_digest, opened_adapter, read_adapter, weights_digest
from runners.jobs.loading import (
    fresh_model,
    load_folder,
    load_model,
    quantised_matrices,
    ready,
    require_tokenizer,
)
from runners.jobs.model_files import check_config, model_folder, pin_folder, read_config
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import ArtefactModel, BenchmarkSpec, DemoModel, FolderModel, RandomModel
from tests.runners.jobs.adapter_making import CPU, make_adapter
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY, TINY_CONFIG
from tests.system.jobs.harness import PROJECT

WEIGHTLESS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file of no tensors
INSIDE, OUTSIDE = {"model_type": "llama", "marker": 1}, {"model_type": "llama", "marker": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(INSIDE))
    (folder / "model.safetensors").write_bytes(WEIGHTLESS)
    return tmp_path / "models"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OUTSIDE))
    return folder


def marker(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["marker"]


def test_the_files_of_a_folder_are_found_under_their_names_or_links_within_the_roots(root):
    private = pin_folder(root / "llama", [root])
    assert sorted(path.name for path in private.iterdir()) == ["config.json", "model.safetensors"]
    assert (private / "model.safetensors").read_bytes() == WEIGHTLESS
    assert private.name == "llama"
    (root / "blobs").mkdir()
    (root / "llama/config.json").rename(root / "blobs/c0ffee")
    (root / "llama/config.json").symlink_to("../blobs/c0ffee")
    assert marker(pin_folder(root / "llama", [root])) == 1


def test_a_file_that_is_replaced_afterwards_stays_the_one_that_was_opened(root, outside):
    private = pin_folder(root / "llama", [root])
    (root / "llama/config.json").unlink()
    (root / "llama/config.json").symlink_to(outside / "config.json")
    assert marker(private) == 1


def test_a_link_that_leaves_the_roots_is_refused(root, outside):
    (root / "llama/config.json").unlink()
    (root / "llama/config.json").symlink_to(outside / "config.json")
    with pytest.raises(MissingModelError, match="outside"):
        pin_folder(root / "llama", [root])
    (root / "llama").rename(root / "moved")
    (root / "llama").symlink_to(outside)
    with pytest.raises(MissingModelError, match="cannot be opened"):
        pin_folder(root / "llama", [root])


def test_a_second_name_of_a_file_is_refused(root, outside):
    (root / "llama/config.json").unlink()
    os.link(outside / "config.json", root / "llama/config.json")
    with pytest.raises(BadInputError, match="has 2 hard links"):
        pin_folder(root / "llama", [root])


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(root, kind):
    (root / "llama/config.json").unlink()
    if kind == "fifo":
        os.mkfifo(root / "llama/config.json")
    else:
        (root / "llama/config.json").mkdir()
    with pytest.raises(BadInputError, match="is not a regular file"):
        pin_folder(root / "llama", [root])


def test_no_swap_at_any_moment_lets_a_foreign_file_in(root, outside):
    """Another thread swaps the folder for a link, again and again, while it is opened."""
    real, ended, read = root / "llama", threading.Event(), []

    def swap() -> None:
        while not ended.wait(0.002):
            real.rename(root / "aside")
            real.symlink_to(outside)
            real.unlink()
            (root / "aside").rename(real)

    swapper = threading.Thread(target=swap)
    swapper.start()
    deadline = time.monotonic() + 600
    while len(read) < 40 and time.monotonic() < deadline:
        with contextlib.suppress(BadInputError, OSError):
            read.append(marker(pin_folder(real, [root])))
    ended.set()
    swapper.join()

    assert read
    assert set(read) == {1}


class Canary:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_or_code_has_no_name_there(root, tmp_path):
    names = {"pytorch_model.bin", "model.pt", "weights.ckpt", "consolidated.00.pth", "evil.py"}
    for name in names:
        (root / "llama" / name).write_bytes(pickle.dumps(Canary(tmp_path / "sang")))
    private = pin_folder(root / "llama", [root])
    assert not names & {path.name for path in private.iterdir()}


def test_a_pickle_that_calls_itself_safetensors_never_runs(root, tmp_path):
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "architectures": ["Evil"]}
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil"}
    (root / "llama/config.json").write_text(json.dumps(config))
    canary = pickle.dumps(Canary(tmp_path / "sang"))
    (root / "llama/model.safetensors").write_bytes(canary)
    (root / "llama/pytorch_model.bin").write_bytes(canary)
    (root / "llama/evil.py").write_text(f"open({str(tmp_path / 'sang')!r}, 'w')")

    with pytest.raises(BadInputError):
        load_folder(pin_folder(root / "llama", [root]), "fp32", torch.device("cpu"))

    assert not (tmp_path / "sang").exists()


@given(st.binary(max_size=400))
def test_any_bytes_are_an_object_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(data)
    try:
        found = read_config(path)
    except BadInputError:
        return
    assert isinstance(found, dict)


LETTERS = st.text("ab.", max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | LETTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LETTERS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(LETTERS, JSON, max_size=3))
def test_every_object_of_ordinary_sizes_passes_and_no_other(config):
    def sizes(value):
        if isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            return [size for each in inner for size in sizes(each)]
        return [value] if isinstance(value, int) else []

    is_sane = all(abs(size) <= 2**31 for size in sizes(config))
    try:
        check_config(config, "model")
    except BadInputError:
        assert not is_sane
    else:
        assert is_sane


def test_brackets_in_a_text_are_no_depth(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"template": "[" * 500 + '\\"' + "{" * 500}))
    assert read_config(path)["template"].startswith("[[")


# The one door to models: what it lets in, what it refuses, and with which words.

CONFIGS = PROJECT / "planner" / "catalog" / "data" / "configs"


def test_a_path_out_of_the_roots_or_to_nothing_is_refused(host, tmp_path):
    link = host.path / "models" / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(MissingModelError, match="outside"):
        model_folder(FolderModel(path="link"), host.path)
    link.unlink()

    with pytest.raises(MissingModelError, match="outside"):
        model_folder(ArtefactModel(attempt_id="../../../..", name="etc"), host.path)

    with pytest.raises(MissingModelError, match="models/nowhere on this host"):
        model_folder(FolderModel(path="nowhere"), host.path)


def test_linear_layers_alone_are_quantised_and_rotary_frequencies_not_cast():
    names = quantised_matrices(fresh_model(TINY_CONFIG, torch.float32))
    assert len(names) == 2 * 7
    assert "lm_head" not in names
    model = ready(fresh_model(TINY_CONFIG, torch.float32), dtype=torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in model.buffers()} == {torch.float32}


def test_random_weights_repeat_with_their_seed_and_leave_no_folder(make_job, capsys):
    job = make_job(BenchmarkSpec(model=TINY))
    loaded = load_model(job, job.spec.model, "fp32", CPU)
    assert "the model's weights: random, in the shape of the job's" in capsys.readouterr().out
    assert job.emitter.notes["weights"].startswith("random, in the shape")
    assert loaded.num_parameters == sum(each.numel() for each in loaded.model.parameters())

    job = make_job(BenchmarkSpec(model=RandomModel(config=TINY_CONFIG), seed=5))
    first, second = (load_model(job, job.spec.model, "fp32", CPU).model for _ in range(2))
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)

    job = make_job(BenchmarkSpec(model=RandomModel(config=TINY_CONFIG)))
    loaded = load_model(job, job.spec.model, "fp32", CPU)
    with pytest.raises(MissingModelError, match=r"tokenizer\.json, which perplexity needs"):
        require_tokenizer(loaded, "perplexity")

    for dtype in ("int8", "int4"):
        job = make_job(BenchmarkSpec(model=RandomModel(config=TINY_CONFIG)))
        load_model(job, job.spec.model, dtype, CPU)
        assert list(job.scratch_dir().iterdir()) == [], dtype


def test_catalog_configs_build_models_of_their_published_size():
    for name, published in (
        ("facebook--opt-13b", 12_853_473_280),  # ffn_dim
        ("tiiuae--falcon-7b", 6_921_720_704),  # a derived head_dim
        ("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248),
        ("EleutherAI--gpt-neox-20b", 20_554_567_680),
    ):
        config = json.loads((CONFIGS / f"{name}.json").read_text())

        with torch.device("meta"):
            model = fresh_model(config, torch.bfloat16)

        assert sum(each.numel() for each in model.parameters()) == published, name


def test_a_config_of_no_model_or_of_rows_without_nf4_blocks_is_refused(make_job):
    for config in (
        {"model_type": "no-such-thing"},
        {},
        {**TINY_CONFIG, "num_attention_heads": "many"},
    ):
        with refused(BadInputError, r"config\.json describes no model", config):
            fresh_model(config, torch.float32)

    config = {**TINY_CONFIG, "intermediate_size": 96}
    job = make_job(BenchmarkSpec(model=RandomModel(config=config)))
    with pytest.raises(BadInputError, match=r"down_proj has rows of 96.*multiples of 64"):
        load_model(job, job.spec.model, "int4", CPU)


# What is read of an adapter's folder, and what is refused by name before it answers anybody.

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


def test_every_adapted_layer_has_its_two_matrices_at_the_scale_of_its_config(adapter, model, base):
    found = read_adapter("one", adapter, model, weights_digest(base))
    assert len(found.pairs) == 2 * 7
    pair = found.pairs["model.layers.0.mlp.down_proj"]
    assert (pair.down.shape, pair.up.shape) == ((4, 128), (64, 4))
    with pytest.raises(BadInputError, match="adapter one was trained on other weights"):
        read_adapter("one", adapter, model, "f" * 64)

    plain = read_adapter("one", adapter, model, None)
    with_config(adapter, use_rslora=True)
    stable = read_adapter("one", adapter, model, None)
    name = "model.layers.0.mlp.down_proj"
    assert torch.allclose(stable.pairs[name].up, 2 * plain.pairs[name].up)


def test_compressed_or_random_weights_are_not_held_to_a_digest(base, tmp_path):
    shutil.copytree(base, tmp_path / "models" / "packed")
    with_quantisation = tmp_path / "models" / "packed" / "config.json"
    config = json.loads(with_quantisation.read_text())
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with_quantisation.write_text(json.dumps(config | {"quantization_config": packed}))
    assert base_digest(FolderModel(path="packed"), tmp_path) is None
    assert base_digest(DemoModel(), tmp_path) is None


def test_what_is_not_applied_is_refused_by_its_field(adapter, model):
    applied = (adapter / CONFIG).read_text()
    for field, value, words in (
        ("peft_type", "IA3", "is of peft_type 'IA3', not LORA"),
        ("use_dora", True, "has use_dora 'True', which is not applied here"),
        ("modules_to_save", ["lm_head"], "has modules_to_save"),
        ("bias", "all", "has bias 'all'"),
        ("r", 0, "has r '0'; 1 to 1024"),
        ("r", "4", "has r '4'; 1 to 1024"),
        ("lora_alpha", None, "has lora_alpha 'None', which is not a finite number"),
        ("rank_pattern", {"q_proj": 2}, "has rank_pattern .*, which is not applied here"),
        ("of_a_later_peft", 0.5, "has of_a_later_peft '0.5', an option that is not known here"),
        ("kasa_config", {"a": 1}, "has kasa_config .*, an option that is not known here"),
        ("init_lora_weights", "pissa_niter_16", "began as 'pissa_niter_16', which changed its"),
    ):
        (adapter / CONFIG).write_text(json.dumps(json.loads(applied) | {field: value}))

        with refused(BadInputError, f"adapter one {words}", (field, value)):
            read_adapter("one", adapter, model, None)


def cut_off(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def without_one(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / WEIGHTS)


def with_another(folder):
    save_file({"base_model.model.lm_head.weight": torch.zeros(2)}, folder / WEIGHTS)


def test_weights_that_are_no_adapters_of_this_model_are_refused(whole, model, tmp_path):
    for at, (damage, words) in enumerate(
        (
            (
                partial(with_tensor, change=lambda each: each[:, :-1].contiguous()),
                r"has matrices .* for model\.layers.* inputs and",
            ),
            (
                partial(with_tensor, change=lambda each: each * float("nan")),
                "has NaN or infinity in base_model",
            ),
            (cut_off, "adapter one is cut off"),
            (without_one, "holds one of two matrices of model"),
            (with_another, r"holds base_model\.model\.lm_head\.weight, which is"),
        )
    ):
        folder = shutil.copytree(whole, tmp_path / str(at))
        damage(folder)

        with refused(BadInputError, words, words):
            read_adapter("one", folder, model, None)


def test_an_adapter_of_a_deeper_model_names_the_layer_that_is_not_there(adapter, base):
    shallow = fresh_model(TINY_CONFIG | {"num_hidden_layers": 1}, torch.float32)
    with pytest.raises(BadInputError, match=r"changes model\.layers\.1.*does not have"):
        read_adapter("one", adapter, shallow, None)


def test_pickled_weights_are_refused_as_pickle(adapter, tmp_path):
    place = tmp_path / "models" / "pickled"
    shutil.copytree(adapter, place)
    (place / WEIGHTS).rename(place / "adapter_model.bin")
    with pytest.raises(MissingModelError, match=r"adapter_model\.bin is pickle, which is never"):
        opened_adapter(FolderModel(path="pickled"), tmp_path)
