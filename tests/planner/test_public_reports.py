"""Public reports, published deployments and published speeds, as the planner answers them."""

import csv
import json
import math
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from planner.api import estimate
from planner.catalog.engines import release_number
from planner.catalog.models import get_model
from planner.cost.kv_cache import block_bytes, page_pool, pooled_cache_bytes
from planner.fitting.evidence import table
from planner.fitting.published_speeds import (
    collection_of,
    compare_row,
    fresh_section,
    fresh_speeds,
    published_speeds,
    question_of,
    share_inside,
    share_inside_without_own,
    source_spread,
)
from planner.specs.base import NotPossibleError, PlannerError, UnknownModelError
from planner.specs.estimate import EstimateRequest
from planner.workload.costing import estimate_request
from planner.workload.outcome import SOURCE_SPREAD
from tests.planner.asking import LLAMA_8B, ask, held, search
from tests.plugins.extent import sample

# The questions are those of ``planner/validation/public_reports.jsonl``, by their name.


REPORTS = Path(__file__).parents[2] / "planner" / "validation" / "public_reports.jsonl"
GIB = 1024**3
SERVED = {"kind": "serve", "input_tokens": 2048, "output_tokens": 256, "concurrency": 1}


def question(name):
    """Return the document of a question, by the first word of its name."""
    rows = [json.loads(line) for line in REPORTS.read_text().splitlines()]
    asked = {q["id"].split()[0]: q for row in rows for q in row["questions"]}
    return {field: value for field, value in asked[name].items() if field != "id"}


def answer(name, **changes):
    return estimate(EstimateRequest.model_validate(question(name) | changes))


def test_symmetric_groups_of_four_bits_have_no_zero_point():
    """Kimi-K2.5 has 595 GB (vllm-project/recipes @8959cf6); MLA's latents are on every rank."""
    latents = 7 * 60 * 7168 * (1536 + 512 + 64) * 2
    on_all = 8 * held(answer("R40"), "weights")
    assert on_all - latents == pytest.approx(595e9, rel=0.01)


def test_deepseek_v4s_windows_and_states_take_the_tokens_of_a_step():
    """vllm-project/vllm issue 44376: V4-Flash on two GH200, 16,384 tokens a step."""
    layers = get_model("deepseek-ai/DeepSeek-V4-Flash").layers_by_attention
    pool = page_pool(layers)
    for tokens, step, gib in ((30_000, 16_384, 6.66), (13_528, 13_528, 5.44)):
        assert pool is not None, (tokens, step, gib)

        needed = pooled_cache_bytes(
            bytes_per_block=block_bytes(pool, 1.0),
            num_requests=1,
            num_tokens=tokens,
            shared_tokens=0,
            window_blocks=pool.window_blocks,
            blocks_per_step_token=pool.blocks_per_step_token,
            step_tokens=step,
        )

        assert needed / GIB == pytest.approx(gib, rel=0.005), (tokens, step, gib)


def test_vllm_holds_windows_steps_and_tokens_as_reported():
    # Issue 51041 of vLLM: 3.2 GB of a request do not grow, 3.3 kB a token do.
    short, long = (
        held(answer("R16", workload=SERVED | {"input_tokens": tokens}), "kv_cache")
        for tokens in (20_000, 120_000)
    )
    assert (long - short) / 100_000 == pytest.approx(3.3e3, rel=0.3)
    assert short - 20_000 * 3.3e3 == pytest.approx(3.2e9, rel=0.15)

    # SlidingWindowSpec.max_memory_usage_bytes: the window and max_num_batched_tokens.
    model = get_model("openai/gpt-oss-120b")
    asked = {"model": "openai/gpt-oss-120b", "workload": SERVED | {"input_tokens": 100_000}}
    sliding = next(g for g in model.layers_by_attention if getattr(g, "window", None))
    each = 2 * 8 * 64 * 2 * sliding.count
    step, none = (held(ask(**asked, engine=engine), "kv_cache") for engine in ("vllm", "sglang"))
    assert step - none == each * (8192 - sliding.window)

    for name, engine, tokens, ranks in (
        ("R02", "vllm 0.9.2", 178_880, 1),  # issue 21348 of vLLM
        ("R15f", "vllm 0.22", 769_888, 2),  # issue 45178, without the estimate of graphs
    ):
        found = answer(name, engine=engine, workload=UNSTATED).performance.max_concurrency
        assert found * 2304 / ranks == pytest.approx(tokens, rel=0.15)


