"""QMoE on a small sparse model: ternary experts, coded, read back by our loader."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from runners.jobs.compress.job import RoutedTokens, quantise_experts, ternary, work
from runners.jobs.evaluate import work as evaluate
from runners.jobs.loading import load_folder, load_tokenizer, stored_quantisation
from runners.jobs.runtime import BadInputError
from runners.jobs.weights import Ternary
from runners.jobspec import ArtefactModel, CompressSpec, EvaluateSpec, FolderModel
from tests.runners.jobs.tiny import SHORT

CPU = torch.device("cpu")
CONFIG = MixtralConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def sparse(host, trained):
    """A sparse model that learned a little of what follows what, with the demo's tokenizer."""
    torch.manual_seed(5)
    model = MixtralForCausalLM(CONFIG)
    tokenizer = load_tokenizer(trained.folder / "output" / "model")
    text = json.__doc__ + json.dumps.__doc__
    ids = torch.tensor([tokenizer(text).input_ids[:256]]).view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(25):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = host.path / "models" / "sparse-for-qmoe"
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return FolderModel(path=folder.name)


@pytest.fixture(scope="module")
def finished(host, sparse):
    fields = {"calibration_tokens": 2048, **SHORT}
    spec = CompressSpec(model=sparse, method="qmoe", **fields)
    return host.run_here("compress-qmoe", spec, work)


@pytest.fixture
def folder(finished):
    return finished.folder / "output" / "model"


def test_experts_take_about_as_few_bits_as_their_entropy(finished):
    """A row of 64 shares two levels of 16 bits, half a bit a weight: no more is added."""
    bits = finished.measured["expert_bits_per_weight"]
    least = finished.measured["expert_entropy_bits_per_weight"]

    assert least < 1.2
    assert least < bits < least + 0.52
    assert finished.measured["expert_zeros_share"] > 0.6


def test_what_was_saved_reads_text_as_the_outcome_in_memory_did(finished):
    """The job compares the reloaded folder's perplexity itself, and refuses another."""
    assert finished.measured["perplexity_ratio"] > 0.5
    assert finished.measured["disk_bytes"] < 0.65 * finished.measured["original_disk_bytes"]
    assert "rANS" in finished.bodies("result")[0]["notes"]["method"]


def test_our_loader_gets_rows_of_three_values(folder):
    experts = load_folder(folder, "int4", CPU).model.layers[1].mlp.experts

    values = {len(row.unique()) for row in experts.gate_up_proj[2]}

    assert stored_quantisation(folder) == "int4"
    assert max(values) <= 3
    assert experts.down_proj.dtype == torch.bfloat16


def test_the_model_is_judged_against_its_original_by_a_job(host, finished, sparse):
    spec = EvaluateSpec(
        model=ArtefactModel(attempt_id="compress-qmoe"),
        weight_dtype="int4",
        original=sparse,
        evaluation_tokens=1024,
    )

    judged = host.run_here("evaluate-qmoe", spec, evaluate)

    ratio = finished.measured["perplexity_ratio"]
    assert judged.measured["perplexity_ratio"] == pytest.approx(ratio, rel=0.02)


def test_a_damaged_code_is_refused_by_name(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(copy / "model.safetensors")
    name = next(each for each in tensors if each.endswith(".words"))
    save_file(tensors | {name: tensors[name][:-2].clone()}, copy / "model.safetensors")

    with pytest.raises(BadInputError, match="are damaged"):
        load_folder(copy, "int4", CPU)


def test_a_dense_model_is_refused_with_the_way_out(make_job, trained_model):
    with pytest.raises(BadInputError, match="this 'llama' has none; choose gptq"):
        work(make_job(CompressSpec(model=trained_model, method="qmoe")))


def test_error_that_is_passed_on_serves_the_text_better_than_rounding():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(32, 48, generator=generator)
    inputs = torch.randn(512, 48, generator=generator) @ torch.randn(48, 48, generator=generator)

    found = ternary(weight, inputs)

    alone = ternary(weight, torch.eye(48))
    errors = [((weight - each.weight()) @ inputs.T).square().sum() for each in (found, alone)]
    assert errors[0] < 0.8 * errors[1]


def test_an_expert_that_no_token_reaches_is_rounded_all_the_same():
    experts = MixtralForCausalLM(CONFIG).model.layers[0].mlp.experts
    nobody = RoutedTokens(torch.randn(8, 64), torch.zeros(8, 2, dtype=torch.long))

    stacks = quantise_experts(experts, nobody)

    assert stacks["gate_up_proj"].symbols[3].any()
    assert torch.equal(stacks["down_proj"].weight(), experts.down_proj.detach())


def test_symbols_stand_for_zero_and_the_rows_levels():
    symbols = torch.tensor([[0, 1, 2]], dtype=torch.uint8)

    weight = Ternary(symbols, torch.tensor([[-3.0, 5.0]])).weight()

    assert weight.tolist() == [[0.0, -3.0, 5.0]]
