"""Folders with GGUF files: one model in each, with all of its parts."""

import shutil

import pytest

from runners.jobs.loading import load_folder
from runners.jobs.model_files import check_gguf, gguf_files
from runners.jobs.runtime import BadInputError
from tests.runners.jobs.adapter_making import CPU
from tests.runners.jobs.cases import refused

ALL_PARTS = [f"Llama-Q8_0-0000{at}-of-00003.gguf" for at in (1, 2, 3)]

# name: (files, the model's files or what is said)
GGUF: dict[str, tuple[list[str], list[str] | str]] = {
    "one file": (["model.gguf", "README.md", "config.json"], ["model.gguf"]),
    "one in parts": (ALL_PARTS[::-1], ALL_PARTS),
    "with a projector and an importance matrix": (
        ["model.gguf", "mmproj-model-f16.gguf", "imatrix_unsloth.gguf"], ["model.gguf"],
    ),
    "a part that is not there": (
        ALL_PARTS[:2], rf"lacks {ALL_PARTS[2]}, of a model in 3 parts: the download is incomplete",
    ),
    "several": (
        ["Llama-Q4_K_M.gguf", *ALL_PARTS],
        r"holds 2 \.gguf models \(Llama-Q4_K_M\.gguf, Llama-Q8_0-\*-of-00003\.gguf\); keep one",
    ),
    "below": (["Q8_0/model.gguf"], r"holds no \.gguf file; the model is in .*/Q8_0: give that"),
    "none": (["model.safetensors"], r"holds no \.gguf file; compress the model"),
}  # fmt: skip


def test_a_gguf_folder_is_one_model_with_all_of_its_parts(tmp_path):
    """The names of https://github.com/ggml-org/llama.cpp, tools/gguf-split."""
    for at, (name, (files, expected)) in enumerate(GGUF.items()):
        (folder := tmp_path / str(at)).mkdir()
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(b"GGUF")
        if isinstance(expected, str):
            with refused(BadInputError, expected, name):
                gguf_files(folder)
            continue
        assert [path.name for path in gguf_files(folder)] == expected, name
    shutil.copytree(tmp_path / "1", tmp_path / "parts")  # the library would read the first alone
    (tmp_path / "parts" / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"parts holds a model in 3 parts, which llama\.cpp"):
        load_folder(tmp_path / "parts", "fp32", CPU)
    (pointer := tmp_path / "model.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadInputError, match=r"model\.gguf is a Git LFS pointer; run git lfs pull"):
        check_gguf(pointer, "model.gguf")
