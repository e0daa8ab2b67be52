"""An adapter as llama.cpp's own file: what is written, what is refused, and what it answers."""

import json
import shutil

import numpy as np
import openai
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from runners.jobs.compress.gguf import permute_rope_rows
from runners.jobs.loading import load_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.llamacpp.writer import write_adapter
from runners.jobspec import FolderModel, NamedAdapter, ServeSpec
from tests.runners.jobs.adapter_making import make_all
from tests.system.jobs.serve.gguf import build_environment, write_model
from tests.system.jobs.serve.serving import complete, serving

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model.layers.0."
TOKENS = 12
MADE = {"one": {}, "two": {"rank": 2, "alpha": 8, "targets": "query_value"}}
PROMPTS = ["import os", "def f(", "class A:"]
OTHER_PROMPTS = ["for i in", "    return", "with open(", "# The", "x = [", "if not", "try:", '"""']
NEAR_TIE = 0.1  # of a logarithm; F16 weights may choose either token


@pytest.fixture(scope="module")
def merged(host, base):
    """Save the adapters on the host; return each merged model, and the base's."""
    return make_all(base, host.path / "models" / "for-llama", MADE)


@pytest.fixture
def adapter(host, merged, tmp_path):
    return shutil.copytree(host.path / "models" / "for-llama" / "one", tmp_path / "one")


@pytest.fixture
def config(base):
    return json.loads((base / "config.json").read_text())


def with_config(folder, **changes):
    stated = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(stated | changes))


def with_tensors(folder, change):
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def with_first(folder, change):
    with_tensors(folder, lambda found: found | {(key := next(iter(found))): change(found[key])})


def test_ggufs_own_reader_finds_every_matrix_as_llama_cpp_turns_it(
    adapter, base, config, tmp_path
):
    write_adapter("one", adapter, config, tmp_path / "one.gguf")

    read = {each.name: each.data for each in GGUFReader(tmp_path / "one.gguf").tensors}
    stored, shape = load_file(adapter / WEIGHTS), AutoConfig.from_pretrained(base)
    assert len(read) == len(stored)
    for linear, theirs in (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k")):
        up = stored[f"{PREFIX}{linear}.lora_B.weight"].numpy()
        assert np.array_equal(
            read[f"blk.0.{theirs}.weight.lora_b"], permute_rope_rows(linear, up, shape)
        )
    down = stored[f"{PREFIX}mlp.down_proj.lora_A.weight"].numpy()
    assert np.array_equal(read["blk.0.ffn_down.weight.lora_a"], down)


@pytest.mark.parametrize(("changes", "alpha"), [({}, 8.0), ({"use_rslora": True}, 16.0)])
def test_its_alpha_is_that_of_which_llama_cpp_takes_pefts_scale(
    adapter, config, tmp_path, changes, alpha
):
    with_config(adapter, **changes)  # rank 4, alpha 8: 8 / 4, or 8 / sqrt(4)

    write_adapter("one", adapter, config, tmp_path / "one.gguf")

    fields = GGUFReader(tmp_path / "one.gguf").fields
    assert fields["adapter.lora.alpha"].contents() == alpha
    assert fields["general.type"].contents() == "adapter"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_stay_in_the_width_in_which_they_are_stored(adapter, config, tmp_path, dtype):
    with_tensors(adapter, lambda found: {name: each.to(dtype) for name, each in found.items()})

    write_adapter("one", adapter, config, tmp_path / "one.gguf")

    (first, *_) = GGUFReader(tmp_path / "one.gguf").tensors
    assert first.tensor_type.name == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert (tmp_path / "one.gguf").stat().st_size < 1.1 * (adapter / WEIGHTS).stat().st_size


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda at: with_config(at, use_dora=True), "has use_dora 'True'"),
        (lambda at: with_config(at, r=3), "has r 3, and blk.0"),
        (lambda at: with_first(at, lambda each: each * float("nan")), "has NaN or infinity in"),
        (lambda at: with_first(at, lambda each: each.int()), "says nothing sound of"),
        (lambda at: with_tensors(at, lambda each: dict(list(each.items())[1:])), "one of two"),
        (lambda at: (at / WEIGHTS).write_bytes(b"GGUF"), "not a safetensors file"),
        (
            lambda at: (at / WEIGHTS).write_bytes(bytes([2]) + bytes(7) + b"{}"),
            "not a LoRA matrix",
        ),
    ],
)
def test_what_is_no_sound_adapter_is_refused_by_its_name(adapter, config, tmp_path, damage, words):
    damage(adapter)

    with pytest.raises(BadInputError, match=f"adapter one .*{words}"):
        write_adapter("one", adapter, config, tmp_path / "one.gguf")


