"""Experts that come when they are asked for write what experts in memory write."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from runners.jobs.generate.placement import CachedExperts, DeviceExperts, held_bytes
from runners.jobs.generate.static import Limits, run_batch
from runners.jobs.loading import fresh_model, load_folder
from runners.jobs.runtime import BadInputError
from runners.jobs.skeleton import Expert
from runners.jobspec.generate import ExpertCache
from tests.runners.jobs.tiny import TINY_CONFIG

CPU = torch.device("cpu")
SPARSE = {**TINY_CONFIG, "num_hidden_layers": 3, "num_experts_per_tok": 2}
MIXTRAL = {**SPARSE, "model_type": "mixtral", "num_local_experts": 8}
QWEN = {**SPARSE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32}
OLMOE = {**SPARSE, "model_type": "olmoe", "num_experts": 8}
PROMPTS = [[5, 7, 11, 13], [17, 19, 23]]
EXPERT_BYTES = 3 * 64 * 128 * 4


def folder_of(path, config):
    torch.manual_seed(5)
    fresh_model(config, torch.float32).save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def mixtral(host):
    return folder_of(host.path / "models" / "sparse-mixtral", MIXTRAL)


def cached(folder, **asked) -> CachedExperts:
    return CachedExperts(folder, CPU, torch.float32, ExpertCache(**asked))


@pytest.mark.equality
@pytest.mark.parametrize("config", [MIXTRAL, QWEN, OLMOE], ids=lambda each: each["model_type"])
def test_every_kind_of_sparse_model_writes_the_same_from_a_small_cache(config, tmp_path):
    folder = folder_of(tmp_path / "model", config)
    wanted = run_batch(load_folder(folder, "fp32", CPU), PROMPTS, Limits(12)).answers

    found = run_batch(cached(folder, experts_resident=1).model, PROMPTS, Limits(12)).answers

    assert found == wanted


def test_more_room_hits_more_often_and_brings_less(mixtral):
    figures = []
    for resident in (2, 4, 8):
        one = cached(mixtral, experts_resident=resident, guessed_experts=0)
        run_batch(one.model, [[5, 7, 11]], Limits(20))
        figures.append(one.cache.figures.measured())

    ratios = [each["expert_hit_ratio"] for each in figures]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1]
    assert figures[-1]["experts_brought"] <= 3 * 8 < figures[0]["experts_brought"]


def test_guesses_take_nothing_from_what_was_used_before(mixtral):
    hits = []
    for guesses in (0, 8):
        one = cached(mixtral, experts_resident=2, guessed_experts=guesses)
        run_batch(one.model, [[5, 7, 11]], Limits(20))
        hits.append(one.cache.figures.hits)

    assert hits[0] == hits[1]


def test_no_expert_is_among_the_models_own_weights(mixtral):
    whole = held_bytes(load_folder(mixtral, "fp32", CPU))

    assert held_bytes(cached(mixtral).model) == whole - 3 * 8 * EXPERT_BYTES


def shelf_of(resident: int, guesses: int, fetched: list) -> DeviceExperts:
    def fetch(layer: int, expert: int) -> Expert:
        fetched.append((layer, expert))
        return Expert(torch.ones(1), torch.ones(1))

    return DeviceExperts(fetch, resident, guesses)


def test_the_expert_that_was_not_used_for_longest_goes():
    fetched = []
    shelf = shelf_of(2, 0, fetched)

    for expert in (0, 1, 0, 2, 0, 1):
        shelf.take(0, expert)

    assert fetched == [(0, 0), (0, 1), (0, 2), (0, 1)]
    assert (shelf.figures.hits, shelf.figures.wanted) == (2, 6)


def test_a_right_guess_is_not_brought_again():
    fetched = []
    shelf = shelf_of(1, 2, fetched)
    shelf.guess(1, [4, 5, 6])

    shelf.take(1, 5)

    assert sorted(fetched) in ([(1, 5)], [(1, 4), (1, 5)])
    assert (shelf.figures.guessed, shelf.figures.right) == (2, 1)


def test_a_guess_that_was_never_begun_with_counts_as_not_brought():
    gate = threading.Event()

    def fetch(_layer: int, _expert: int) -> Expert:
        gate.wait(120)
        return Expert(torch.ones(1), torch.ones(1))

    shelf = DeviceExperts(fetch, 1, 3)
    shelf.guess(1, [0, 1, 2])
    shelf.guess(2, [])
    gate.set()

    assert shelf.figures.guessed == 3
    assert shelf.figures.brought <= 1


def test_a_model_without_experts_is_refused_with_the_way_out(tmp_path):
    folder = folder_of(tmp_path / "dense", TINY_CONFIG)

    with pytest.raises(BadInputError, match="no experts that could be cached; stream its layers"):
        cached(folder)


def test_more_resident_experts_than_there_are_is_refused(mixtral):
    with pytest.raises(BadInputError, match="experts_resident is 9; a layer has 8 experts"):
        cached(mixtral, experts_resident=9)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.1.block_sparse_moe.experts.4.w1.weight", r"layers\.1\.mlp\.experts\.4\."),
        ("model.layers.0.block_sparse_moe.gate.weight", r"layers\.0\.mlp\.gate\.weight holds NaN"),
    ],
)
def test_a_weight_that_is_no_number_is_refused_by_name(mixtral, tmp_path, name, why):
    tensors = load_file(mixtral / "model.safetensors")
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((mixtral / "config.json").read_bytes())

    with pytest.raises(BadInputError, match=why):
        cached(tmp_path)


def test_weights_that_lack_a_router_are_refused_by_name(mixtral, tmp_path):
    tensors = load_file(mixtral / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((mixtral / "config.json").read_bytes())

    with pytest.raises(BadInputError, match=r"they lack model\.layers\.2\.mlp\.gate\.weight"):
        cached(tmp_path)