UNSTATED = {name: value for name, value in SERVED.items() if name != "concurrency"} | {
    "request_rate_per_second": 0.001
}


def cluster(device, devices=8, nodes=1):
    return {"device": device, "devices_per_node": devices, "nodes": nodes}


def test_reports_of_trainings_fit_where_they_ran_and_not_where_they_died():
    # hiyouga/LlamaFactory issue 2379: 16-bit LoRA of queries and values on eight A800.
    adapters = {"kind": "train", "method": "lora", "lora_rank": 8, "lora_targets": "query_value"}
    mixtral = {
        "model": "mistralai/Mixtral-8x7B-v0.1",
        "cluster": cluster("a800-sxm4-80gb"),
        "workload": adapters | {"sequence_length": 1024, "global_batch_size": 16},
        "engine": "deepspeed",
    }
    # InternLM/xtuner issue 88: QLoRA of Llama-2-70B, of xtuner's length and rank.
    quantised = {
        "model": "meta-llama/Llama-2-70b",
        "workload": adapters
        | {"method": "qlora", "sequence_length": 2048, "global_batch_size": 8, "lora_rank": 64},
        "engine": "transformers",
    }
    pairs = {"data_parallel_size": 8, "compute_dtype": "fp16", "micro_batch_size": 2}
    single = {"data_parallel_size": 8, "activation_recomputation": "full", "micro_batch_size": 1}
    for fields, strategy, fits in (
        (mixtral, pairs, False),
        (mixtral, pairs | {"zero_stage": 3}, True),
        (quantised | {"cluster": cluster("a100-sxm4-40gb")}, single, False),
        (quantised | {"cluster": cluster("a100-sxm4-80gb")}, single, True),
    ):
        assert ask(**fields, strategy=strategy).fits == fits, (fields["model"], strategy)


def test_a_sequence_of_a_million_tokens_takes_the_reported_time():
    """huggingface/trl pull request 6845; of the peaks, the 8B's alone is met."""
    long = {"kind": "train", "method": "full", "sequence_length": 2**20, "global_batch_size": 1}
    for model, seconds, peak in (
        ("Qwen/Qwen3-8B", 364, 56.2e9),
        ("Qwen/Qwen3-32B", 1295, None),
        ("Qwen/Qwen3-30B-A3B", 483, None),
        ("Qwen/Qwen3-0.6B", 137, None),
    ):
        found = ask(
            model=model,
            cluster=cluster("h100-sxm-80gb") | {"host_memory_bytes": 2**41},
            workload=long,
            strategy={
                "context_parallel_size": 8, "zero_stage": 3, "activation_recomputation": "full",
                "weight_dtype": "bf16", "compute_dtype": "bf16",
                "offload": {"activations_cpu": 1.0},
            },
            engine="trl",
        )  # fmt: skip
        assert found.performance.step_seconds == pytest.approx(seconds, rel=0.25), model
        if peak:
            assert found.memory.per_device_peak_bytes == pytest.approx(peak, rel=0.3), model


