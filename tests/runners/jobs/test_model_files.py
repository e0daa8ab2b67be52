"""Only a model's own data files are read: links, swaps, pickles, code and absurd configs."""

import contextlib
import json
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.jobs.loading import load_folder
from runners.jobs.model_files import check_config, pinned, read_config
from runners.jobs.runtime import BadInputError, MissingModelError

INSIDE, OUTSIDE = {"model_type": "llama", "marker": 1}, {"model_type": "llama", "marker": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(INSIDE))
    (folder / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "models"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OUTSIDE))
    return folder


def marker(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["marker"]


def test_the_files_of_a_folder_are_found_under_their_names(root):
    private = pinned(root / "llama", [root])

    assert sorted(path.name for path in private.iterdir()) == ["config.json", "model.safetensors"]
    assert (private / "model.safetensors").read_bytes() == b"weights"
    assert private.name == "llama"


def test_a_file_that_is_replaced_afterwards_stays_the_one_that_was_opened(root, outside):
    private = pinned(root / "llama", [root])
    (root / "llama/config.json").unlink()
    (root / "llama/config.json").symlink_to(outside / "config.json")

    assert marker(private) == 1


def test_a_link_within_the_roots_is_followed_as_caches_have_them(root):
    (root / "blobs").mkdir()
    (root / "llama/config.json").rename(root / "blobs/c0ffee")
    (root / "llama/config.json").symlink_to("../blobs/c0ffee")

    assert marker(pinned(root / "llama", [root])) == 1


def test_a_link_that_leaves_the_roots_is_refused(root, outside):
    (root / "llama/config.json").unlink()
    (root / "llama/config.json").symlink_to(outside / "config.json")

    with pytest.raises(MissingModelError, match="outside"):
        pinned(root / "llama", [root])


def test_a_second_name_of_a_file_is_refused(root, outside):
    (root / "llama/config.json").unlink()
    os.link(outside / "config.json", root / "llama/config.json")

    with pytest.raises(BadInputError, match="has 2 names"):
        pinned(root / "llama", [root])


def test_a_folder_that_is_a_link_by_now_is_refused(root, outside):
    (root / "llama").rename(root / "moved")
    (root / "llama").symlink_to(outside)

    with pytest.raises(MissingModelError, match="cannot be opened"):
        pinned(root / "llama", [root])


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(root, kind):
    (root / "llama/config.json").unlink()
    if kind == "fifo":
        os.mkfifo(root / "llama/config.json")
    else:
        (root / "llama/config.json").mkdir()

    with pytest.raises(BadInputError, match="is no plain file"):
        pinned(root / "llama", [root])


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
            read.append(marker(pinned(real, [root])))
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


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "consolidated.00.pth", "evil.py"]
)
def test_a_pickle_or_code_has_no_name_there(root, tmp_path, name):
    (root / "llama" / name).write_bytes(pickle.dumps(Canary(tmp_path / "sang")))

    private = pinned(root / "llama", [root])

    assert name not in {path.name for path in private.iterdir()}


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
        load_folder(pinned(root / "llama", [root]), "fp32", torch.device("cpu"))

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
