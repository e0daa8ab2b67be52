"""Repositories of well-known models, shrunk to kilobytes: which files each reader takes.

The folders are made here, with the names of files and tensors of the repositories that each row
names; the weights are random.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runners.jobs.adapters import opened_adapter, weights_digest
from runners.jobs.folder_query import Query, file_names, tensor_bytes
from runners.jobs.generate.placement import load_with_device_map
from runners.jobs.loading import (
    LayerwiseModel,
    ModelTensors,
    fresh_model,
    load_folder,
    load_tokenizer,
)
from runners.jobs.model_files import (
    INDEX,
    SINGLE,
    opened_model,
    weight_files,
)
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobs.weights import StoredTensors, WeightReader, config_of
from runners.jobspec import FolderModel
from tests.runners.jobs.adapter_making import CPU
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG

Change = Callable[[Path], object]
HUB = "https://huggingface.co/"
SHARDS = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
OF_TYPES: dict[str, dict[str, object]] = {  # what a model type needs beside the tiny shape
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True, "head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Return a folder of each model type, in two shards with an index."""
    folders = {}
    for kind, fields in OF_TYPES.items():
        folders[kind] = folder = tmp_path_factory.mktemp("made") / kind
        torch.manual_seed(3)
        fresh_model(TINY_CONFIG | {"model_type": kind} | fields, torch.float32).save_pretrained(
            str(folder)
        )
        weights = load_file(folder / SINGLE)
        names = sorted(weights)
        index = {}
        for file, part in zip(SHARDS, (names[:5], names[5:]), strict=True):
            save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
            index |= dict.fromkeys(part, file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        (folder / SINGLE).unlink()
    return folders


def text(**files: str) -> Change:
    """Return what writes files; “__” in a name stands for a dot."""

    def change(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)

    return change


def changed(**fields: object) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def beside(name: str, data: bytes = b"PK\x03\x04") -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return change


def merged(name: str, rename: tuple[str, str] = ("", "")) -> Change:
    """Return what writes all weights into one file, under other names of tensors."""

    def change(folder: Path) -> None:
        weights = {
            key: each for path in weight_files(folder) for key, each in load_file(path).items()
        }
        save_file({key.replace(*rename): each + 1 for key, each in weights.items()}, folder / name)

    return change


def one_file(folder: Path) -> None:
    weights = {key: each for file in SHARDS for key, each in load_file(folder / file).items()}
    save_file(weights, folder / SINGLE, {"format": "pt"})
    for file in (*SHARDS, INDEX):
        (folder / file).unlink()


def in_hub_cache(folder: Path) -> None:
    """Lay a folder out as a snapshot of the Hub's cache: links to blobs beside the snapshots."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for at, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(at))
        path.symlink_to(Path("..") / "blobs" / str(at))


def without_metadata(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


# name: (repository, model type, what is made of it, the files that are the model)
USED: dict[str, tuple[str, str, tuple[Change, ...], list[str]]] = {
    "Llama 3.1": (
        "meta-llama/Llama-3.1-8B-Instruct", "llama",
        (beside("original/consolidated.00.pth"), beside("original/tokenizer.model", b"IQ== 0\n"),
         text(LICENSE="Llama", USE_POLICY__md="#")), SHARDS,
    ),
    "Mistral": (
        "mistralai/Mistral-7B-Instruct-v0.3", "mistral",
        (merged("consolidated.safetensors", ("model.layers", "layers")), text(params__json="{}")),
        SHARDS,
    ),
    "Qwen 2.5 with tied embeddings": (
        "Qwen/Qwen2.5-0.5B-Instruct", "qwen2",
        (one_file, text(merges__txt="#version: 0.2\n", vocab__json="{}")), [SINGLE],
    ),
    "Gemma with tied embeddings and a GGUF file": (
        "google/gemma-2b", "gemma", (beside("gemma-2b.gguf", b"GGUF"),), SHARDS,
    ),
    "Phi 3 with code of its own": (
        "microsoft/Phi-3-mini-4k-instruct", "phi3",
        (changed(auto_map={"AutoConfig": "configuration_phi3.Phi3Config",
                           "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}),
         text(configuration_phi3__py="raise SystemExit", modeling_phi3__py="raise SystemExit")),
        SHARDS,
    ),
    "Mixtral with an older split and pickle": (
        "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral",
        (merged("model-00001-of-00019.safetensors"), beside("consolidated.00.pt")), SHARDS,
    ),
    "a snapshot in the Hub's cache": (
        "docs/huggingface_hub/guides/manage-cache", "llama", (in_hub_cache,), SHARDS,
    ),
    "an index without metadata, which transformers demands": (
        "docs/transformers/big_models", "llama", (without_metadata,), SHARDS,
    ),
    "a base with an adapter beside it": (
        "docs/peft/quicktour", "llama",
        (merged("adapter_model.safetensors"), text(adapter_config__json='{"peft_type": "LORA"}')),
        SHARDS,
    ),
}  # fmt: skip


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: each for file in SHARDS for key, each in load_file(folder / file).items()}


def test_every_reader_takes_the_same_files_of_a_repository(made, tmp_path):
    for at, (name, (_, kind, changes, files)) in enumerate(USED.items()):
        wanted, model = tensors_of(made[kind]), load_folder(made[kind], "fp32", CPU)
        folder = shutil.copytree(made[kind], tmp_path / "models" / str(at) / "model")
        for change in changes:
            change(folder)

        pinned = opened_model(FolderModel(path=f"{at}/model"), tmp_path)
        assert [path.name for path in weight_files(pinned)] == files, name
        assert [path.name for path in weight_files(folder)] == files, name
        assert weights_digest(pinned) == weights_digest(folder), name
        assert load_tokenizer(pinned) is None, name
        for reader in (StoredTensors(pinned), StoredTensors(folder)):
            assert set(reader.names) == set(wanted), name
            assert all(torch.equal(reader.read(each), wanted[each]) for each in wanted), name
        mapped, _ = load_with_device_map(pinned, torch.float32, 2**30, tmp_path)
        state = model.state_dict()
        for loaded in (load_folder(pinned, "fp32", CPU), mapped):
            own = loaded.state_dict()
            assert all(torch.equal(own[each], state[each]) for each in state), name
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        assert set(ModelTensors(pinned, CPU, torch.float32).names) == set(state) - tied, name
        if kind == "mixtral":  # whose experts are stacked when they are loaded
            with refused(BadInputError, "'mixtral' model stores its experts one by one", name):
                LayerwiseModel(pinned, CPU, torch.float32)
        else:
            assert set(LayerwiseModel(pinned, CPU, torch.float32).reader.names) == set(wanted), (
                name
            )
            assert set(WeightReader(pinned, model).names) == set(wanted), name
        query = Query(folder, (tmp_path,))
        assert sum(tensor_bytes(query, each) for each in file_names(query)) == sum(
            each.nbytes for each in wanted.values()
        ), name


def quantised(method: str, suffixes: tuple[str, ...]) -> Change:
    """Return what replaces a layer's matrices by packed ones, as quantised repositories have."""

    def change(folder: Path) -> None:
        changed(quantization_config={"quant_method": method, "bits": 4, "group_size": 128})(folder)
        for path in weight_files(folder):
            weights = load_file(path)
            for key in [key for key in weights if "proj" in key]:
                del weights[key]
                weights |= {
                    f"{key.removesuffix('weight')}{each}": torch.ones(2, 2, dtype=torch.int32)
                    for each in suffixes
                }
            save_file(weights, path, {"format": "pt"})

    return change


def in_sub_folders(*names: str) -> Change:
    """Return what leaves a folder's own files away, as pipelines of several models have."""

    def change(folder: Path) -> None:
        config = (folder / "config.json").read_text()
        for path in [each for each in folder.iterdir() if each.is_file()]:
            path.unlink()
        for name in names:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(config)

    return change


def bare(folder: Path) -> None:
    """Leave the decoder without its output layer, as models of embeddings are."""
    changed(architectures=["LlamaModel"])(folder)
    for path in weight_files(folder):
        weights = {key.removeprefix("model."): each for key, each in load_file(path).items()}
        weights.pop("lm_head.weight", None)
        save_file(weights, path, {"format": "pt"})
    index = {key: path.name for path in weight_files(folder) for key in load_file(path)}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def opened(folder: Path) -> Path:
    return opened_model(FolderModel(path=folder.name), folder.parents[1])


# The readers of jobs: of train, evaluate, tasks, generate and endpoints (load_folder), of mapped
# weights, of compressions and streamed weights, and of the planned memory.
LOADERS: dict[str, Callable[[Path], object]] = {
    "load_folder": lambda folder: load_folder(opened(folder), "fp32", CPU),
    "device map": lambda folder: load_with_device_map(
        opened(folder), torch.float32, 2**30, folder
    ),
    "layer by layer": lambda folder: LayerwiseModel(opened(folder), CPU, torch.float32),
}
EVERY = {"opened_model": opened, "weights_digest": weights_digest, **LOADERS}
ALL_PARTS = [f"Llama-Q8_0-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
OWN_CODE = "the code that its auto_map names never runs; give a model of another type"
Row = tuple[str, tuple[Change, ...], dict[str, Callable[[Path], object]], str]

# name: (repository, what is made of a Llama, the readers, what each of them says)
REFUSED: dict[str, Row] = {
    "GPTQ": (
        "TheBloke/Llama-2-7B-GPTQ",
        (quantised("gptq", ("qweight", "qzeros", "scales", "g_idx")),), LOADERS,
        r"quantised by 'gptq'.*unquantised model",
    ),
    "AWQ": (
        "Qwen/Qwen2.5-7B-Instruct-AWQ", (quantised("awq", ("qweight", "qzeros", "scales")),),
        LOADERS, r"quantised by 'awq'.*unquantised model",
    ),
    "a type with code of its own": (
        "internlm/internlm2-chat-7b",
        (changed(model_type="internlm2", auto_map={"AutoConfig": "configuration_internlm2.C"}),),
        LOADERS | {"config_of": lambda folder: config_of(opened(folder))}, OWN_CODE,
    ),
    "embeddings": (
        "intfloat/e5-mistral-7b-instruct", (bare,), LOADERS,
        r"config\.json names LlamaModel, which writes no text: give a model with an output layer",
    ),
    "pickle alone": (
        "bigscience/bloom-560m",
        (one_file, without(SINGLE), beside("pytorch_model.bin")), EVERY,
        r"pytorch_model\.bin is pickle, which is never read\)",
    ),
    "Mistral's own format alone": (
        "mistralai/Mistral-Small-3.1-24B-Base-2503",
        (merged("consolidated.safetensors"), without(INDEX, *SHARDS)), EVERY,
        r"consolidated\.safetensors has Mistral's own names: give its config\.json and model\*",
    ),
    "a shard that is not there": (
        "meta-llama/Llama-3.1-8B-Instruct", (without(SHARDS[1]),), EVERY,
        rf"lacks {SHARDS[1]}, which {INDEX} names \(1 of 2 files\): the download is incomplete",
    ),
    "an adapter alone": (
        "tloen/alpaca-lora-7b",
        (merged("adapter_model.safetensors"), without("config.json", INDEX, *SHARDS)), EVERY,
        r"adapter_model\.safetensors is an adapter, which does not stand for its base model",
    ),
    "a pipeline of diffusers": (
        "stabilityai/stable-diffusion-xl-base-1.0",
        (in_sub_folders("text_encoder", "unet", "vae"), text(model_index__json="{}")), EVERY,
        r"is a pipeline of diffusers \(model_index\.json\); give the folder of a language model",
    ),
    "GGUF in several quantisations": (
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        (without("config.json", INDEX, *SHARDS),
         *(beside(f"Llama-{kind}.gguf", b"GGUF") for kind in ("Q4_K_M", "Q5_K_M")),
         *(beside(name, b"GGUF") for name in ALL_PARTS)),
        EVERY, r"Llama-Q4_K_M\.gguf, .* and 2 more is GGUF, which llama\.cpp serves",
    ),
}  # fmt: skip


def test_a_repository_that_is_no_model_here_is_refused_alike_by_every_reader(made, tmp_path):
    for at, (name, (_, changes, readers, words)) in enumerate(REFUSED.items()):
        folder = shutil.copytree(made["llama"], tmp_path / "models" / str(at))
        for change in changes:
            change(folder)
        for reader, read in readers.items():
            with refused(BadInputError, words, (name, reader)):
                read(folder)


def test_an_adapter_of_pickle_is_refused_as_such(made, tmp_path):
    (folder := tmp_path / "models" / "one").mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(MissingModelError, match=r"adapter_model\.bin is pickle, which is never"):
        opened_adapter(FolderModel(path="one"), tmp_path)


def named() -> Iterator[str]:
    yield from (row[0] for row in USED.values())
    yield from (row[0] for row in REFUSED.values())


def test_each_row_names_its_public_source():
    for name in named():
        assert re.fullmatch(r"[\w.-]+/[\w./-]+", name), f"{HUB}{name}"
