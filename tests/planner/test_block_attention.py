"""Attention by blocks: what it costs, who may take it, and that nobody is given it unasked."""

import pytest

from planner.api import plan
from planner.errors import NotPossibleError
from planner.specs.estimate import PlanRequest
from planner.workload.training_kernels import ALL_PASSES, FLEX_BLOCK_TOKENS
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": CPU, "devices": 1}, "no backward pass of FlexAttention on this-host"),
        ({"strategy": {"context_parallel_size": 2}}, "attend in ways of their own"),
        ({"strategy": {"tensor_parallel_size": 2}}, "attend in ways of their own"),
        ({"strategy": {"pipeline_parallel_size": 2}}, "attend in ways of their own"),
        ({"engine": "megatron"}, "our own runner trains: Megatron-LM does not train so"),
        ({"workload": SERVE}, "does not serve so; choose flash"),
        ({"workload": GENERATE}, "does not serve so; choose flash"),
    ],
)
def test_what_cannot_attend_by_blocks_is_refused_by_name_at_both_doors(changes, words):
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
