"""Layers of a model that run in stages make what the whole model makes."""

import pytest
import torch

from runners.jobs.generate.stage_model import DIVISIBLE, Call, Ends, Layers, divided, through
from runners.jobs.loading import fresh_model, load_folder
from runners.jobs.runtime import BadInputError
from tests.runners.jobs.tiny import TINY_CONFIG

CPU = torch.device("cpu")
SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
IDS = torch.tensor([[3, 5, 7, 11, 13, 17], [0, 0, 19, 23, 29, 31]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def folder_of(path, **changes):
    torch.manual_seed(5)
    config = {**TINY_CONFIG, "num_hidden_layers": 5, **changes}
    fresh_model(config, torch.float32).save_pretrained(str(path))
    return path


def staged(folder, count):
    stages = [Layers(folder, which, CPU, torch.float32) for which in divided(5, count)]
    return Ends(folder, CPU, torch.float32), stages


def written(ends, stages, steps=6):
    """Greedy tokens of two rows, one of them padded on the left."""
    ids, mask = IDS, MASK
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    found = []
    for _ in range(steps):
        hidden = through(stages, Call(1, positions, mask), ends.embed(ids))
        found.append(ends.choose(hidden))
        ids, mask = found[-1][:, None], torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        positions = positions[:, -1:] + 1
    return torch.stack(found, dim=1)


@pytest.mark.equality
@pytest.mark.parametrize("model_type", DIVISIBLE)
def test_stages_of_every_kind_that_is_divided_choose_the_same_tokens(model_type, tmp_path):
    more = SPARSE if "mo" in model_type or model_type == "mixtral" else {}
    if model_type == "mistral":
        more = {"sliding_window": 4}
    folder = folder_of(tmp_path / "model", model_type=model_type, head_dim=16, **more)
    whole = load_folder(folder, "fp32", CPU)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}

    wanted = whole.generate(input_ids=IDS, attention_mask=MASK, pad_token_id=0, **options)

    assert written(*staged(folder, 3)).tolist() == wanted[:, 6:].tolist()


@pytest.mark.equality
def test_a_head_that_is_the_embedding_is_one_in_stages_too(tmp_path):
    folder = folder_of(tmp_path / "model", tie_word_embeddings=True)

    assert written(*staged(folder, 2)).tolist() == written(*staged(folder, 5)).tolist()


def test_each_weight_is_in_one_stage_or_at_the_ends(tmp_path):
    folder = folder_of(tmp_path / "model")
    ends, stages = staged(folder, 2)

    around = sum(each.numel() for each in ends.model.parameters()) * 4
    whole = sum(each.numel() for each in load_folder(folder, "fp32", CPU).parameters()) * 4

    assert around + sum(each.weight_bytes for each in stages) == whole


def test_a_forgotten_session_takes_no_memory(tmp_path):
    ends, stages = staged(folder_of(tmp_path / "model"), 2)
    written(ends, stages, steps=2)
    before = [each.cache_bytes for each in stages]

    for each in stages:
        each.forget(1)

    assert all(before)
    assert [each.cache_bytes for each in stages] == [0, 0]


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5)])
def test_layers_are_divided_evenly_and_each_is_in_one_run(count, sizes):
    runs = divided(5, count)

    assert [len(each) for each in runs] == sizes
    assert [at for each in runs for at in each] == list(range(5))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(BadInputError, match="6 stages are requested, and the model has 5 layers"):
        divided(5, 6)


def test_a_model_that_is_not_divided_is_refused_with_those_that_are(tmp_path):
    folder = folder_of(tmp_path / "model", model_type="gpt_neox")

    with pytest.raises(BadInputError, match=r"a 'gpt_neox' model is not divided.*llama, mistral"):
        Ends(folder, CPU, torch.float32)
