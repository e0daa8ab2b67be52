"""What a tool around an engine holds while it trains: on the engine's physics, in its own way."""

from dataclasses import replace

import numpy as np
import pytest

from planner.catalog.devices import get_device
from planner.catalog.engines import get_engine, wrapped_engine
from planner.catalog.models import get_model
from planner.cost.memory import StageMemory
from planner.cost.quantity import NullLedger
from planner.cost.training import (
    every_second_product_elements,
    every_second_product_share,
    residuals_of_every_second_product,
)
from planner.fitting.evidence import HARNESSES, strategy_of, table, usable
from planner.fitting.left_out import PEAK, LeftOut, left_out_peaks, model_of, spread_of
from planner.fitting.published_speeds import MEMORY_INPUTS
from planner.fitting.serving_factors import SEEN
from planner.fitting.step_fitting import (
    GIB,
    NAMES,
    PRIORS,
    QUANTISED,
    MemoryCase,
    bare_factors,
    factors_of,
    fields_of,
    fit_common,
    fit_memory,
    fitted_memory,
    memory_case,
    stage_peaks,
)
from planner.specs.base import PlannerError
from planner.specs.estimate import EstimateRequest
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve
from planner.workload.training_memory import (
    StageActivations,
    stage_moments,
    with_spare_blocks_freed,
    without_spare_blocks,
)
from tests.planner.asking import ask, document

TUNE = {"kind": "train", "sequence_length": 2048, "global_batch_size": 2, "method": "lora"}
LLAMA = "meta-llama/Llama-2-7b-hf"
LOSS = NAMES.index("loss_ratio")


def setting_of(engine="transformers", devices=1, model=LLAMA, workload=TUNE, **fields):
    strategy = {"activation_recomputation": "full", "micro_batch_size": 1, **fields}
    asked = document(
        model=model, engine=engine, devices=devices, workload=workload, strategy=strategy
    )
    return resolve(EstimateRequest.model_validate(asked))


def with_engine(setting, **fields):
    return replace(setting, engine=setting.engine.model_copy(update=fields))


def case(model="m", engine="ms_swift", size=10.0, measured=40.0, **fields):
    """Return a row whose logits take some gibibytes beside ten of weights."""
    slopes = np.zeros((1, len(NAMES)))
    slopes[0, LOSS] = size * GIB
    told = {"usable_bytes": 80 * GIB, "source": engine, **fields}
    return MemoryCase(
        row_id=model,
        engine=engine,
        group=f"{engine}/{model}",
        base_bytes=np.array([10 * GIB]),
        slopes=slopes,
        measured_bytes=measured * GIB,
        **told,
    )


def test_a_tool_has_its_engines_figures_and_a_row_its_tools_weights():
    for tool in sorted(set(HARNESSES.values())):
        own, below = get_engine(tool, "gpu"), get_engine("transformers", "gpu")
        assert wrapped_engine(tool) == "transformers", tool
        assert (own.ops_per_layer, own.master_weights) == (
            below.ops_per_layer,
            below.master_weights,
        )
        assert own.title != below.title, tool

    rows = {row["source_id"]: row for row in usable(table("memory"))}
    assert memory_case(rows["ms-swift"]).engine == "ms_swift"
    assert memory_case(rows["litgpt-config-hub"]).engine == "litgpt"
    row = next(r for r in table("memory") if r["quantization"] == "gptq-int8")
    assert strategy_of(row)["quantization"] == "gptq-int8"


def test_tools_without_rows_take_what_the_others_have_in_common():
    others = [case(model=m, measured=10 + 3 * 10.0 + 1) for m in "abcdef"]
    assert fit_common(others, "peft") is not None
    assert list(fitted_memory(others, "peft")) == list(fit_common(others, "peft"))
    assert fit_common([case(), case(engine="litgpt")], "litgpt") is None

    rows = [case(model=m, size=4.0, measured=10 + 4 * 3.0 + 1) for m in "ab"]
    common, own = fit_common(rows, "ms_swift"), fit_memory(rows)
    assert abs(common[LOSS] - 1) <= abs(own[LOSS] - 1)

    rows = [case(model="a"), case(model="b", engine="peft")]
    found, _ = left_out_peaks(rows, model_of, SEEN)
    assert {row.engine for row in found} == {"ms_swift", "peft"}


