"""The training step's physics: the busiest stage, operands, rings through nodes, misfit heads."""

import pytest

from planner.catalog.engines import get_engine
from planner.catalog.models import get_model
from planner.cost.communication import pace_of
from planner.cost.quantity import Ledger
from planner.cost.training import (
    exposed_seconds,
    operand_elements_per_token,
    tax_seconds,
)
from planner.fitting.evidence import (
    RELEASED,
    latest,
    num_unscored_rows,
    table,
    training_request,
    usable,
)
from planner.specs.estimate import EstimateRequest
from planner.workload.resolve import resolve
from planner.workload.topology import ring_link
from planner.workload.train import train
from planner.workload.training_exchange import ALL_PASSES, FLASH_1_SLOWDOWN
from tests.planner.asking import LLAMA_8B, LLAMA_70B, MIXTRAL, TRAIN, ask, document

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


def test_the_busiest_stage_is_that_of_the_head_the_middle_or_all():
    assert pace_of(8, 4, 1.0, 0.0).even_stages == 4
    pace = pace_of(8, 4, 1.0, 6.0)
    assert (pace.layers, pace.heads) == (2, 1)
    assert pace.even_stages == 14 / 8
    pace = pace_of(10, 4, 1.0, 0.5)
    assert (pace.layers, pace.heads) == (3, 0)
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
    operands, products = (
        "Operands of products",
        "Matrix products: forward, backward, recomputation",
    )
    share = [
        term(operands, devices=8, strategy=strategy) / term(products, devices=8, strategy=strategy)
        for strategy in ({"tensor_parallel_size": 1}, {"tensor_parallel_size": 8})
    ]

    assert share[1] > 1.5 * share[0]


def test_operands_are_every_matrixs_and_small_micro_batches_read_them_more_often():
    model = get_model(LLAMA_8B)
    attention = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    assert operand_elements_per_token(model, 1) == 4 * model.hidden_size + attention + (
        3 * model.intermediate_size
    )

    small, large = (
        ask(workload=PRETRAIN, engine="megatron", strategy={"micro_batch_size": size})
        for size in (1, 8)
    )
    assert small.performance.step_seconds > large.performance.step_seconds


def test_a_ring_is_no_faster_than_its_links_and_the_tax_is_on_what_is_hidden():
    setting = setting_of(8, nodes=4)
    rates = setting.rates
    alone, together = (ring_link(setting, rates, 32, stride) for stride in (8, 1))
    assert together == 8 * alone
    assert alone == rates.inter_node_bytes_per_s
    assert ring_link(setting, rates, 8, 1) == rates.link_bytes_per_s
    assert ring_link(setting, rates, 32, 1 / 1000) == rates.link_bytes_per_s

    for links, window, tax in ((2.0, 10.0, 0.2), (12.0, 10.0, 1.0)):
        assert tax_seconds(links_s=links, window_s=window, tax_ratio=0.1) == pytest.approx(tax)
        whole = exposed_seconds(links_s=links, window_s=window, tax_ratio=0.1)
        bare = exposed_seconds(links_s=links, window_s=window, tax_ratio=0.0)
        assert whole == pytest.approx(bare + tax), (links, window, tax)


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


def test_the_latest_of_several_releases_counts_and_older_ones_are_superseded():
    rows = table("training")
    kept = latest(rows)
    bridge = [row for row in kept if row["source_id"] == "megatron-bridge"]
    assert len(bridge) < sum(row["source_id"] == "megatron-bridge" for row in rows)
    assert [row for row in kept if row["source_id"] == "aleph-alpha"] == [
        row for row in rows if row["source_id"] == "aleph-alpha"
    ]

    old, new = "release 25.09 NeMo", "release 26.04.01 NeMo"
    base = dict.fromkeys((*RELEASED, "row_id", "notes", "tp"), "")
    rows = [
        {**base, "row_id": "1", "tp": "2", "notes": old},
        {**base, "row_id": "2", "tp": "4", "notes": new},
        {**base, "row_id": "3", "gpu": "another", "notes": old},
    ]
    assert [row["row_id"] for row in latest(rows)] == ["2", "3"]


def test_attention_and_the_vocabulary_keep_16_bits_where_products_are_narrow():
    kept = ("Attention", "Products with the vocabulary")
    wide, narrow = ({"compute_dtype": dtype} for dtype in ("bf16", "fp8"))
    seconds = [
        {name: term(f"{name}{ALL_PASSES}", strategy=how, device="h100-sxm-80gb") for name in kept}
        for how in (wide, narrow)
    ]

    assert seconds[0] == seconds[1]
    products = [
        setting_of(8, strategy=how, engine="megatron").rates.peak_flops_per_s
        for how in (wide, narrow)
    ]
    assert products[1] >= products[0]


def test_narrow_products_pay_for_casting_their_operands():
    name = "Casting to narrow formats"
    fp8 = {"compute_dtype": "fp8"}
    whole, split = (
        term(name, devices=8, strategy={**fp8, "tensor_parallel_size": tensor})
        for tensor in (1, 2)
    )
    assert term(name, strategy={"compute_dtype": "bf16"}) == 0.0
    assert whole > split > whole / 2


