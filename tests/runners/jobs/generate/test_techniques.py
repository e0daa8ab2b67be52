"""Compiled steps, streamed layers and cached experts write what plain decoding writes."""

import json
import os
import tempfile
import threading

import pytest
import torch
import torch._inductor.config
from accelerate import infer_auto_device_map
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from runners.jobs.generate import placement
from runners.jobs.generate.batching import CompiledStep, PagePlan, check_draft
from runners.jobs.generate.placement import (
    CachedExperts,
    DeviceExperts,
    StreamedLayers,
    held_bytes,
)
from runners.jobs.generate.static import (
    AnswerLimits,
    StopRequestedError,
    decode_greedily,
    run_batch,
)
from runners.jobs.loading import Expert, LayerwiseModel, fresh_model, load_folder, ready
from runners.jobs.runtime import BadInputError, check_compiler
from runners.jobs.weights import StoredTensors
from runners.jobspec import DemoModel, GenerateSpec, PromptLookup
from runners.jobspec.compress import QUANTISED_DTYPES
from runners.jobspec.generate import ExpertCache, LayerStreaming, MappedWeights
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG


def test_techniques_are_refused_where_they_do_not_run():
    for batching in ("packed", "continuous"):
        with refused(ValidationError, f"batching {batching} has attention kernels", batching):
            GenerateSpec(model=DemoModel(), batching=batching, attention="eager")
    for changes in ({"batching": "continuous"}, {"speculation": PromptLookup()}):
        with refused(ValidationError, "kv_cache fp8 runs neither with speculation", changes):
            GenerateSpec.model_validate({"model": DemoModel(), "kv_cache": "fp8", **changes})


def tokenizer_of(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: at for at, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, words[0])))


def test_a_draft_with_another_tokenizer_is_refused_with_the_way_out():
    check_draft(tokenizer_of("a", "b"), tokenizer_of("a", "b"))
    for draft in (None, tokenizer_of("b", "a")):
        with refused(BadInputError, r"another tokenizer.*or prompt lookup", draft):
            check_draft(tokenizer_of("a", "b"), draft)


def test_a_sequence_takes_whole_pages():
    for longest, blocks in ((15, 2), (16, 4), (1, 2)):
        pages = PagePlan.of([1, longest], output_tokens=1, batch_size=2)
        assert pages.num_blocks == blocks, (longest, blocks)


# A compiled decode step over a cache of fixed room writes what plain greedy decoding writes.

THREE_PROMPTS = [[5, 7, 11, 13], [17, 19, 23], [29] * 9]


@pytest.fixture
def step():
    """A step of four rows that is not compiled: the same function, at once."""
    torch.manual_seed(3)
    model = ready(fresh_model(TINY_CONFIG, torch.float32))
    found = CompiledStep(model, rows=4, length=24)
    found._compiled = found.forward
    return found


@pytest.mark.equality
def test_a_cache_of_fixed_room_writes_the_same_with_fewer_prompts_than_rows(step):
    wanted = [each.ids for each in run_batch(step.model, THREE_PROMPTS, AnswerLimits(12)).answers]
    found = step.run_batch(THREE_PROMPTS, AnswerLimits(12))
    assert [each.ids for each in found.answers] == wanted
    assert found.num_steps == 11


@pytest.mark.equality
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_step_is_one_graph_of_fixed_shapes_and_runs_plainly_if_it_does_not_compile(
    step, is_broken
):
    wanted = step.run_batch(THREE_PROMPTS, AnswerLimits(12)).answers
    graphs = []

    def backend(graph, _inputs):
        if is_broken:
            raise RuntimeError("no such instruction")
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    step._compiled = torch.compile(step.forward, fullgraph=True, dynamic=False, backend=backend)

    assert step.run_batch(THREE_PROMPTS, AnswerLimits(12)).answers == wanted
    assert step.run_batch(THREE_PROMPTS[:1], AnswerLimits(12)).answers == wanted[:1]
    assert len(graphs) == (not is_broken)  # compiled once for all positions
    assert ("no such instruction" in step.plain_reason) == is_broken


def test_a_batch_finds_the_cache_empty_in_its_whole_room_and_stops_between_tokens(step):
    first = step.run_batch(THREE_PROMPTS, AnswerLimits(8)).answers
    assert step.run_batch(THREE_PROMPTS, AnswerLimits(8)).answers == first
    few, many = (
        step.run_batch(THREE_PROMPTS, AnswerLimits(count)).kv_cache_bytes for count in (1, 12)
    )
    assert few == many > 0
    with pytest.raises(StopRequestedError):
        step.run_batch(THREE_PROMPTS, AnswerLimits(8, should_stop=lambda: True))


