"""Which files of a repository a job needs, and why others are refused."""

from dataclasses import replace

import pytest

from runners.hub.errors import HubError
from runners.hub.listing import HubFile, Listing
from runners.hub.selection import code_files, code_key, exact_files, needed_files, shard_names
from tests.hub.models import write_files
from tests.runners.hub.conftest import REPOSITORY

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
SMALL = ["config.json", "generation_config.json", "tokenizer.json"]
PARTS = [f"Q8_0/m-Q8_0-0000{at}-of-00002.gguf" for at in (1, 2)]
TYPES = ["m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "mmproj-m-F16.gguf", "imatrix.gguf", *PARTS]


def listing(*paths: str, **fields: object) -> Listing:
    files = tuple(HubFile(path, 10**9, f"{at:040x}") for at, path in enumerate(paths))
    return Listing("org/name", "c" * 40, files, **fields)


CHOSEN = {
    "one file": ("safetensors", "", [*SMALL, "model.safetensors"], ["model.safetensors"]),
    "shards, and a second copy in Mistral's names": (
        "safetensors", "", [*SMALL, *SHARDS, INDEX, "consolidated.safetensors"], [INDEX, *SHARDS],
    ),
    "two sets of shards": (
        "safetensors", "",
        [*SMALL, *SHARDS, INDEX, *(f"consolidated-0000{at}-of-00002.safetensors" for at in (1, 2))],
        [INDEX, *SHARDS],
    ),
    "pickles, code and other frameworks beside them": (
        "safetensors", "",
        [*SMALL, "model.safetensors", "pytorch_model.bin", "x.pt", "modeling.py", "onnx/model.onnx",
         "original/consolidated.00.pth", "tf_model.h5", "README.md", "runs/config.json"],
        ["model.safetensors"],
    ),
    "the only GGUF file": ("gguf", "", ["m.gguf", "README.md"], ["m.gguf"]),
    "a type": ("gguf", "q4_k_m", TYPES, ["m-Q4_K_M.gguf"]),
    "a type of another maker": ("gguf", "UD-Q4_K_XL", TYPES, ["m-UD-Q4_K_XL.gguf"]),
    "a type in parts": ("gguf", "Q8_0", TYPES, PARTS),
    "the path of a part": ("gguf", PARTS[0], TYPES, PARTS),
    "a path": ("gguf", "m-Q4_K_M.gguf", TYPES, ["m-Q4_K_M.gguf"]),
}  # fmt: skip
REFUSED = {
    "pickles": (
        "safetensors", "", ["config.json", "pytorch_model.bin"], "pickle_only",
        r"pickle only \(pytorch_model\.bin\).*refs/pr/1.*save_pretrained",
    ),
    "pickles and GGUF": (
        "safetensors", "", ["config.json", "pytorch_model.bin", *TYPES], "pickle_only",
        "GGUF files, which llama.cpp serves: name one of",
    ),
    "an adapter": (
        "safetensors", "", ["config.json", "adapter_model.safetensors"], "unusable", "is an adapter",
    ),
    "no config": ("safetensors", "", ["model.safetensors"], "unusable", r"has no config\.json"),
    "a missing shard": (
        "safetensors", "", ["config.json", INDEX, SHARDS[0]], "unusable",
        r"lacks model-00002-of-00002\.safetensors",
    ),
    "shards without an index": (
        "safetensors", "", ["config.json", *SHARDS], "unusable", "without model.safetensors.index",
    ),
    "several types": (
        "gguf", "", TYPES, "ambiguous",
        r"holds 3 GGUF models: name one of Q8_0 \(2\.0 GB\), Q4_K_M \(1\.0 GB\), UD-Q4_K_XL",
    ),
    "another type": ("gguf", "Q2_K", TYPES, "absent", "has no GGUF file 'Q2_K': name one of"),
    "another path": ("gguf", "n.gguf", TYPES, "absent", r"has no GGUF file 'n\.gguf'"),
    "a missing part": ("gguf", "Q8_0", [PARTS[0]], "unusable", "has 1 of the 2 parts"),
    "no GGUF": ("gguf", "", ["model.safetensors"], "unusable", "often named name-GGUF"),
}  # fmt: skip


def test_a_job_needs_one_copy_of_the_weights_and_what_describes_them():
    for case, (weights, file, paths, chosen) in CHOSEN.items():
        found = [each.path for each in needed_files(listing(*paths), weights, file)]
        assert found == [path for path in SMALL if path in paths] + chosen, case


def test_a_repository_that_no_job_can_use_is_refused_with_what_to_name_instead():
    for case, (weights, file, paths, kind, words) in REFUSED.items():
        with pytest.raises(HubError, match=words) as refused:
            needed_files(listing(*paths), weights, file)
        assert (refused.value.kind, case) == (kind, case)
        assert "'org/name'" in str(refused.value), case


def test_code_of_a_repository_never_runs_but_an_engine_may_have_the_architecture():
    found = listing("config.json", "model.safetensors", "modeling.py", needs_remote_code=True)
    with pytest.raises(HubError, match="needs code of its own") as refused:
        needed_files(found, "safetensors")
    assert refused.value.kind == "remote_code"
    paths = [each.path for each in needed_files(found, "safetensors", is_built_in=True)]
    assert paths == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("files", "changes", "words"),
    [
        ({"coded.py": ""}, {}, ""),
        ({"coded.py": "", "tokenizer_config.json": '{"auto_map": ["own.Tokens", null]}'}, {}, ""),
        ({"coded.py": ""}, {"hub": "modelscope"}, "code runs of the Hugging Face Hub's repositor"),
        ({"inner/coded.py": ""}, {}, r"but it has no \.py file beside its config\.json"),
        ({"tokenizer_config.json": '{"auto_map": ["evil/x--own.Tokens", null]}'}, {},
         r"tokenizer_config.json' .* names code of another repository \(evil/x--own.Tokens\)"),
        ({"processor_config.json": '{"image": {"auto_map": {"AutoImage": "evil/x--own.I"}}}'}, {},
         "processor_config.json' .* names code of another"),
        ({"preprocessor_config.json": "[]]"}, {}, "choose another repository"),
    ],
)  # fmt: skip
def test_allowed_code_is_the_repositorys_own_of_every_config(
    hub, settings, looked_up, files, changes, words
):
    own = {"config.json": '{"auto_map": {"AutoConfig": "coded.Config"}}'}
    write_files(hub.folder / "acme/coded", {**own, **files})
    found = looked_up("acme/coded")
    settings = replace(settings, **changes)
    if words:
        with pytest.raises(HubError, match=words):
            code_files(found, settings, [code_key(found)])
    else:
        assert [each.path for each in code_files(found, settings, [code_key(found)])] == [
            "coded.py"
        ]
        with pytest.raises(HubError, match="slipway models code allow acme/coded@"):
            code_files(found, settings, [f"acme/coded@{'a' * 40}"])


def test_the_index_says_which_shards_are_the_model(hub, settings, looked_up):
    names = ["a-x.safetensors", "b.safetensors"]
    index = '{"weight_map": {"w": "a-x.safetensors", "v": "b.safetensors"}}'
    write_files(
        hub.folder / "org/odd",
        {"config.json": "{}", INDEX: index, **dict.fromkeys([*names, "c.safetensors"], 10)},
    )
    found = exact_files(looked_up("org/odd"), "safetensors", "", settings)
    assert [each.path for each in found] == ["config.json", INDEX, *names]
    assert hub.sent("safetensors") == len(index)
    assert looked_up(REPOSITORY).file("a-x.safetensors") is None


def test_an_index_that_names_other_places_is_refused():
    for data in (b"{}", b"[]", b'{"weight_map": {"a": "../x.safetensors"}}', b"\xff"):
        with pytest.raises(HubError, match=r"org: model\.safetensors\.index\.json") as refused:
            shard_names(data, "org")
        assert refused.value.kind == "unusable"
    assert shard_names(b'{"weight_map": {"a": "b.safetensors"}}', "org") == ("b.safetensors",)
