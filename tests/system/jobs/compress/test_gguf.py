"""GGUF files of a really trained model, read by other code than wrote them."""

import json

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from runners.jobs.compress.gguf import (
    ReadBackError,
    check_writable,
    permute_rope_rows,
    read_back,
    tokens_of,
    write_gguf,
)
from runners.jobs.compress.job import work
from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError, file_sha256
from runners.jobs.weights import WeightReader
from runners.jobspec import CompressSpec
from tests.runners.jobs.tiny import SHORT

CPU = torch.device("cpu")
BITS = {"F16": 16, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_K_M": 6.45}  # rows of 64: Q5_0, some Q8_0
EACH = pytest.mark.parametrize("kind", list(BITS))


@pytest.fixture(scope="module")
def finished_of(host, trained_model):
    done = {}

    def run(kind):
        if kind not in done:
            spec = CompressSpec(model=trained_model, method="gguf", gguf_type=kind, **SHORT)
            done[kind] = host.run_here(f"gguf-{kind}", spec, work)
        return done[kind]

    return run


@pytest.fixture
def file(finished_of):
    return finished_of("Q8_0").folder / "output" / "model" / "model.gguf"


@pytest.fixture
def source(trained):
    return trained.folder / "output" / "model"


@EACH
def test_transformers_reads_the_file_as_the_job_says(kind, finished_of):
    finished = finished_of(kind)

    assert finished.measured["perplexity_ratio"] == pytest.approx(1.0, abs=0.05)
    assert finished.bodies("result")[0]["notes"]["method"].startswith("GGUF for llama.cpp")


@EACH
def test_the_files_size_is_that_of_its_type(kind, finished_of, source):
    count = sum(each.numel() for each in load_file(source / "model.safetensors").values())

    found = GGUFReader(finished_of(kind).folder / "output" / "model" / "model.gguf")

    assert sum(each.n_bytes for each in found.tensors) * 8 / count == pytest.approx(
        BITS[kind], rel=0.03
    )


def test_the_same_greedy_tokens_come_from_the_file(finished_of, source):
    folder = finished_of("F16").folder / "output" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    ids = load_tokenizer(source)("def main", return_tensors="pt").input_ids

    found = model.generate(ids, max_new_tokens=12, do_sample=False)

    original = load_folder(source, "fp32", CPU)
    assert torch.equal(found, original.generate(ids, max_new_tokens=12, do_sample=False))


def test_the_file_names_its_shape_and_its_tokenizer(file, source):
    fields = {name: each.contents() for name, each in GGUFReader(file).fields.items()}
    document = json.loads((source / "tokenizer.json").read_text())

    shape = ("embedding_length", "feed_forward_length", "attention.head_count_kv", "block_count")
    assert [fields[f"llama.{name}"] for name in shape] == [64, 128, 2, 2]
    assert (
        fields["tokenizer.ggml.tokens"][300]
        == {number: name for name, number in document["model"]["vocab"].items()}[300]
    )
    assert len(fields["tokenizer.ggml.merges"]) == len(document["model"]["merges"])


def test_the_card_has_the_files_digest(file):
    assert file_sha256(file) in (file.parent / "README.md").read_text()


def test_queries_are_turned_and_turned_back():
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1)
    rows = torch.arange(8).view(8, 1).float().numpy()

    turned = permute_rope_rows("self_attn.q_proj.weight", rows, config)

    assert turned[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert (permute_rope_rows("self_attn.q_proj.weight", turned, config, back=True) == rows).all()


def test_a_file_of_another_model_is_found_out(file, source):
    model = load_folder(source, "fp32", CPU)
    reader = WeightReader(source, model)
    first = reader.read
    reader.read = lambda name: first(name) * 1.5

    with pytest.raises(ReadBackError, match="differs by more than"):
        dict(read_back(file, model.config, reader))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Qwen2Config(), "of type llama and mistral, and this one is 'qwen2'"),
        (
            LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            "positions are scaled by 'linear'",
        ),
    ],
)
def test_what_llama_cpp_would_read_wrongly_is_refused(config, words):
    with pytest.raises(BadInputError, match=words):
        check_writable(config)


def test_a_tokenizer_of_another_kind_is_refused():
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    with pytest.raises(BadInputError, match="its tokenizer is WordLevel"):
        tokens_of(PreTrainedTokenizerFast(tokenizer_object=words), 1)


def test_entries_beyond_the_tokenizer_are_unused(source):
    tokens = tokens_of(load_tokenizer(source), 515)

    assert tokens.names[514] == "[PAD514]"
    assert tokens.kinds[514] == TokenType.UNUSED
    assert tokens.kinds[0] == TokenType.CONTROL


def test_llama_cpp_itself_writes_the_same_greedy_text(finished_of, source):
    llama = pytest.importorskip("xllamacpp", reason="xllamacpp (102 MB) is not installed")
    folder = finished_of("F16").folder / "output" / "model"
    tokenizer = load_tokenizer(source)
    ids = tokenizer("def main", return_tensors="pt").input_ids
    expected = load_folder(source, "fp32", CPU).generate(ids, max_new_tokens=8, do_sample=False)
    params = llama.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_ctx, params.cpuparams.n_threads, params.warmup = 64, 1, False

    answer = llama.Server(params).handle_completions(
        {"prompt": "def main", "max_tokens": 8, "temperature": 0.0, "top_k": 1}
    )

    assert answer["choices"][0]["text"] == tokenizer.decode(expected[0, ids.shape[1] :])


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_K_M", "Q6_K"])
def test_a_whole_model_is_written_and_read_back(kind, trained, tmp_path):
    tokenizer = load_tokenizer(trained.folder / "output" / "model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    reader, path = WeightReader(tmp_path, model), tmp_path / "model.gguf"

    write_gguf(path, config, reader, tokenizer, kind)

    assert set(dict(read_back(path, config, reader))) == set(reader.names)
    stored = {each.name: each.tensor_type for each in GGUFReader(path).tensors}
    assert stored["output.weight"] == GGMLQuantizationType.Q6_K
    assert stored["blk.0.attn_q.weight"] == {
        "Q4_K_M": GGMLQuantizationType.Q4_K,
        "Q5_K_M": GGMLQuantizationType.Q5_K,
    }.get(kind, GGMLQuantizationType.Q6_K)