def test_steps_that_are_queued_ahead_write_the_same_and_end_no_later_than_one_step_on():
    """Tokens count up from the row's number; the next step is asked for before they are read."""
    for end_ids, lengths, wasted in (
        (frozenset(), [5, 5, 5], 0),
        (frozenset({3, 4}), [3, 2, 1], 1),
    ):
        steps = []

        def step(last, steps=steps):
            steps.append(last)
            return last[:, 0] + 1

        limits = AnswerLimits(5, end_ids)
        first = torch.tensor([0, 1, 2])
        plain = decode_greedily(first, 3, limits, step)
        num_plain = len(steps)
        ahead = decode_greedily(first, 3, limits, step, queues_ahead=True)
        assert ahead == plain
        assert [len(each.ids) for each in plain[0]] == lengths
        assert num_plain == plain[1]
        assert len(steps) - num_plain == num_plain + wasted


def test_a_job_compiles_in_its_own_folder_unless_the_operator_names_one(tmp_path, monkeypatch):
    shared = f"{tempfile.gettempdir()}/torchinductor_root"
    for given, expected in (
        ("", tmp_path),
        (shared, tmp_path),
        ("/data/kernels", "/data/kernels"),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given or shared)
        if not given:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        check_compiler(tmp_path, "compiled_step")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(expected)

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        BadInputError, match=r"compiled_step needs the compiler g\+\+.*leave compiled_step out"
    ):
        check_compiler(tmp_path, "compiled_step")


def test_what_is_not_compiled_is_refused_by_name():
    for changes, told in (
        ({"batching": "packed"}, "batching packed"),
        ({"kv_cache": "fp8"}, "kv_cache fp8"),
        ({"speculation": PromptLookup()}, "speculation lookup"),
        ({"offload": LayerStreaming()}, "offload stream"),
        ({"weight_dtype": "int8"}, "weight_dtype int8"),
    ):
        with refused(ValidationError, f"not with .*{told}", (changes, told)):
            GenerateSpec(model=DemoModel(), compiled_step=True, **changes)


# Weights that are not all in memory write what weights in memory write.