def test_a_peak_is_foreseen_as_its_source_counts_it():
    """Allocators count no context; what they handed out holds no spare block either."""
    for source, counted in (
        ("litgpt-config-hub", {"training_overhead_bytes": False, "unfilled_ratio": False}),
        ("ms-swift", {"training_overhead_bytes": False, "unfilled_ratio": True}),
        ("qwen-finetune", {"training_overhead_bytes": True, "unfilled_ratio": True}),
    ):
        row = next(row for row in usable(table("memory")) if row["source_id"] == source)
        slopes = dict(zip(NAMES, memory_case(row).slopes.T, strict=True))
        assert {name: bool(slopes[name].any()) for name in counted} == counted, (source, counted)


def test_verdicts_fields_and_quantised_rows_are_taken_as_they_are():
    row = next(row for row in usable(table("memory_fit")) if row["source_id"] == "ms-swift")
    slopes = dict(zip(NAMES, memory_case(row).slopes.T, strict=True))
    assert set(slopes["training_overhead_bytes"]) == {1.0}
    factors = PRIORS + np.arange(1, len(NAMES) + 1) / 10
    assert factors_of(fields_of(factors)) == pytest.approx(factors)
    fields = fields_of(PRIORS)
    assert [fields[ratio] for _, ratio in QUANTISED.values()] == [1.0, 1.0]


def test_a_shown_peak_never_exceeds_what_the_allocator_may_fill():
    one = case(size=30.0, usable_bytes=60 * GIB, returns_blocks=True)
    thrice = PRIORS.copy()
    thrice[LOSS] = 3.0
    assert one.peak_bytes(thrice) == 60 * GIB
    assert replace(one, returns_blocks=False).peak_bytes(thrice) > 60 * GIB


def test_tensors_and_logits_are_held_once_and_spare_blocks_below_the_limit_kept():
    one = case(size=100.0, usable_bytes=60 * GIB, returns_blocks=True)
    thrice = PRIORS.copy()
    thrice[LOSS] = 3.0
    assert one.peak_bytes(thrice) == pytest.approx(110 * GIB, rel=0.02)

    generous = bare_factors(PRIORS * 4)
    assert generous[LOSS] == 1.0
    assert generous[NAMES.index("unfilled_ratio")] == 0.0

    setting = setting_of()
    shown, bare = StageMemory({"activations": 2.0}), StageMemory({"activations": 1.0})
    assert with_spare_blocks_freed(setting, shown, bare).by_class == shown.by_class

    setting = with_engine(setting_of(), loss_ratio=3.0, unfilled_ratio=0.2)
    alone = without_spare_blocks(setting).engine
    assert (alone.loss_ratio, alone.unfilled_ratio) == (1.0, 0.0)


def test_spare_blocks_go_as_far_as_the_device_needs_them():
    setting = setting_of()
    limit = usable_bytes(setting)
    shown = StageMemory({"weights": limit / 2, "activations": limit})
    bare = StageMemory({"weights": limit / 2, "activations": limit / 4})
    left = with_spare_blocks_freed(setting, shown, bare)
    assert left.peak_bytes == pytest.approx(limit)
    assert left.by_class["weights"] == limit / 2


def test_unfilled_blocks_grow_with_what_is_held():
    setting = setting_of("megatron")
    plain, loose = (
        stage_peaks(with_engine(setting, unfilled_ratio=share))[2] for share in (0.0, 0.1)
    )
    held = stage_moments(setting, setting.workload)[2].by_class
    states = ("weights", "adapters", "gradients", "optimizer_states")
    assert loose - plain == pytest.approx(0.1 * sum(held[name] for name in states))


def test_the_copies_of_an_update_are_as_wide_as_the_moments():
    full = {**TUNE, "method": "full"}
    setting = with_engine(setting_of("megatron", workload=full), update_copies=1.0)
    narrow = with_engine(
        setting_of("megatron", workload=full, optimizer_dtype="bf16"), update_copies=1.0
    )
    copies = [stage_moments(s, s.workload)[2].by_class["buffers"] for s in (setting, narrow)]
    assert copies == pytest.approx([4 * setting.counts.total, 2 * setting.counts.total])


def test_sharded_weights_are_cast_a_layer_at_a_time():
    full = {**TUNE, "method": "full", "global_batch_size": 8}
    whole, sharded = (
        stage_moments(s, s.workload)[2].by_class["buffers"]
        for s in (
            with_engine(setting_of(workload=full, devices=8, zero_stage=stage), update_copies=0.0)
            for stage in (2, 3)
        )
    )

    assert sharded == pytest.approx(whole * 2 / 32)


def test_an_fp32_sum_of_gradients_may_stand_beside_the_narrow_ones():
    full = {**TUNE, "method": "pretrain"}
    held = [
        stage_moments(s, s.workload)[0].by_class["gradients"]
        for s in (
            setting_of(engine, workload=full, gradient_dtype="fp32")
            for engine in ("megatron_deepspeed", "megatron")
        )
    ]

    assert held[0] / held[1] == pytest.approx(6 / 4)


