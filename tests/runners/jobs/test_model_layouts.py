"""Which files of a folder are its model: every reader finds the same ones, or refuses by name."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runners.jobs.adapters import opened_adapter, weights_digest
from runners.jobs.folder_query import Query, file_names, tensor_bytes
from runners.jobs.generate.placement import load_with_device_map
from runners.jobs.loading import fresh_model, load_folder, load_tokenizer, stored_quantisation
from runners.jobs.model_files import (
    INDEX,
    SINGLE,
    has_weights,
    opened_model,
    read_config,
    weight_files,
)
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobs.weights import StoredTensors, WeightReader
from runners.jobspec import FolderModel
from tests.runners.jobs.adapter_making import CPU
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.harness import PROJECT

Change = Callable[[Path], object]
MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(5)
    fresh_model(TINY_CONFIG, torch.float32).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def sharded(plain, tmp_path_factory) -> Path:
    folder = shutil.copytree(plain, tmp_path_factory.mktemp("sharded") / "model")
    shard(folder)
    return folder


def shard(folder: Path) -> None:
    """Divide a folder's one file in two, as ``save_pretrained`` does with a large model."""
    weights = load_file(folder / SINGLE)
    names, files = sorted(weights), {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def beside(name: str, rename: tuple[str, str] = ("", "")) -> Change:
    """Return what puts a file of other weights beside the model's."""

    def change(folder: Path) -> None:
        weights = {
            name: each for path in weight_files(folder) for name, each in load_file(path).items()
        }
        others = {
            key.replace(*rename): torch.full_like(each, 0.01) for key, each in weights.items()
        }
        save_file(others, folder / name, {"format": "pt"})

    return change


def adapter_beside(folder: Path) -> None:
    save_file({"base_model.x.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "someone/another-model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def old_index(folder: Path) -> None:
    files = dict.fromkeys(load_file(folder / SINGLE), SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def other_frameworks(folder: Path) -> None:
    for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.onnx"):
        (folder / name).write_bytes(b"\x80")


def originals(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"PK\x03\x04")
    shutil.copy(folder / "config.json", folder / "original" / "params.json")


# Layouts of public repositories, each with what lies beside its model.
LAYOUTS: dict[str, tuple[Change, ...]] = {
    "one file": (),
    "GPT-2: every framework's file": (other_frameworks,),
    "Llama 3: Meta's own files in original/": (shard, originals),
    "Mistral: shards and a consolidated file": (
        shard, beside("consolidated.safetensors", ("model.layers", "layers")),
    ),
    "one file and a consolidated one": (
        beside("consolidated.safetensors", ("model.layers", "layers")),
    ),
    "shards and an older file": (shard, beside("pytorch_model.safetensors")),
    "shards and an older split": (shard, beside("model-00001-of-00003.safetensors")),
    "shards and an older whole model": (shard, beside(SINGLE)),
    "another precision": (beside("model.fp16.safetensors"),),
    "an adapter beside its base": (adapter_beside,),
    "an index of one file": (old_index,),
    "a vision tower": (shard, beside("vision.safetensors", ("model.", "vision_model."))),
}  # fmt: skip


def test_every_reader_finds_exactly_the_model_in_the_layouts_of_public_repositories(
    plain, tmp_path
):
    model = load_folder(plain, "fp32", CPU)
    wanted = model.state_dict()
    for at, (title, changes) in enumerate(LAYOUTS.items()):
        folder = shutil.copytree(plain, tmp_path / "models" / str(at))
        digest = weights_digest(folder)
        for change in changes:
            change(folder)
            digest = weights_digest(folder) if change is shard else digest
        assert weights_digest(folder) == digest, title

        pinned = opened_model(FolderModel(path=str(at)), tmp_path)
        assert weights_digest(pinned) == digest, title
        assert {each.name for each in pinned.glob("*.safetensors")} == {
            each.name for each in weight_files(folder)
        }, title
        for reader in (StoredTensors(pinned), StoredTensors(folder), WeightReader(folder, model)):
            assert set(reader.names) == set(wanted), title
            assert all(torch.equal(reader.read(name), wanted[name]) for name in wanted), title
        mapped, _ = load_with_device_map(pinned, torch.float32, 2**30, tmp_path)
        for loaded in (load_folder(pinned, "fp32", CPU), mapped):
            own = loaded.state_dict()
            assert all(torch.equal(own[name], wanted[name]) for name in wanted), title
        query = Query(folder, (tmp_path,))
        stored = sum(tensor_bytes(query, name) for name in file_names(query))
        assert stored == sum(each.nbytes for each in wanted.values()), title


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def marked(name: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text() if (folder / name).exists() else "{}"
        (folder / name).write_text(MARK + text)

    return change


def twice(name: str) -> Change:
    return written(name, '{"weight_map": {},\n "weight_map": {}}')


def cut(name: str) -> Change:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return change


def moved(below: str) -> Change:
    def change(folder: Path) -> None:
        inner = folder / below
        inner.mkdir(parents=True)
        for path in [each for each in folder.iterdir() if each.is_file()]:
            path.rename(inner / path.name)

    return change


def cached(folder: Path) -> None:
    """Lay a folder out as the Hub's cache does, with an older snapshot."""
    moved("snapshots/bbbb")(folder)
    shutil.copytree(folder / "snapshots/bbbb", folder / "snapshots/aaaa")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("bbbb\n")


def pickled(folder: Path) -> None:
    for each in (*folder.glob("model*.safetensors"), folder / INDEX):
        each.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")


SECOND = "model-00002-of-00002.safetensors"
MISSING, BAD = MissingModelError, BadInputError
REFUSED: list[tuple[Change, type[BadInputError], str]] = [
    (without(SECOND), MISSING, rf"lacks {SECOND}, which {INDEX} names \(1 of 2 files\): the download"),
    (without(INDEX), MISSING, rf"model-00002-of-00002\.safetensors is a shard: fetch {INDEX}"),
    (pickled, MISSING, r"pytorch_model\.bin is pickle, which is never read\); give a complete"),
    (without("config.json"), MISSING, r"lacks config\.json; give a complete Hugging Face folder"),
    (cached, MISSING, r"the model is in .*/snapshots/bbbb: give that folder"),
    (moved("tiny-1b"), MISSING, r"the model is in .*/tiny-1b: give that folder"),
    (cut(SECOND), BAD, rf"{SECOND} is not a complete safetensors file \([\d,]+ of [\d,]+ bytes\)"),
    (written(SECOND, POINTER), BAD, rf"{SECOND} is a Git LFS pointer; run git lfs pull"),
    (written(SECOND, b"PK\x03\x04..."), BAD, rf"{SECOND} is torch\.save's pickle"),
    (written(SECOND, b"\x80\x02ccollections"), BAD, rf"{SECOND} is pickle, which is never read"),
    (written(SECOND, b"GGUF\x03\0\0\0"), BAD, rf"{SECOND} is a GGUF file"),
    (written(SECOND, "<!DOCTYPE html><html>"), BAD, rf"{SECOND} is a web page"),
    (written(SECOND, '{"error": "Invalid username or password."}'), BAD, "is not a complete safet"),
    (written(SECOND, b""), BAD, rf"{SECOND} is empty; download the file again"),
    (written(INDEX, POINTER), BAD, rf"{INDEX} is a Git LFS pointer"),
    (cut(INDEX), BAD, rf"{INDEX} is not valid JSON \(.*copy it again"),
    (written(INDEX, '{"weight_map": []}'), BAD, rf"{INDEX} has no weight_map; copy the file again"),
    (twice(INDEX), BAD, rf"{INDEX} has the key “weight_map” twice in one object, again on line 2"),
    (twice("config.json"), BAD, r"config\.json has the key “weight_map” twice in one object"),
    (twice("generation_config.json"), BAD, r"generation_config\.json has the key “weight_map” twice"),
    (written("tokenizer.json", POINTER), BAD, r"tokenizer\.json is a Git LFS pointer"),
    (written("tokenizer.json", '{"version": "1.0", '), BAD, r"tokenizer\.json is not valid JSON"),
    (written("tokenizer.json", "{" + " " * 2**23), BAD, r"tokenizer\.json is not valid JSON"),
    (written("tokenizer.json", "{}".encode("utf-16")), BAD, r"tokenizer\.json is UTF-16 text"),
    (written("generation_config.json", "[]"), BAD, r"generation_config\.json is not a JSON object"),
    *(
        (marked(name), BAD, rf"{name} begins with a byte order mark.*without the mark")
        for name in (
            "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
            "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt",
            INDEX,
        )
    ),
]  # fmt: skip


def test_what_is_no_model_is_refused_with_file_and_way_out_before_anything_is_loaded(
    sharded, tmp_path
):
    for at, (damage, kind, words) in enumerate(REFUSED):
        shutil.copytree(sharded, tmp_path / "models" / str(at))
        damage(tmp_path / "models" / str(at))

        with refused(kind, words, (at, words)):
            opened_model(FolderModel(path=str(at)), tmp_path)


def test_a_template_may_begin_as_a_web_page_does_and_an_adapter_s_folder_is_read_as_one(
    plain, tmp_path
):
    folder = shutil.copytree(plain, tmp_path / "models" / "one")
    (folder / "chat_template.jinja").write_text("<|begin|>{{ messages[0].content }}")
    assert has_weights(opened_model(FolderModel(path="one"), tmp_path))
    adapter_beside(shutil.copytree(plain, tmp_path / "models" / "two"))
    adapter = opened_adapter(FolderModel(path="two"), tmp_path)
    assert [each.name for each in adapter.glob("*.safetensors")] == ["adapter_model.safetensors"]
    marked("adapter_config.json")(tmp_path / "models" / "two")  # read here, but not by an engine
    assert read_config(adapter / "adapter_config.json")["peft_type"] == "LORA"
    files = tuple(path.name for path in adapter.iterdir() if path.name.startswith("adapter"))
    with pytest.raises(BadInputError, match=r"adapter_config\.json begins with a byte order mark"):
        opened_model(FolderModel(path="two"), tmp_path, files, owner=os.getpid())


def test_configs_are_refused_by_their_own_name_and_a_mark_is_no_content(tmp_path):
    for name, text, words in (
        ("adapter_config.json", "{", r"^adapter_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[]", r"^tokenizer_config\.json is not a JSON object"),
        ("config.json", "{" + " " * 2**20, r"^config\.json is longer than 1048576 bytes"),
    ):
        (tmp_path / name).write_text(text)
        with refused(BadInputError, words, name):
            read_config(tmp_path / name)
    (tmp_path / "config.json").write_text(MARK + '{"a": 1}')
    assert read_config(tmp_path / "config.json") == {"a": 1}
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')  # of Mamba 2
    assert read_config(tmp_path / "config.json") == {"time_step_limit": [0.0, float("inf")]}
    # Gemma 3's is longer than a config.json may be.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"a": "x" * 1_200_000}))
    assert len(read_config(tmp_path / "tokenizer_config.json")["a"]) == 1_200_000


def test_what_the_library_cannot_read_is_bad_input_that_names_the_file(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for damage, reader, words in (
        (written("tokenizer.json", '{"model": 1}'), load_tokenizer, r"tokenizer\.json or tok"),
        (
            written("config.json", json.dumps(config | {"quantization_config": "awq"})),
            stored_quantisation,
            "quantization_config is 'awq', not an object",
        ),
        (
            written("config.json", json.dumps(config | {"num_hidden_layers": 3})),
            lambda folder: load_with_device_map(folder, torch.float32, 2**30, tmp_path),
            r"lack model\.layers\.2",
        ),
    ):
        damage(folder)
        with refused(BadInputError, words, words):
            reader(folder)


# Modules that look at the endings of file names, and why that says nothing of a model.
ENDINGS = {
    "runners/jobs/model_files.py": "the reader",
    "runners/jobs/runtime.py": "the sizes of what a job itself has written",
    "runners/host/preflight_weights.py": "whether the reader is asked at all",
    "runners/hub/folders.py": "which files the Hub names by their SHA-256",
    "runners/hub/objects.py": "which objects below an address are asked about",
    "runners/hub/selection.py": "the same model, of a repository that is not on the disk yet",
}


PICKS = re.compile(r"""glob\([^)]*safetensors|["']\*?\.safetensors["']""")


def test_no_other_module_picks_weights_by_the_endings_of_names():
    for path in sorted([*PROJECT.glob("runners/**/*.py"), *PROJECT.glob("webapp/**/*.py")]):
        name, found = path.relative_to(PROJECT).as_posix(), PICKS.findall(path.read_text())
        assert name in ENDINGS or not found, (name, found)
