"""Choices of a training: attention by blocks, checkpoints beside the steps, messages seen."""

import pytest

from planner.api import estimate, plan
from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from planner.specs.base import NotCoveredError, NotPossibleError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.training_exchange import ALL_PASSES, FLEX_BLOCK_TOKENS
from planner.workload.training_memory import MESSAGES_LOOK_BYTES
from tests.planner.asking import CPU, GENERATE, SERVE, TINY, TRAIN, ask, document, search

LONG = {**TRAIN, "sequence_length": 8192, "method": "pretrain"}
SMALL = {"model": "HuggingFaceTB/SmolLM2-135M", "workload": LONG}
SECONDS = f"Attention{ALL_PASSES}"


def answered(strategy, **workload):
    return ask(**{**SMALL, "workload": {**LONG, **workload}}, strategy=strategy)


def term(answer, name):
    return next((each.value for each in answer.terms if each.name == name), None)


def test_rows_of_one_document_take_a_little_more_than_the_triangle():
    flash, flex = (answered({"attention": way}) for way in ("flash", "flex"))
    more = term(flex, SECONDS) / term(flash, SECONDS)
    assert more == pytest.approx(1 + FLEX_BLOCK_TOKENS / 8192, rel=1e-3)
    assert flex.memory == flash.memory
    pairs = next(each for each in flex.terms if each.name == "Pairs in the blocks of a row")
    assert pairs.value == FLEX_BLOCK_TOKENS**2 * 64 * 65 / 2
    assert "arXiv:2412.05496" in pairs.source
    assert term(flash, pairs.name) is None


def test_blocks_between_packed_documents_are_left_out_and_no_others():
    packed = {"attention": "flex", "packed": True}
    whole = term(answered(packed), SECONDS)
    short, longer = (
        term(answered(packed, document_tokens=tokens), SECONDS) for tokens in (512, 2048)
    )
    assert short < longer / 2 < whole / 4
    assert term(answered({**packed, "packed": False}, document_tokens=512), SECONDS) == whole
    assert term(answered(packed, document_tokens=9000), SECONDS) == whole
    flash = {"attention": "flash", "packed": True}
    assert term(answered(flash, document_tokens=512), SECONDS) == term(answered(flash), SECONDS)


def test_a_window_leaves_blocks_out_of_its_layers_alone():
    model = {
        "model_type": "mistral", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 32000, "max_position_embeddings": 32768,
    }  # fmt: skip
    flex = {"attention": "flex"}
    wide, narrow = (
        ask(workload=LONG, strategy=flex, model={**model, "sliding_window": window})
        for window in (None, 1024)
    )
    assert term(narrow, SECONDS) < 0.4 * term(wide, SECONDS)


def test_what_cannot_attend_by_blocks_is_refused_by_name_at_both_doors():
    for changes, words in [
        ({"device": CPU, "devices": 1}, "no backward pass of FlexAttention on this-host"),
        ({"strategy": {"context_parallel_size": 2}}, "attend in ways of their own"),
        ({"strategy": {"tensor_parallel_size": 2}}, "attend in ways of their own"),
        ({"strategy": {"pipeline_parallel_size": 2}}, "attend in ways of their own"),
        ({"engine": "megatron"}, "our own runner trains: Megatron-LM does not train so"),
        ({"workload": SERVE}, "does not serve so; choose flash"),
        ({"workload": GENERATE}, "does not serve so; choose flash"),
    ]:
        fields = {"model": TINY, "workload": LONG, "devices": 2, **changes}
        strategy = {"attention": "flex", **fields.pop("strategy", {})}
        with pytest.raises(NotPossibleError, match=words) as caught:
            ask(**fields, strategy=strategy)
        assert caught.value.field == "strategy.attention"
        with pytest.raises(NotPossibleError, match=words):
            plan(PlanRequest.model_validate(document(**fields, pins=strategy)))


def test_a_search_takes_it_when_it_is_pinned_and_never_else():
    fields = {**SMALL, "devices": 4, "top": 50}
    pinned = search(**fields, pins={"attention": "flex"}).plans
    usual = search(**fields).plans
    assert pinned
    assert {each.strategy.attention for each in pinned} == {"flex"}
    assert {each.strategy.attention for each in usual} == {"flash"}
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    assert {getattr(each.strategy, name) or 1 for each in pinned for name in sizes} == {1}
    assert any("costed at the rate of flash kernels" in said for said in pinned[0].warnings)


MODEL = "HuggingFaceTB/SmolLM2-135M"
PARAMETERS = count_parameters(get_model(MODEL)).total
TERM = "Checkpoint copy in host memory"
WIDE = {"weight_dtype": "fp32", "compute_dtype": "bf16"}
BESIDE, IN_STEP = {"checkpoint_writing": "background"}, {"checkpoint_writing": "in_step"}


def held(strategy=None, **fields):
    fields = {"model": MODEL, "workload": TRAIN, **fields}
    return ask(**fields, strategy={**WIDE, **(strategy or {})})