PROMPTS = [[5, 7, 11, 13], [17, 19, 23]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder of six layers."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("six-layers") / "model"
    fresh_model({**TINY_CONFIG, "num_hidden_layers": 6}, torch.float32).save_pretrained(str(path))
    return path


def streamed(folder, **asked) -> StreamedLayers:
    skeleton = LayerwiseModel(folder, torch.device("cpu"), torch.float32)
    return StreamedLayers(skeleton, folder, LayerStreaming(**asked))


@pytest.mark.equality
def test_layers_from_all_three_places_write_the_same(folder):
    spread = streamed(folder, layers_resident=1, layers_in_host=2)
    found = run_batch(spread.model, PROMPTS, AnswerLimits(8)).answers
    assert (
        found
        == run_batch(streamed(folder, layers_resident=6).model, PROMPTS, AnswerLimits(8)).answers
    )
    told = "1 of 6 layers stay, 2 come from host memory and 3 come from disk in every pass"
    assert spread.where.startswith(told)


def test_layers_that_are_not_there_or_hold_nan_are_refused(folder, tmp_path):
    with pytest.raises(BadInputError, match="layers_in_host is 7, and the model has 6 layers"):
        streamed(folder, layers_resident=3, layers_in_host=4)
    with pytest.raises(BadInputError, match="layers_resident is 7, and the model has 6 layers"):
        streamed(folder, layers_resident=7)

    model = fresh_model({**TINY_CONFIG, "num_hidden_layers": 2}, torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(str(tmp_path))
    with pytest.raises(BadInputError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        streamed(tmp_path)


def test_one_streamed_layer_at_a_time_has_weights_and_none_between_two_passes(folder):
    whole = held_bytes(streamed(folder, layers_resident=6).model)
    model = streamed(folder, layers_resident=2, look_ahead=False).model
    run_batch(model, PROMPTS, AnswerLimits(3))
    one_layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    assert held_bytes(model) == whole - 4 * one_layer

    model = streamed(folder).model
    seen = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda *_: seen.append(sum(not next(each.parameters()).is_meta for each in layers))
        )
    layers = model.model.layers
    run_batch(model, PROMPTS, AnswerLimits(1))
    assert seen == [1] * 6


def test_a_stored_tensor_is_read_as_it_was_written_unless_in_another_dtype(tmp_path):
    wanted = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(wanted, str(tmp_path / "model.safetensors"))
    found = StoredTensors(tmp_path)
    assert set(found.names) == set(wanted)
    assert all(torch.equal(found.read(name), tensor) for name, tensor in wanted.items())
    save_file({"codes": torch.ones(4, dtype=torch.int8)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(
        BadInputError, match="codes is stored as I8; layers can be streamed from F32"
    ):
        StoredTensors(tmp_path)


def test_offload_is_refused_where_it_does_not_run_and_survives_its_own_json():
    for changes in [
        {"batching": "continuous"},
        *({"weight_dtype": each} for each in QUANTISED_DTYPES),
    ]:
        fields = {"model": DemoModel(), "offload": LayerStreaming(), **changes}
        with refused(ValidationError, "offload stream runs with fp32, bf16 or fp16", changes):
            GenerateSpec.model_validate(fields)

    spec = GenerateSpec(model=DemoModel(), offload=MappedWeights(memory_bytes=5))
    assert GenerateSpec.model_validate(json.loads(spec.model_dump_json())) == spec


def test_what_a_gpu_does_not_hold_stays_in_host_memory_before_the_disk(monkeypatch):
    model = fresh_model(TINY_CONFIG, torch.float32)
    size = sum(each.nbytes for each in model.parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    places = {}
    for free in (10 * size, 0):
        monkeypatch.setattr(placement, "free_host_bytes", lambda free=free: free)
        room = placement.max_memory_of_device_map(size // 2)
        places[free] = set(infer_auto_device_map(model, room).values())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert places == {10 * size: {0, "cpu"}, 0: {0, "disk"}}
    assert placement.max_memory_of_device_map(size) == {"cpu": size}


# Experts that come when they are asked for write what experts in memory write.

CPU = torch.device("cpu")
SPARSE = {**TINY_CONFIG, "num_hidden_layers": 3, "num_experts_per_tok": 2}
MIXTRAL = {**SPARSE, "model_type": "mixtral", "num_local_experts": 8}
QWEN = {**SPARSE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32}
OLMOE = {**SPARSE, "model_type": "olmoe", "num_experts": 8}
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
def test_every_kind_of_sparse_model_writes_the_same_from_a_small_cache(tmp_path):
    for config in (MIXTRAL, QWEN, OLMOE):
        folder = folder_of(tmp_path / config["model_type"], config)
        wanted = run_batch(load_folder(folder, "fp32", CPU), PROMPTS, AnswerLimits(12)).answers
        found = run_batch(
            cached(folder, experts_resident=1).model, PROMPTS, AnswerLimits(12)
        ).answers
        assert found == wanted, config


def test_more_room_hits_more_often_and_brings_less(mixtral):
    figures = []
    for resident in (2, 4, 8):
        one = cached(mixtral, experts_resident=resident, guessed_experts=0)
        run_batch(one.model, [[5, 7, 11]], AnswerLimits(20))
        figures.append(one.cache.figures.result_metrics())

    ratios = [each["expert_hit_ratio"] for each in figures]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1]
    assert figures[-1]["experts_brought"] <= 3 * 8 < figures[0]["experts_brought"]


def test_guesses_and_experts_take_nothing_from_the_models_own(mixtral):
    hits = []
    for max_prefetched in (0, 8):
        one = cached(mixtral, experts_resident=2, guessed_experts=max_prefetched)
        run_batch(one.model, [[5, 7, 11]], AnswerLimits(20))
        hits.append(one.cache.figures.hits)
    assert hits[0] == hits[1]
    whole = held_bytes(load_folder(mixtral, "fp32", CPU))
    assert held_bytes(cached(mixtral).model) == whole - 3 * 8 * EXPERT_BYTES


def shelf_of(resident: int, max_prefetched: int, fetched: list) -> DeviceExperts:
    def fetch(layer: int, expert: int) -> Expert:
        fetched.append((layer, expert))
        return Expert(torch.ones(1), torch.ones(1))

    return DeviceExperts(fetch, resident, max_prefetched)


def test_the_expert_that_was_not_used_for_longest_goes():
    fetched = []
    shelf = shelf_of(2, 0, fetched)
    for expert in (0, 1, 0, 2, 0, 1):
        shelf.take(0, expert)
    assert fetched == [(0, 0), (0, 1), (0, 2), (0, 1)]
    assert (shelf.figures.hits, shelf.figures.requests) == (2, 6)


def test_a_right_guess_is_not_brought_again():
    fetched = []
    shelf = shelf_of(1, 2, fetched)
    shelf.prefetch(1, [4, 5, 6])
    shelf.take(1, 5)
    assert sorted(fetched) in ([(1, 5)], [(1, 4), (1, 5)])
    assert (shelf.figures.prefetched, shelf.figures.prefetch_hits) == (2, 1)


def test_a_guess_that_was_never_begun_with_counts_as_not_brought():
    gate = threading.Event()

    def fetch(_layer: int, _expert: int) -> Expert:
        gate.wait(120)
        return Expert(torch.ones(1), torch.ones(1))

    shelf = DeviceExperts(fetch, 1, 3)
    shelf.prefetch(1, [0, 1, 2])
    shelf.prefetch(2, [])
    gate.set()

    assert shelf.figures.prefetched == 3
    assert shelf.figures.brought <= 1


def test_experts_that_are_not_there_or_lack_a_router_are_refused(mixtral, tmp_path):
    with pytest.raises(BadInputError, match="experts_resident is 9; a layer has 8 experts"):
        cached(mixtral, experts_resident=9)
    folder = folder_of(tmp_path / "dense", TINY_CONFIG)
    with pytest.raises(BadInputError, match="no experts that could be cached; stream its layers"):
        cached(folder)

    tensors = load_file(mixtral / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((mixtral / "config.json").read_bytes())
    with pytest.raises(BadInputError, match=r"they lack model\.layers\.2\.mlp\.gate\.weight"):
        cached(tmp_path)


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