def test_a_file_that_is_cut_off_is_refused_where_it_ends(adapter, config, tmp_path):
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:-1000])

    with pytest.raises(BadInputError, match="is cut off within base_model"):
        write_adapter("one", adapter, config, tmp_path / "one.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, "model of type 'qwen2' are not written for llama.cpp"),
        ({"num_attention_heads": 5}, "has 64 rows in .*q_proj.*, for a base of 5 heads"),
    ],
)
def test_an_adapter_of_another_base_is_refused(adapter, config, tmp_path, changes, words):
    with pytest.raises(BadInputError, match=words):
        write_adapter("one", adapter, config | changes, tmp_path / "one.gguf")


@pytest.fixture(scope="module")
def client(host, base, merged):
    build_environment(host.path)
    write_model(base, host.path / "models" / "gguf-of-adapters")
    named = [
        NamedAdapter(name=each, adapter=FolderModel(path=f"for-llama/{each}")) for each in MADE
    ]
    model = FolderModel(path=str(host.path / "models" / "gguf-of-adapters"))
    spec = ServeSpec(model=model, engine="llamacpp", max_concurrency=4, adapters=named)
    with serving(host, "serve-llama-adapters", spec) as endpoint:
        endpoint.address()
        yield endpoint.client()


@pytest.fixture(scope="module")
def likeliest(base, merged):
    """The first token's best log-probability by each merged model alone, for three prompts.

    llama.cpp reports no log-probability for a token that ends inside a character, so prompts
    after which a model may choose such a token are left out.
    """
    tokenizer = load_tokenizer(base)

    @torch.inference_mode()
    def best(name: str, prompt: str) -> float | None:
        logits = merged[name](**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        found = torch.log_softmax(logits, dim=-1)
        near = (found > found.max() - NEAR_TIE).nonzero().flatten()
        is_whole = all("\ufffd" not in tokenizer.decode([token]) for token in near)
        return float(found.max()) if is_whole else None

    table = {
        prompt: {name: best(name, prompt) for name in merged}
        for prompt in (*PROMPTS, *OTHER_PROMPTS)
    }
    whole = {prompt: row for prompt, row in table.items() if None not in row.values()}
    assert len(whole) >= 3, table
    return dict(list(whole.items())[:3])


@pytest.mark.slow
def test_the_official_client_chooses_among_adapters_by_the_models_name(client, likeliest):
    listed = {each.id: getattr(each, "parent", None) for each in client.models.list().data}
    assert listed == {"model": None, "one": "model", "two": "model"}

    for prompt, best in likeliest.items():
        for name in ("one", "model", "two", "model", "one"):  # one slot's cache serves all in turn
            found = complete(client, prompt, model=name, max_tokens=1, logprobs=1)

            (logprob,) = found.choices[0].logprobs.token_logprobs
            assert logprob == pytest.approx(best[name], abs=0.05), (name, prompt)
            assert found.model == name


@pytest.mark.slow
def test_whole_answers_through_an_adapter_are_the_merged_models(client, base, merged):
    tokenizer, same = load_tokenizer(base), 0
    for name in merged:
        for prompt in PROMPTS:
            asked = tokenizer(prompt, return_tensors="pt")
            ids = merged[name].generate(**asked, max_new_tokens=TOKENS, do_sample=False)
            answer = tokenizer.decode(
                ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True
            )
            found = complete(client, prompt, model=name, max_tokens=TOKENS)
            same += found.choices[0].text == answer

    assert same >= 7, f"{same} of 9"  # F16 weights may round a near tie the other way


@pytest.mark.slow
def test_a_name_that_no_adapter_has_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, model="four")

    assert "'model' is, with adapters one, two" in caught.value.message