def test_a_model_of_865_gb_and_two_pools_are_answered_as_reported():
    # vllm-project/recipes issues 381, 832: DeepSeek-V4-Pro needs 16 H100 or eight H200.
    served = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 16}
    for device, nodes, fits in (
        ("h100-sxm-80gb", 1, False), ("h100-sxm-80gb", 2, True), ("h200-sxm-141gb", 1, True),
    ):  # fmt: skip
        found = search(
            model="deepseek-ai/DeepSeek-V4-Pro",
            cluster=cluster(device, nodes=nodes),
            workload=served,
            engine="vllm",
            top=1,
        )
        assert bool(found.plans) == fits, (device, nodes)
        if not fits:
            assert any(each.title == "16 devices instead of 8" for each in found.suggestions)

    # sgl-project/sglang pull request 4880: two pools decode faster than two replicas, with the
    # same throughput (407.6 tokens/s).
    pools, replicas = (
        ask(
            model="Qwen/Qwen2.5-7B-Instruct",
            cluster=cluster("a10", 4, 2),
            workload={
                "kind": "serve", "input_tokens": 8192, "output_tokens": 512,
                "request_rate_per_second": 0.8,
            },
            strategy={"quantization": "gptq", "tensor_parallel_size": 4, **layout},
            engine="sglang",
        ).performance
        for layout in (
            {"disaggregated": {"prefill_devices": 4, "decode_devices": 4}},
            {"data_parallel_size": 2},
        )
    )  # fmt: skip
    assert pools.tpot_seconds < 0.9 * replicas.tpot_seconds
    for found in (pools, replicas):
        assert found.output_tokens_per_second == pytest.approx(407.6, rel=0.05)


def test_single_streams_on_h100_decode_as_reported():
    """sgl-project/sglang pull request 4716 and vllm-project/vllm pull request 16937."""
    for model, devices, engine, lengths, tokens_per_second in (
        ("meta-llama/Llama-3.1-70B", 8, "sglang", (128, 512), 88.6),
        ("meta-llama/Llama-3.1-8B", 1, "vllm", (128, 256), 133),
    ):
        found = ask(
            model=model,
            cluster=cluster("h100-sxm-80gb", devices),
            workload=SERVED | dict(zip(("input_tokens", "output_tokens"), lengths, strict=True)),
            strategy={"tensor_parallel_size": devices},
            engine=engine,
        )
        rate = found.performance.output_tokens_per_second
        assert rate == pytest.approx(tokens_per_second, rel=0.2), model


def test_graphs_of_early_vllm_and_estimates_that_took_most_of_a_device_are_told():
    # Issue 7553: 2,464 MiB for Yi-34B on four RTX 4090, which left 0.7 GiB of each.
    found = answer("R25", engine="vllm 0.5.4", workload=UNSTATED)
    later = answer("R25", engine="vllm 0.22", workload=UNSTATED)
    assert held(found, "buffers") / 2**20 == pytest.approx(2464, rel=0.02)
    assert found.performance.max_concurrency < later.performance.max_concurrency

    # Issue 45178: 245,840 tokens with the estimate, 769,888 without.
    warned = {
        engine: any("119 GiB" in warning for warning in answer("R15f", engine=engine).warnings)
        for engine in ("vllm", "vllm 0.22", "vllm 0.20", "sglang")
    }
    assert warned == {"vllm": True, "vllm 0.22": True, "vllm 0.20": False, "sglang": False}


def test_sixteen_bit_experts_of_96_on_b200():
    """Issue 41360 of vLLM: Qwen3-30B-A3B cut by 8, in blocks of 128 bytes; 192 is whole."""
    for engine, tensor, works in (
        ("vllm 0.19", 8, False),
        ("vllm 0.19", 4, True),
        ("vllm 0.22", 8, False),
        ("vllm 0.17", 8, True),
        ("vllm 0.26", 8, True),  # its oracle declines the kernel (pull request 51492)
    ):
        asked = {"engine": engine, "strategy": {"tensor_parallel_size": tensor}}
        if works:
            assert answer("R24", **asked).fits, (engine, tensor, works)
            continue
        with pytest.raises(
            NotPossibleError, match=r"768 into 96 per rank.*nearest that works is 4"
        ):
            answer("R24", **asked)


def test_fp8_made_while_loading_needs_the_16_bit_weights_too():
    """Issue 31273 and pull request 32773 of vLLM."""
    for name, engine, fits in (
        ("R34", "vllm 0.14.1", False),  # 57 GiB of bf16 and 29 of FP8 on 80
        ("R34", "vllm 0.16", True),
        ("R34b", "vllm 0.13", False),  # 135 and 70 on 141
        ("R34b", "vllm 0.12", True),  # 135 first
    ):
        assert answer(name, engine=engine).fits is fits, (name, engine, fits)