def test_older_kernels_repeated_layers_adapters_and_experts_take_their_time():
    name = f"Attention{ALL_PASSES}"
    second, first = (
        term(name, strategy={"attention_kernel": kernel}) for kernel in (None, "flash_1")
    )
    assert first == pytest.approx(FLASH_1_SLOWDOWN * second)

    eager = {"attention": "eager"}
    fused, single = (
        term("Scores through memory", strategy={**eager, "attention_kernel": kernel})
        for kernel in (None, "single_operators")
    )
    assert single == pytest.approx(2 * fused)

    name, layout = "Tensor-parallel all-reduces", {"tensor_parallel_size": 8}
    once, again = (
        term(name, devices=8, strategy={**layout, "activation_recomputation": how})
        for how in ("none", "full")
    )
    assert again == pytest.approx(1.5 * once)

    name = "Norms, activations, residuals, loss"
    full, adapted = (
        term(name, workload={**PRETRAIN, "method": method}) for method in ("full", "lora")
    )
    assert adapted > 1.2 * full

    name = "Sorting tokens by expert"
    assert term(name) == 0.0
    assert term(name, model=MIXTRAL) > 0.0


def test_experts_on_more_ranks_leave_fewer_gradients_to_each():
    """Eight ranks with an expert each have no copies: only what all share is summed."""
    together, apart = (
        term(
            "Data-parallel communication",
            model=MIXTRAL,
            devices=8,
            strategy={"expert_parallel_size": ranks, "zero_stage": 1},
        )
        for ranks in (1, 8)
    )

    assert apart < together / 8


def test_rings_over_more_nodes_take_more_rounds_and_buckets_grow_with_the_ranks():
    def rounds(nodes, stage):
        setting = setting_of(8, nodes, engine="internevo", strategy={"zero_stage": stage})
        ledger = Ledger()
        train(setting, setting.workload, ledger)
        return sum(e.value for e in ledger.entries if e.name == "Rounds of rings")

    assert rounds(8, 1) >= 1.9 * rounds(4, 1) > 0
    assert rounds(4, 3) == 0.0  # beside the work of every micro-batch

    engine = get_engine("megatron", "gpu")
    for ranks, filled in ((8, 160e6), (256, 1024e6)):
        assert max(engine.bucket_bytes, engine.bucket_bytes_per_rank * ranks) == filled
        assert get_engine("llm_foundry", "gpu").bucket_bytes == 25e6, (ranks, filled)


def test_a_pipeline_hides_no_exchange_of_whole_gradients():
    """One stage works on its last micro-batch meanwhile; stages of a pipeline are through."""

    def hidden(stages, stage):
        strategy = {"pipeline_parallel_size": stages, "zero_stage": stage}
        answer = ask(
            devices=8, model=LLAMA_70B, workload=PRETRAIN, strategy=strategy, engine="megatron"
        )
        named = [t for t in answer.terms if t.name == "Work that an exchange slows"]
        return sum(t.value for t in named)

    assert hidden(1, 1) > 0.0
    assert hidden(2, 1) == 0.0
    assert hidden(2, 2) > 0.0


def printed_flops(row):
    """Return NeMo's count: 6 a weight and token, and attention to all tokens, masked or not."""
    setting = resolve(EstimateRequest.model_validate(training_request(row)))
    model, length = setting.model, int(row["sequence_length"])
    weights = setting.counts.layer_linear + model.vocab_size * model.hidden_size
    width = model.num_hidden_layers * model.num_attention_heads * model.head_dim
    return (6 * weights + 12 * width * length) * int(row["global_batch_size"]) * length


def rows_of(source):
    return [row for row in table("training") if row["source_id"] == source]


def test_printed_flops_per_second_give_the_step_that_the_table_holds():
    """The first source prints both: its rows show the formula that the others leave unsaid."""
    for source in ("nemo-24.07", "nemo-longseq", "maxtext-a3"):
        held = [
            row for row in rows_of(source) if row["step_seconds"] and row["method"] == "pretrain"
        ]
        for row in held:
            rate = float(row["tflops_per_gpu"]) * 1e12 * int(row["num_gpus"])
            assert float(row["step_seconds"]) == pytest.approx(
                printed_flops(row) / rate, rel=0.002
            )
        assert len(held) >= 5, source


def test_shards_are_read_from_a_rows_words_and_every_row_is_scored_or_says_why_not():
    asked = [training_request(row)["strategy"]["zero_shard_size"] for row in rows_of("maxtext-a3")]
    assert asked == [8] * 5
    rows = table("training")
    scored = [row for row in usable(latest(rows)) if row["step_seconds"]]
    assert sum(num_unscored_rows(rows).values()) + len(scored) == len(rows)
    assert list(num_unscored_rows(rows).values()) == [120, 8, 12]


def test_quantised_weights_of_an_eager_runner_take_operators_of_their_own():
    tuned = {**PRETRAIN, "method": "qlora"}
    issued = [
        sum(
            t.value
            for t in ask(workload=tuned, engine=None, strategy=how).terms
            if t.name == "Kernel launches"
        )
        for how in ({"weight_dtype": "nf4"}, {"weight_dtype": "bf16"})
    ]

    assert issued[0] > issued[1] > 0.0