def test_recomputed_scores_change_no_peak_of_megatron_deepspeed():
    full = {**TUNE, "method": "pretrain"}
    peaks = [
        stage_peaks(with_engine(s, returns_blocks=False)).max()
        for s in (
            setting_of("megatron_deepspeed", workload=full, attention=kind)
            for kind in ("eager", "flash")
        )
    ]

    assert peaks[0] == pytest.approx(peaks[1])


def test_an_fp32_embedding_makes_activations_over_packed_weights_fp32():
    tune = {**TUNE, "lora_targets": "query_value"}
    kept = []
    for method in ("lora", "qlora"):
        setting = setting_of(
            "litgpt", workload={**tune, "method": method}, activation_recomputation="none"
        )
        plain = with_engine(setting, activation_ratio=1.0, loss_ratio=0.0)
        plain = with_engine(plain, quantised_activation_ratio=1.0)
        kept.append(stage_moments(plain, plain.workload)[0].by_class["activations"])

    assert kept[1] / kept[0] == pytest.approx(1.77, abs=0.05)


def test_a_sharded_run_that_holds_all_weights_holds_its_inputs_too():
    moments = []
    for micro in (1, 2):
        workload = {**TUNE, "global_batch_size": 2 * micro}
        setting = setting_of(
            "litgpt", devices=2, workload=workload, zero_stage=3, micro_batch_size=micro
        )
        moments.append(stage_moments(setting, setting.workload)[3].by_class["activations"])

    assert moments[0] == pytest.approx(2048 * 32 * 4096 * 2)
    assert moments[1] == pytest.approx(2 * moments[0])