def test_sglangs_workspace_on_amd_grows_with_the_contexts_that_it_holds():
    """Pull request 18263 of sglang: 51.75 GiB beside 1,669,816 tokens in 0.911 of an MI355X."""
    path = REPORTS.parents[1] / "catalog" / "data" / "configs" / "Qwen--Qwen3-30B-A3B.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 262_144}
    asked = {"model": config, "engine": "sglang", "workload": UNSTATED}
    whole = ask(
        **asked | {"workload": UNSTATED | {"max_request_tokens": 262_144}}, device="mi355x"
    )
    short, other = (ask(**asked, device=device) for device in ("mi355x", "b200"))

    assert held(whole, "buffers") / GIB == pytest.approx(51.75, rel=0.03)
    assert whole.performance.max_concurrency * 2304 == pytest.approx(1_669_816, rel=0.03)
    assert 0 < held(short, "buffers") < 3 * GIB
    assert held(other, "buffers") == 0


class Start(NamedTuple):
    """A start of vLLM: what its log says is left for the cache, in GiB."""

    source: str
    model: str
    device: str
    tensor: int
    engine: str
    total: float
    share: float
    tokens: int
    left: float


# Contexts, communicators and graphs were sized on these; the others were held out.
FITTED = [
    Start("10511", LLAMA_8B, "h100-sxm5-80gb", 1, "vllm 0.6.5", 79.22, 0.9, 8192, 53.29),
    Start("10511", LLAMA_8B, "h100-sxm5-80gb", 2, "vllm 0.6.5", 79.22, 0.9, 8192, 58.97),
    Start("15815", "Qwen/Qwen2.5-32B", "l40s", 2, "vllm 0.7.3", 44.42, 0.9, 2048, 7.71),
    Start("10517", LLAMA_8B, "rtx-3090", 1, "vllm 0.6.4", 23.58, 0.9, 20_000, 3.81),
    Start(
        "2 x H200",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "h200-sxm-141gb",
        2,
        "vllm 0.11",
        139.81,
        0.9,
        8192,
        44.59,
    ),
    Start("10517", LLAMA_8B, "rtx-3090", 1, "vllm 0.6.4", 23.58, 0.9, 29_000, 2.89),
    Start(
        "13061", "Qwen/Qwen2.5-14B-Instruct", "rtx-4090", 2, "vllm 0.7.2", 23.55, 0.98, 2048, 8.69
    ),
    Start(
        "50159",
        "Qwen/Qwen2.5-0.5B",
        "rtx-pro-6000-blackwell-server",
        1,
        "vllm 0.26",
        94.97,
        0.85,
        8192,
        78.87,
    ),
]
HELD_OUT = [
    Start(
        "21348",
        "Qwen/Qwen3-235B-A22B-FP8",
        "h100-sxm5-80gb",
        4,
        "vllm 0.9.2",
        79.2,
        0.9,
        8192,
        8.11,
    ),
    Start(
        "27508", "openai/gpt-oss-120b", "h100-sxm5-80gb", 1, "vllm 0.11", 79.2, 0.95, 1024, 1.71
    ),
    Start(
        "23278", "openai/gpt-oss-120b", "h100-sxm5-80gb", 1, "vllm 0.10.1", 79.2, 0.9, 8192, -2.14
    ),
    Start("27", "openai/gpt-oss-120b", "h100-sxm5-80gb", 1, "vllm 0.27", 79.2, 0.92, 8192, 5.38),
    Start(
        "club-3090 612",
        "nvidia/Qwen3.6-35B-A3B-NVFP4",
        "rtx-5090",
        1,
        "vllm 0.24",
        31.36,
        0.92,
        8192,
        5.98,
    ),
]


def own_memory_error(start):
    """Return the GiB that the planner takes for vLLM beyond what its log says."""
    found = ask(
        model=start.model,
        device=start.device,
        devices=start.tensor,
        engine=start.engine,
        workload=UNSTATED,
        strategy={"tensor_parallel_size": start.tensor, "max_batch_tokens": start.tokens},
    )
    parts = {
        part: size for part, size in found.memory.breakdown_bytes.items() if part != "kv_cache"
    }
    if release_number(start.engine.partition(" ")[2]) < (0, 21):
        parts.pop("buffers", 0)
    return sum(parts.values()) / GIB - (start.total * start.share - start.left)


