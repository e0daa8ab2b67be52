"""The training step's physics: the busiest stage, operands, rings through nodes, misfit heads."""

import pytest

from planner.catalog.models import get_model
from planner.cost.activations import operand_width
from planner.cost.stages import pace_of
from planner.cost.training_step import exposed_seconds, tax_seconds
from planner.evidence import SUPERSEDED, latest, table
from planner.factors import current, step_cases
from planner.specs.estimate import EstimateRequest
from planner.workload.resolve import resolve
from planner.workload.setting import rates_of
from planner.workload.training_exchange import ring_link
from tests.planner.asking import LLAMA_8B, LLAMA_70B, TRAIN, ask, document

PRETRAIN = {**TRAIN, "method": "pretrain", "global_batch_size": 64}
GPT = {
    "model_type": "gpt2",
    "hidden_size": 1200,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
}


def term(name, **fields):
    asked = {"workload": PRETRAIN, "engine": "megatron", **fields}
    return sum(t.value for t in ask(**asked).terms if t.name == name)


def setting_of(devices_per_node, nodes=1, **fields):
    cluster = {
        "device": "a100-sxm-80gb",
        "devices_per_node": devices_per_node,
        "nodes": nodes,
        "inter_node_bandwidth_bytes_per_second": 1e9,
    }
    asked = document(workload=PRETRAIN, **fields)
    return resolve(EstimateRequest.model_validate({**asked, "cluster": cluster}))


def test_alike_stages_set_the_pace_together():
    assert pace_of(8, 4, 1.0, 0.0).even_stages == 4


def test_a_heavy_head_makes_the_last_stage_the_slowest():
    pace = pace_of(8, 4, 1.0, 6.0)

    assert (pace.layers, pace.heads) == (2, 1)
    assert pace.even_stages == 14 / 8


def test_left_over_layers_make_a_middle_stage_the_slowest():
    pace = pace_of(10, 4, 1.0, 0.5)

    assert (pace.layers, pace.heads) == (3, 0)


def test_one_stage_holds_everything():
    pace = pace_of(8, 1, 1.0, 2.0)

    assert (pace.layers, pace.heads, pace.even_stages) == (8, 1, 1.0)


def test_a_large_vocabulary_slows_a_deep_pipeline_more_than_its_share():
    deep = {"pipeline_parallel_size": 8, "micro_batch_size": 1}
    small, large = (
        ask(
            devices=8,
            model={**GPT, "vocab_size": vocabulary},
            workload=PRETRAIN,
            strategy=deep,
            engine="megatron",
        ).performance
        for vocabulary in (50304, 503040)
    )

    assert large.step_seconds > 2 * small.step_seconds


def test_narrow_products_move_more_bytes_per_flop():
    operands, products = "Operands of products", "Forward, backward, recomputation"
    share = [
        term(operands, devices=8, strategy=strategy) / term(products, devices=8, strategy=strategy)
        for strategy in ({"tensor_parallel_size": 1}, {"tensor_parallel_size": 8})
    ]

    assert share[1] > 1.5 * share[0]


def test_a_layers_operands_are_every_matrixs_input_and_output():
    model = get_model(LLAMA_8B)
    attention = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim

    assert operand_width(model, 1) == 4 * model.hidden_size + attention + (
        3 * model.intermediate_size
    )


def test_small_micro_batches_read_the_weights_more_often():
    small, large = (
        ask(workload=PRETRAIN, engine="megatron", strategy={"micro_batch_size": size})
        for size in (1, 8)
    )

    assert small.performance.step_seconds > large.performance.step_seconds


def test_a_ring_shares_the_ports_of_its_members_in_a_node():
    setting = setting_of(8, nodes=4)
    rates = rates_of(setting)
    alone, together = (ring_link(setting, rates, 32, stride) for stride in (8, 1))

    assert together == 8 * alone
    assert alone == rates.inter_node_bytes_per_s


def test_a_ring_is_never_faster_than_the_links_inside_a_node():
    setting = setting_of(8, nodes=4)
    rates = rates_of(setting)

    assert ring_link(setting, rates, 8, 1) == rates.link_bytes_per_s
    assert ring_link(setting, rates, 32, 1 / 1000) == rates.link_bytes_per_s


@pytest.mark.parametrize(("links", "window", "tax"), [(2.0, 10.0, 0.2), (12.0, 10.0, 1.0)])
def test_the_tax_is_on_what_is_hidden(links, window, tax):
    assert tax_seconds(links_s=links, window_s=window, tax_ratio=0.1) == pytest.approx(tax)
    whole = exposed_seconds(links_s=links, window_s=window, tax_ratio=0.1)
    bare = exposed_seconds(links_s=links, window_s=window, tax_ratio=0.0)
    assert whole == pytest.approx(bare + tax)


def test_whole_gradients_hide_behind_the_last_micro_batch_alone():
    sticking_out = [
        term("Exchange that work does not hide", **many)
        for many in (
            {"devices": 8, "strategy": {"zero_stage": 1, "micro_batch_size": size}}
            for size in (8, 1)
        )
    ]

    assert sticking_out[1] > sticking_out[0]


def test_heads_that_tensor_cores_cannot_load_slow_unfused_attention():
    slow, fast, fused = (
        term(
            "Attention: forward, backward, recomputation",
            model={**GPT, "num_attention_heads": heads},
            strategy={"attention": kernel},
        )
        for heads, kernel in ((8, "eager"), (6, "eager"), (8, "flash"))
    )

    assert slow == pytest.approx(8 * fast)
    assert fused < slow / 8


def test_norms_in_single_operators_take_time():
    name = "Norms, activations, residuals, loss"

    assert term(name, strategy={"fused_norms": False}) > 2 * term(name)


def test_the_bubble_counts_stages_as_busy_as_the_busiest():
    answer = ask(
        devices=8,
        model=LLAMA_70B,
        workload={**PRETRAIN, "global_batch_size": 8},
        strategy={"pipeline_parallel_size": 8, "micro_batch_size": 1},
        engine="megatron",
    )

    assert answer.performance.bubble_ratio < 7 / 15


def test_of_several_releases_the_latest_counts():
    rows = table("training")
    kept = latest(rows)
    bridge = [row for row in kept if row["source_id"] == "megatron-bridge"]

    assert len(bridge) < sum(row["source_id"] == "megatron-bridge" for row in rows)
    assert [row for row in kept if row["source_id"] == "aleph-alpha"] == [
        row for row in rows if row["source_id"] == "aleph-alpha"
    ]


def test_an_engine_follows_its_newest_code_where_there_is_any():
    megatron = [case for case in step_cases() if case.engine == "megatron"]
    old = [case for case in megatron if case.source in SUPERSEDED]

    assert not SUPERSEDED & {case.source for case in current(megatron)}
    assert current(old) == old