def test_a_part_of_many_rows_widens_no_more_and_half_of_litgpts_peaks_are_near():
    def row(part, predicted):
        return LeftOut(PEAK, SEEN, "", "e", part, part, 1.0, predicted)

    crowd = [row("a", 1.01)] * 70
    few = [row(part, 1.5) for part in "bcde"]

    assert spread_of([*crowd, *few]) == pytest.approx(np.log(1.5) / 1.2816)

    rows = [row for name in MEMORY_INPUTS for row in usable(table(name))]
    engines = [HARNESSES.get(row["source_id"], row["engine"]) for row in rows]
    own = [memory_case(row) for row, name in zip(rows, engines, strict=True) if name == "litgpt"]
    found, _ = left_out_peaks(own, model_of, SEEN)
    errors = sorted(abs(row.error) for row in found)
    assert errors[len(errors) // 2] < 0.05


def test_trl_never_holds_all_logits_since_its_loss_is_chunked():
    # One sequence of 1,048,576 tokens on 8 H100 80GB: 364 s and 56.2 GB a device (trl 6846).
    host = {"device": "h100-sxm-80gb", "devices_per_node": 8, "host_memory_bytes": 2 * 1024**4}
    long = {**TUNE, "method": "full", "sequence_length": 1024**2, "global_batch_size": 1}
    layout = {"context_parallel_size": 8, "zero_stage": 3, "activation_recomputation": "full"}
    ways = {**layout, "weight_dtype": "bf16", "offload": {"activations_cpu": 1.0}}
    asked = {"model": "Qwen/Qwen3-8B", "cluster": host, "workload": long, "strategy": ways}

    for engine, chunked in (("trl", True), ("trl 1.7.0", True), ("trl 1.6.2", False),
                            ("axolotl", False), ("transformers", False)):  # fmt: skip
        found = ask(engine=engine, **asked)
        peak = found.memory.per_device_peak_bytes
        assert found.fits == chunked, engine
        assert peak == pytest.approx(56.2e9, rel=0.3) if chunked else peak > 200e9, engine
        assert found.performance.step_seconds == pytest.approx(364, rel=0.25)


def test_a_fine_tuning_loads_and_multiplies_in_the_dtypes_of_its_tools_release():
    full = {**TUNE, "method": "full"}
    for engine, weight, compute in (
        ("trl", "fp32", "bf16"),
        ("transformers", "bf16", "bf16"),
        ("transformers 5.2", "bf16", "bf16"),
        ("transformers 4.57", "fp32", "fp32"),
        ("llama_factory", "bf16", "bf16"),
        ("torch", "fp32", "fp32"),
    ):
        chosen = ask(engine=engine, workload=full).strategy
        assert (chosen.weight_dtype, chosen.compute_dtype) == (weight, compute), engine
    # What the tables measured with older releases was loaded in fp32.
    rows = [row for row in usable(table("memory_fit")) if row["engine"] == "transformers"]
    stated = [strategy_of(row) for row in rows if row["method"] == "full"]
    assert all("weight_dtype" in one or "gradient_dtype" in one for one in stated)


# pytorch/torchtitan, torchtitan/components/quantization/mxfp8.md and nvfp4.md, 2026-08: reserved
# memory of a device, with the default recomputation, in bf16 and with products in eight bits.
TORCHTITAN = [
    ("meta-llama/Meta-Llama-3-8B", 8, 1, 8192, 33.7),
    ("meta-llama/Meta-Llama-3-8B", 4, 32, 2048, 187.4),
    ("Qwen/Qwen3-8B", 4, 16, 2048, 121.2),
]


def test_torchtitan_keeps_every_second_product_and_an_eighth_of_the_logits():
    for model, devices, rows, length, measured in TORCHTITAN:
        work = {**TUNE, "method": "pretrain", "sequence_length": length}
        found = ask(
            model=model,
            device="b200-sxm",
            devices=devices,
            engine="torchtitan",
            workload={**work, "global_batch_size": rows * devices},
            strategy={"data_parallel_size": devices, "zero_stage": 3, "micro_batch_size": rows},
        )
        peak = found.memory.per_device_peak_bytes / 1e9
        assert peak == pytest.approx(measured, rel=0.1), (model, devices, peak)
        assert found.strategy.activation_recomputation == "selective"

    # Query, value, attention, gate and down of Llama-3-8B, and the layer's input: 63.5 kB a token.
    model = get_model("meta-llama/Meta-Llama-3-8B")
    kept = residuals_of_every_second_product(model) * model.hidden_size
    assert 2 * (kept + every_second_product_elements(model)) == 63_488
    # Key, output and up products are computed again, attention is not.
    engine = setting_of("torchtitan", model="meta-llama/Meta-Llama-3-8B")
    share = every_second_product_share(engine.model)
    assert share == pytest.approx((1024 + 4096 + 14336) / (2 * 4096 + 2 * 1024 + 3 * 14336))


def test_a_loss_takes_the_bytes_of_its_kind():
    work = {**TUNE, "method": "pretrain"}
    for engine, bytes_a_logit in {"deepspeed": 10, "llm_foundry": 4, "torchtitan": 10 / 8}.items():
        setting = with_engine(
            setting_of(engine, workload=work, compute_dtype="bf16"), loss_ratio=1
        )
        _, _, loss = StageActivations(
            setting, NullLedger(), setting.workload, 0
        ).activation_bytes()
        logits = setting.layout.micro_batch * 2048 * setting.model.vocab_size
        assert loss == pytest.approx(logits * bytes_a_logit), engine


def test_peft_widens_what_bitsandbytes_does_not_pack_and_leaves_gptq():
    both = {}
    for packed in ("nf4", "gptq"):
        found = ask(
            model=LLAMA,
            engine="transformers",
            workload={**TUNE, "method": "qlora"},
            strategy={"quantization": packed, "activation_recomputation": "full"},
        )
        both[packed] = found.memory.breakdown_bytes["activations"]
    assert both["nf4"] == pytest.approx(2 * both["gptq"], rel=0.3)


def test_devices_of_one_die_and_power_reach_the_same_share_of_their_peak():
    for alike in (
        ("a100-sxm4-40gb", "a100-sxm4-80gb", "a800-sxm4-80gb"),
        ("a100-pcie-40gb", "a100-pcie-80gb"),
        ("h100-sxm5-80gb", "h800-sxm5-80gb", "h200-sxm-141gb"),
        ("gh200-96gb", "gh200-144gb"),
    ):
        devices = [get_device(each) for each in alike]
        for dtype in devices[0].achieved_flops_per_second:
            shares = {
                each.achieved_flops_per_second.get(dtype, 0) / each.peak_flops_per_second[dtype]
                for each in devices
            }
            assert max(shares) / min(shares) < 1.05, (alike, dtype)


def test_an_engine_with_a_remark_is_the_engine():
    for name, engine in (
        ("transformers 4.49, in-house trainer", "transformers"),
        ("fsdp_qlora", "fsdp_qlora"),
        ("transformers+trl", "trl"),
        ("nemo_automodel", "nemo_automodel"),
    ):
        assert get_engine(name, "gpu", training=True).key == engine
    assert wrapped_engine("fsdp_qlora") == "transformers"
    assert get_engine("vllm, sglang", "gpu").is_generic  # two engines are none
    with pytest.raises(PlannerError, match="is unknown"):
        get_engine("vllm,tensorrt_llm", "gpu")