def test_the_memory_that_vllm_keeps_for_itself():
    """1.1 GiB off before, both: one size stood for contexts, communicators and graphs."""
    for starts, most in ((FITTED, 0.8), (HELD_OUT, 0.7)):
        errors = [abs(own_memory_error(start)) for start in starts]
        assert sum(errors) / len(errors) < most, (starts, most)


# ``published/commands.csv`` holds facts alone (model, GPU, degrees, formats, result, source), from
# vllm-project/recipes, SGLang's cookbook and TensorRT-LLM's documentation in November 2026. Rows
# of models that the catalog does not hold are counted, not checked; nineteen of twenty are held.
COMMANDS = Path(__file__).parent / "published" / "commands.csv"
STORED = {"awq": "int4", "gptq": "int4"}
LIKE = {"bf16": "16", "fp16": "16"}
SHORT = 2304  # tokens of the one request of a row
# Rows whose reason the planner cannot know from model, GPU and degrees.
BEYOND = (
    "--kv-cache-dtype",  # a value that the engine's own parser refuses
    "below the stated minimum",  # of a table, not of memory
    "marks this hardware unsupported",  # by kernels that a release lacks
    "in that snapshot",  # a format that came later
    "defaults OOM",  # the default number of requests; with the stated one it starts
    "engine itself",  # falls back on weight-only kernels where the recipe refuses
    "weights plus KV cache",  # of the default context; one short request fits
    "mismatch",  # of a checkpoint whose fused projections are stored for four ranks
)
# What is stated to run, by model and GPU, and why the planner says no.
UNEXPLAINED = {
    ("moonshotai/Kimi-K3", "b300-sxm"): "the size of a model that is announced, not published",
    ("inclusionAI/Ring-2.5-1T", "gb200-nvl72"): "1 TB of weights on four devices of a made table",
    ("internlm/Intern-S1-FP8", "mi300x"): "experts cut into 192 columns (vllm pull request 48173)",
    ("internlm/Intern-S1-FP8", "mi355x"): "experts cut into 192 columns (vllm pull request 48173)",
    ("Inferact/Qwen3.8-27B-NVFP4", "rtx-5090"): "which parts stay in 16 bits is not published",
}


def request_of(row):
    """Return the request of a row: one caller, with the published degrees and formats."""
    spec, number = get_model(row["model"]), {}
    for name in ("gpus", "nodes", "tensor", "pipeline", "data", "attention_data", "expert"):
        number[name] = int(row[name] or 1)
    strategy = {f"{name}_parallel_size": number[name] for name in ("tensor", "pipeline", "data")}
    if spec.is_moe:
        strategy["expert_parallel_size"] = number["expert"]
    if number["attention_data"] > 1:
        strategy["attention_data_parallel_size"] = number["attention_data"]
    if "fp8" in row["kv_cache_dtype"]:
        strategy["kv_cache_dtype"] = "fp8"
    stored = STORED.get(row["checkpoint"], row["checkpoint"])
    own = spec.weight_dtype or "bf16"
    # A checkpoint that holds few bits is loaded as it is: recipes call FP4 beside FP8 "fp8".
    if stored and own in LIKE and LIKE.get(stored, stored) != LIKE[own]:
        strategy["weight_dtype"] = stored
    # vLLM's "auto" takes what fits. What is stated not to hold one request gets that one.
    stated = int(row["max_model_len"].replace("auto", "") or SHORT)
    most = stated if row["result"] == "impossible" else SHORT
    longest = min(stated, spec.max_position_embeddings, most)
    answer = min(256, longest // 2)
    return EstimateRequest.model_validate(
        {
            "model": row["model"],
            "engine": f"{row['engine']} {row['release']}".strip(),
            "cluster": {
                "device": row["gpu"],
                "devices_per_node": number["gpus"] // number["nodes"],
                "nodes": number["nodes"],
            },
            "workload": {
                "kind": "serve",
                "input_tokens": longest - answer,
                "output_tokens": answer,
                "concurrency": 1,
            },
            "strategy": strategy,
        }
    )


def is_known(row):
    try:
        get_model(row["model"])
    except UnknownModelError:
        return False
    return True


def result_of(row):
    """Return what the planner answers to a row of a known model."""
    try:
        return "fits" if estimate(request_of(row)).fits else "too large"
    except PlannerError as error:
        return f"refused: {error}"


def published(engine, result):
    """Return an engine's rows that were published with this result."""
    with COMMANDS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if (row["engine"], row["result"]) == (engine, result)]


