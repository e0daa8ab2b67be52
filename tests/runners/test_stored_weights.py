"""The weights of a model folder by its files and by its config, as preflight shows them."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from runners.host import preflight_weights
from runners.host.preflight_weights import EngineNeeds, FolderQuery, checks, weights_of
from runners.jobs.folder_query import Query, file_names, tensor_bytes
from runners.jobs.model_files import INDEX, SINGLE
from runners.jobs.runtime import BadInputError
from runners.shared.messages import MAX_SENTENCE

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
STORED_BYTES = 2 * (2 * 36_992 + 2 * 512 * 64 + 64)


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
    files = {}
    for name, part in (("1", shapes), ("2", {**ends, "model.norm.weight": (64,)})):
        tensors = {tensor: np.zeros(shape, np.float16) for tensor, shape in part.items()}
        files |= dict.fromkeys(tensors, f"model-0000{name}-of-00002.safetensors")
        save_file(tensors, tmp_path / f"model-0000{name}-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_index(tmp_path, files)
    return tmp_path


def write_index(folder, files):
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def query_of(folder) -> FolderQuery:
    return FolderQuery(folder, (folder.parent,), folder.parent / "host")


def test_files_and_config_agree_on_a_known_model_and_copies_are_not_counted(folder):
    shutil.copy(folder / "model-00002-of-00002.safetensors", folder / "consolidated.safetensors")
    found = weights_of(query_of(folder))
    assert found.stored_bytes == STORED_BYTES
    assert found.counted_bytes == pytest.approx(found.stored_bytes, rel=0.01)
    assert "but" not in found.sentence
    assert "MiB of weights" in found.sentence
    assert not found.remedy


def test_a_config_of_another_model_is_told(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 5120}))
    found = weights_of(query_of(folder))
    assert "but the planner counts" in found.sentence
    assert found.remedy


def test_a_config_that_the_planner_cannot_read_leaves_the_files_count(folder):
    for config in ["{}", "[]", "no json", "[" * 100_000, None]:
        (folder / "config.json").unlink()
        if config is not None:
            (folder / "config.json").write_text(config)
        found = weights_of(query_of(folder))
        assert (found.stored_bytes, found.counted_bytes) == (STORED_BYTES, None), config
        assert "the planner cannot read its config.json: " in found.sentence, config


def header(entries: object, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(start: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


BROKEN = {
    "empty": b"",
    "longer than the file": (2**40).to_bytes(8, "little"),
    "no object": header([]),
    "deep": header(b"[" * 1_000_000),
    "beyond the end": header({"a": tensor(0, 99_999)}, bytes(4)),
    "overlapping": header({"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(6)),
    "hole": header({"a": tensor(0, 4), "b": tensor(6, 8)}, bytes(8)),
    "no offsets": header({"a": {"dtype": "U8", "shape": [4], "data_offsets": None}}, bytes(4)),
    "immense shape": header({"a": {**tensor(0, 4), "shape": [2**62, 8]}}, bytes(4)),
}


def test_a_broken_file_is_refused_by_name(tmp_path):
    for content in BROKEN.values():
        (tmp_path / SINGLE).write_bytes(content)
        with pytest.raises(
            BadInputError, match=rf"^{SINGLE} is not a complete safetensors file \(.+\)"
        ):
            tensor_bytes(Query(tmp_path, (tmp_path,)), SINGLE)


def test_links_out_of_the_model_folders_and_fifos_are_not_opened(tmp_path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / SINGLE
    save_file({"weight": np.zeros(4, np.float32)}, elsewhere)
    (tmp_path / "outside.safetensors").symlink_to(elsewhere)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "fifo.safetensors")
    query = Query(tmp_path, (tmp_path,))
    for name, words in (
        ("outside", "outside"),
        ("gone", "cannot be"),
        ("fifo", "not a regular file"),
    ):
        with pytest.raises(BadInputError, match=words):
            tensor_bytes(query, f"{name}.safetensors")
    assert tensor_bytes(Query(elsewhere.parent, (elsewhere.parent,)), SINGLE) == 16


def test_an_index_that_names_no_files_is_refused(tmp_path):
    query = Query(tmp_path, (tmp_path,))
    with pytest.raises(BadInputError, match=f"the folder lacks {SINGLE}"):
        file_names(query)
    for index, words in [
        ("{", "is not valid JSON"),
        ('{"weight_map": []}', "has no weight_map"),
        ("[" * 1_000_000, f"{INDEX}"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "is not a file in the folder"),
        ('{"weight_map": {"a": 1}}', "is not a file in the folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "is not a file in the folder"),
    ]:
        (tmp_path / INDEX).write_text(index)
        with pytest.raises(BadInputError, match=words):
            file_names(query)


def shown(folder) -> str:
    """Return the sentence of preflight, of a Slurm host: no engine is queried there."""
    (check,) = checks(EngineNeeds("main", 0, is_login_node=True), query_of(folder))
    assert check.ok
    assert len(check.sentence) <= MAX_SENTENCE
    return check.sentence


def test_what_was_not_counted_is_told_with_the_file_and_the_reason(folder):
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "gone.safetensors"})
    assert f"lacks gone.safetensors, which {INDEX} names (1 of 2 files)" in shown(folder)
    write_index(folder, {str(n): f"{n:05}.safetensors" for n in range(5000)})
    assert "names 5000 files, and 4096 are read" in shown(folder)
    write_index(folder, {"a": "\ud800\0\n.safetensors"})
    assert "“a” holds a null character" in shown(folder)
    write_index(folder, {"a": "\n\u202e.safetensors"})
    sentence = shown(folder)
    assert "is not a file in the folder" in sentence
    assert sentence.isprintable()


def test_a_header_of_95_mb_meets_the_readers_limit(folder):
    entries = (
        b'"%015d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (n, n, n + 1)
        for n in range(1_250_000)
    )
    content = header(b"{" + b",".join(entries) + b"}", bytes(1_250_000))
    (folder / SINGLE).write_bytes(content)
    assert 90e6 < len(content) < 100e6
    (folder / INDEX).unlink()
    found = weights_of(query_of(folder))
    assert found.stored_problem == f"{SINGLE}: it needs more than 512 MiB of memory, the limit"
    assert found.counted_bytes == pytest.approx(STORED_BYTES, rel=0.01)


def test_a_reader_that_takes_too_long_is_ended(folder, monkeypatch):
    monkeypatch.setattr(preflight_weights, "COUNT_SECONDS", 0.01)
    assert "it took longer than 0.01 s, the limit" in weights_of(query_of(folder)).sentence
