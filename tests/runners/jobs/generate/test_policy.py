"""A block whose weights, cache and activations lie by a policy writes what it writes anyway."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runners.jobs.generate.caches import Packed
from runners.jobs.generate.placement import held_bytes
from runners.jobs.generate.policy.weights import PLACES, PolicyFigures, dealt, packed, unpacked
from runners.jobs.generate.policy.zigzag import DiskStore, ZigZag
from runners.jobs.generate.static import Limits, Setup, StopRequestedError, run_batch
from runners.jobs.loading import fresh_model, load_folder
from runners.jobs.runtime import BadInputError
from runners.jobs.skeleton import LayerwiseModel
from runners.jobspec import DemoModel, GenerateSpec
from runners.jobspec.generate import PolicyOffload
from tests.plugins.extent import combinations
from tests.runners.jobs.tiny import TINY_CONFIG

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = 6
PROMPTS = [[5, 7, 11, 13], [17, 19, 23], [1, 2, 3, 4, 5, 6], [9], [8, 10]]
LIMITS = Limits(8)
SPREAD = {"weights_cpu": 0.3, "weights_disk": 0.4, "kv_cpu": 0.25, "kv_disk": 0.5}
SHARES = (
    {"weights_disk": 1.0},
    {"weights_cpu": 1.0, "activations_cpu": 1.0},
    {"kv_cpu": 1.0},
    {"kv_disk": 1.0},
    {**SPREAD, "activations_cpu": 0.5},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder of six layers."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("policy") / "model"
    config = {**TINY_CONFIG, "num_hidden_layers": LAYERS}
    fresh_model(config, torch.float32).save_pretrained(str(path))
    return path


@pytest.fixture
def block(folder, tmp_path):
    """Return the model of a policy."""

    def made(dtype="fp32", kv_cache="plain", *, is_narrow=False, **asked) -> ZigZag:
        scratch = Path(tmp_path / f"scratch-{len(list(tmp_path.iterdir()))}")
        scratch.mkdir()
        skeleton = LayerwiseModel(folder, CPU, DTYPES[dtype])
        policy = PolicyOffload(**asked)
        return ZigZag(skeleton, folder, policy, scratch, kv_cache=kv_cache, is_narrow=is_narrow)

    return made


@pytest.mark.equality
@pytest.mark.parametrize(("shares", "dtype", "size"), combinations(SHARES, DTYPES, (None, 2)))
def test_wherever_a_block_lies_it_writes_what_the_device_alone_writes(
    folder, block, dtype, size, shares
):
    wanted = run_batch(load_folder(folder, dtype, CPU), PROMPTS, LIMITS).answers

    found = block(dtype, micro_batch_size=size, **shares).run_batch(PROMPTS, LIMITS)

    assert found.answers == wanted


@pytest.mark.equality
@pytest.mark.parametrize("kind", ["int4", "int2"])
def test_a_narrow_cache_off_the_device_writes_what_a_narrow_one_there_writes(folder, block, kind):
    model = load_folder(folder, "fp32", CPU)
    wanted = run_batch(model, PROMPTS, LIMITS, Setup(kind)).answers

    found = block(kv_cache=kind, **SPREAD).run_batch(PROMPTS, LIMITS)

    assert found.answers == wanted
    assert found.answers != run_batch(model, PROMPTS, LIMITS).answers


@pytest.mark.equality
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_four_bit_weights_elsewhere_write_what_four_bit_weights_here_write(block, dtype):
    here = block(dtype, "int4", is_narrow=True).run_batch(PROMPTS, LIMITS)

    away = block(dtype, "int4", is_narrow=True, micro_batch_size=2, **SPREAD)

    assert away.run_batch(PROMPTS, LIMITS).answers == here.answers
    assert here.answers != block(dtype).run_batch(PROMPTS, LIMITS).answers


def test_four_bit_weights_are_the_nearest_of_sixteen_steps_of_their_group():
    torch.manual_seed(1)
    matrix, norm = torch.randn(8, 128), torch.randn(128)

    parts = packed({"up.weight": matrix, "norm.weight": norm}, 64)
    found = unpacked(parts, torch.float32)

    groups = matrix.unflatten(-1, (-1, 64))
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    errors = (found["up.weight"] - matrix).abs().unflatten(-1, (-1, 64)).amax(-1)
    assert bool((errors <= 0.51 * steps + 2e-3).all())
    assert torch.equal(found["norm.weight"], norm)
    assert parts["up.weight.numbers"].nbytes == matrix.numel() / 2
    assert set(Packed._fields) == {name.rpartition(".")[2] for name in parts if "up" in name}


def test_a_row_that_no_group_divides_stays_whole():
    odd = {"weight": torch.ones(2, 65)}

    assert packed(odd, 64) == odd


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    parts=st.tuples(*[st.floats(0.01, 1.0)] * 3),
)
def test_each_place_has_its_share_within_the_largest_piece(sizes, parts):
    shares = [part / sum(parts) for part in parts]

    places = dealt(sizes, shares[1], shares[2])

    for place, share in zip(PLACES, shares, strict=True):
        here = sum(size for size, at in zip(sizes, places, strict=True) if at == place)
        assert abs(here - share * sum(sizes)) <= max(sizes) * (1 + 1e-9)


@pytest.mark.parametrize("is_narrow", [False, True])
def test_bytes_lie_where_the_policy_has_them_within_a_layer(block, is_narrow):
    policy = block(is_narrow=is_narrow, micro_batch_size=2, activations_cpu=0.5, **SPREAD)
    policy.run_batch(PROMPTS, LIMITS)

    measured = policy.figures.measured()

    layer = 1 / LAYERS
    assert {name: measured[name] for name in SPREAD} == pytest.approx(SPREAD, abs=layer)
    assert 0.2 < measured["activations_cpu"] < 0.8
    held = policy.figures
    assert measured["host_bytes"] == sum(
        each.most["host_memory"] for each in (held.weights, held.cache, held.activations)
    )
    tokens = sum(max(map(len, rows)) * len(rows) for rows in (PROMPTS[:2], PROMPTS[2:4]))
    tokens += len(PROMPTS[4]) + len(PROMPTS) * (LIMITS.output_tokens - 1)
    per_token = 2 * 2 * 16 * 4  # K and V of two heads of 16, in fp32
    assert held.cache.most.total() == LAYERS * tokens * per_token


@pytest.mark.proven
@pytest.mark.parametrize("size", [None, 1, 2])
def test_each_layer_comes_once_a_pass_however_many_micro_batches_it_serves(block, size):
    policy = block(micro_batch_size=size, weights_disk=0.5)

    policy.run_batch(PROMPTS, LIMITS)

    away = [at for at, place in enumerate(policy.layers.places) if place == "disk"]
    assert len(away) == LAYERS / 2
    assert policy.figures.passes == LIMITS.output_tokens
    assert policy.figures.loads == dict.fromkeys(away, LIMITS.output_tokens)


def test_between_passes_only_what_stays_is_on_the_device(folder, block):
    policy = block(weights_disk=0.5)
    policy.run_batch(PROMPTS, Limits(2))
    whole = load_folder(folder, "fp32", CPU)

    layer = sum(each.nbytes for each in whole.model.layers[0].parameters())
    assert held_bytes(policy.model) == held_bytes(whole) - LAYERS / 2 * layer


def test_prompts_that_are_answered_leave_the_passes_of_the_others(folder, block):
    first = run_batch(load_folder(folder, "fp32", CPU), PROMPTS, Limits(1)).answers
    ends = frozenset(answer.ids[0] for answer in first[:2])
    policy = block(micro_batch_size=2, weights_disk=1.0)

    found = policy.run_batch(PROMPTS, Limits(4, ends))

    assert [each.finish_reason for each in found.answers[:2]] == ["stop", "stop"]
    assert found.answers[2].ids[0] == first[2].ids[0]


def test_a_stop_between_two_passes_keeps_nothing_of_the_block(block):
    with pytest.raises(StopRequestedError):
        block(kv_disk=1.0).run_batch(PROMPTS, Limits(4, should_stop=lambda: True))


def test_a_cache_on_disk_is_gone_with_its_block(block, tmp_path):
    block(kv_disk=1.0).run_batch(PROMPTS, LIMITS)

    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


def test_a_disk_that_loses_a_cache_ends_the_job(tmp_path):
    with ThreadPoolExecutor(1) as thread:
        store = DiskStore(tmp_path, 8, thread, PolicyFigures())
        store.add((torch.ones(4, 1, 2, 3),))
        thread.submit(lambda: os.truncate(store.file, 10)).result()

        with pytest.raises(OSError, match="the cache's file ends 86 bytes early"):
            store.all_with((torch.ones(1, 1, 2, 3),))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batching": "packed"}, "batching packed"),
        ({"batching": "turbo"}, "batching turbo"),
        ({"weight_dtype": "int8"}, "weight_dtype int8"),
        ({"kv_cache": "fp8"}, "kv_cache fp8"),
        ({"speculation": {"method": "lookup"}}, "speculation lookup"),
        ({"compiled_step": True}, "offload policy"),
        ({"split": {"method": "tensor"}}, "offload policy"),
        ({"batch_size": 2}, "micro_batch_size is 4; batch_size, its block, is 2"),
    ],
)
def test_what_no_policy_runs_with_is_refused_by_name(changes, told):
    policy = PolicyOffload(kv_cpu=0.5, micro_batch_size=4)

    with pytest.raises(ValidationError, match=told):
        GenerateSpec.model_validate({"model": DemoModel(), "offload": policy, **changes})


@pytest.mark.parametrize("kind", ["weights", "kv"])
def test_shares_of_more_than_a_whole_are_refused_by_name(kind):
    shares = {f"{kind}_cpu": 0.7, f"{kind}_disk": 0.4}

    with pytest.raises(ValidationError, match=f"{kind}_cpu and {kind}_disk are 1.1 together"):
        PolicyOffload(**shares)


def test_a_cache_of_sliding_windows_stays_on_the_device(tmp_path):
    config = {**TINY_CONFIG, "model_type": "mistral", "sliding_window": 8}
    fresh_model(config, torch.float32).save_pretrained(str(tmp_path / "model"))
    skeleton = LayerwiseModel(tmp_path / "model", CPU, torch.float32)

    with pytest.raises(BadInputError, match="kv_cpu and kv_disk need full attention in every"):
        ZigZag(skeleton, tmp_path / "model", PolicyOffload(kv_cpu=0.5), tmp_path)