ENGINES = ("vllm", "sglang", "tensorrt_llm")


def test_every_published_deployment_of_a_known_model_fits_and_is_accepted():
    for engine in ENGINES:
        rows = published(engine, "verified")
        known = [row for row in rows if is_known(row)]
        wrong = [
            (row["source"], row["model"], row["gpu"], result)
            for row in sample(known, kind=itemgetter("gpu"))
            if (row["model"], row["gpu"]) not in UNEXPLAINED
            and (result := result_of(row)) != "fits"
        ]
        assert len(known) >= 40, engine
        assert len(known) >= 0.95 * len(rows), engine
        assert wrong == [], engine


def test_stated_impossibilities_are_refused_and_no_source_was_fitted():
    for engine in ENGINES:
        wrong = [
            (row["source"], row["model"], row["gpu"], row["reason"])
            for row in sample(published(engine, "impossible"), kind=itemgetter("gpu"))
            if not any(words in row["reason"] for words in BEYOND)
            and is_known(row)
            and result_of(row) == "fits"
        ]
        assert wrong == [], engine

    fitted = {row["source_id"] for name in FITTED_TABLES for row in table(name)}
    fitted |= {row["source"] for row in table("inference_other")}
    rows = SPEEDS + FRESH
    assert not {row["source"] for row in rows} & fitted
    assert len({row["id"] for row in rows}) == len(rows)


FITTED_TABLES = ("serving_dense", "serving_sparse", "inference_other")
SPEEDS = table("published_speeds")
FRESH = table("fresh_speeds")


def answer_of(row):
    return estimate_request(question_of(row), explain=False)


def test_every_row_states_its_conditions_and_fits_in_the_published_format():
    for row in SPEEDS:
        answer = answer_of(row)
        assert answer.fits, row["id"]
        assert answer.strategy.weight_dtype == row["checkpoint_format"], row["id"]
        assert all(row[name] for name in ("source", "date", "release")), row["id"]
        assert bool(row["tpot_ms"]) or bool(row["output_tokens_per_second"]), row["id"]


def test_the_third_set_is_of_other_collections_and_every_row_is_counted():
    speeds, refused = fresh_speeds()
    collections = {collection_of(row) for row in FRESH}
    assert len(collections) >= 5
    assert not collections & {collection_of(row) for row in SPEEDS}
    assert len(speeds) + len(refused) == len(FRESH)
    assert all(name in fresh_section() for name in collections)


def test_a_fresh_row_states_its_conditions_and_runs_in_the_published_format():
    for row in FRESH:
        assert all(row[name] for name in ("source", "date", "release")), row["id"]
        assert bool(row["tpot_ms"]) or bool(row["output_tokens_per_second"]), row["id"]
    for speed in fresh_speeds()[0]:
        answer = answer_of(speed.row)
        assert answer.fits, speed.row["id"]
        assert answer.strategy.weight_dtype == speed.row["checkpoint_format"], speed.row["id"]


def test_spreads_and_rates_are_compared_by_time_and_source():
    assert source_spread(published_speeds()) == pytest.approx(SOURCE_SPREAD, abs=0.01)
    # Four of five lie inside: of sources that gave the width, each without its say, and of others.
    assert 0.75 <= share_inside_without_own() <= 0.88
    assert 0.75 <= share_inside(fresh_speeds()[0]) <= 0.88

    row = next(row for row in SPEEDS if row["tpot_ms"])
    answer = answer_of(row)
    rate = answer.performance.output_tokens_per_second
    double = {**row, "tpot_ms": "", "output_tokens_per_second": str(2 * rate)}
    assert compare_row(double, answer).log_ratio == pytest.approx(math.log(2))