def test_on_a_gpu_the_copy_of_weights_and_states_lies_in_host_memory():
    for optimizer, each in [("adamw", 12), ("adamw_8bit", 6), ("lion", 8), ("adafactor", 4)]:
        workload = {**TRAIN, "optimizer": optimizer}
        usual, waits = held(workload=workload), held(IN_STEP, workload=workload)
        assert usual.memory.host_bytes == pytest.approx(each * PARAMETERS)
        assert waits.memory.host_bytes is None
        assert usual.memory.breakdown_bytes == waits.memory.breakdown_bytes
        (term,) = (one for one in usual.terms if one.name == TERM)
        assert (term.unit, term.equation) == ("B", "C = n · (B_w + B_s) · (p + g)")
        assert "CheckFreq" in term.source
        assert [one.value for one in term.inputs] == [PARAMETERS, 4, each - 4, 1, 0]


def test_parts_of_ranks_are_gathered_beside_them_and_whole_copies_are_copied_once():
    copies, shards = (
        held({"data_parallel_size": 4, "zero_stage": stage}, devices=4).memory.host_bytes
        for stage in (0, 2)
    )
    assert (copies, shards) == (12 * PARAMETERS, 2 * 12 * PARAMETERS)


def test_an_adapters_copy_is_the_adapters_alone():
    lora = held(workload={**TRAIN, "method": "lora", "lora_rank": 8})
    (term,) = (one for one in lora.terms if one.name == TERM)
    assert 0 < lora.memory.host_bytes < 0.25 * PARAMETERS
    assert term.inputs[1].value == 4  # adapters learn in fp32


def test_on_a_processor_it_lies_beside_the_states_and_only_where_it_is_chosen():
    for ranks, stage, share in [(1, 0, 1), (2, 0, 1), (2, 3, 1.5), (4, 1, 1.25)]:
        layout = {"data_parallel_size": ranks, "zero_stage": stage}
        usual, waits, beside = (
            held({**layout, **how}, device=CPU, devices=ranks, model=TINY).memory
            for how in ({}, IN_STEP, BESIDE)
        )
        whole = next(
            one.inputs[0].value
            for one in held({**layout, **BESIDE}, device=CPU, devices=ranks, model=TINY).terms
            if one.name == TERM
        )

        assert usual == waits
        assert beside.host_bytes is None
        more = beside.per_device_peak_bytes - usual.per_device_peak_bytes
        assert more == pytest.approx(12 * whole * share, rel=0.01)


def test_engines_of_others_copy_where_it_is_asked_and_states_on_disk_never():
    for engine in ["megatron", "deepspeed"]:
        usual, asked = (held(how, engine=engine).memory.host_bytes for how in ({}, BESIDE))
        away = held({**BESIDE, "offload": {"optimizer": "nvme"}}, engine=engine)
        assert usual is None
        assert asked > 8 * PARAMETERS
        assert not any(one.name == TERM for one in away.terms)


def test_a_host_too_small_for_the_copy_is_warned_of():
    asked = document(model=MODEL, workload=TRAIN, strategy=WIDE)
    asked["cluster"]["host_memory_bytes"] = 2**30
    found = estimate(EstimateRequest.model_validate(asked))
    said = f"what is offloaded needs {12 * PARAMETERS / 2**30:.1f} GiB of host memory"
    assert any(warning.startswith(said) for warning in found.warnings)


def test_a_search_counts_what_is_pinned_and_serving_knows_no_checkpoints():
    fields = {"model": TINY, "device": CPU, "workload": TRAIN}
    best = {
        how: plan(PlanRequest.model_validate(document(**fields, pins={"checkpoint_writing": how})))
        for how in ("in_step", "background")
    }
    peaks = {how: found.plans[0].memory.per_device_peak_bytes for how, found in best.items()}
    assert peaks["background"] > peaks["in_step"]
    assert best["background"].plans[0].strategy.checkpoint_writing == "background"
    with pytest.raises(NotCoveredError, match="checkpoints, which training writes; leave it out"):
        ask(workload=SERVE, strategy=BESIDE)


def overhead(count, strategy, **fields):
    asked = {"device": CPU, "model": TINY, "workload": TRAIN, **fields}
    found = ask(**asked, devices=count, strategy={"weight_dtype": "fp32", **strategy})
    return found.memory.breakdown_bytes["runtime_overhead"]


def test_the_first_of_several_ranks_on_processors_looks():
    for strategy in [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}]:
        assert overhead(2, strategy) == overhead(1, {}) + MESSAGES_LOOK_BYTES


def test_gpus_and_engines_of_others_hold_no_more_of_it():
    for fields in [{"device": "rtx-4090"}, {"engine": "deepspeed"}]:
        pair = {"data_parallel_size": 2, "zero_stage": 1}
        assert overhead(2, pair, **fields) == overhead(1, {}, **fields)
