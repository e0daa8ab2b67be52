"""Pairs of questions of which the second asks for more, and rates of the shortest answers."""

from collections.abc import Iterator, Sequence

from planner.api import inverse
from planner.catalog.models import get_model
from planner.specs.base import PlannerError
from planner.specs.estimate import Estimate, EstimateRequest, InverseRequest
from planner.workload.resolve import resolve
from tests.planner.laws.checkers import estimated
from tests.planner.laws.questions import LOCAL, SERVING, Questions

FORMATS = (
    {},
    *({"weight_dtype": name} for name in ("bf16", "fp16", "fp8", "int8", "int4", "nvfp4")),
    *({"quantization": name} for name in ("awq", "gptq", "fp8", "w8a8", "nf4")),
    *({"quantization": f"gguf:{name}"} for name in ("q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0")),
    {"quantization": "gguf:iq4_xs"},
)
PROMPTS = (17, 512, 1000, 4096, 8192, 16_352)
ROUNDING = 1.001


def grown(questions: Questions) -> list[dict]:
    """Return a question of a batch or of callers, and one of longer prompts or more layers."""
    choice = questions.draw.choice
    cluster, strategy = questions.cluster(nodes=1), dict(choice(FORMATS))
    if choice((True, False)):
        strategy |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    if choice((True, False, False)):
        strategy["kv_cache_dtype"] = "int8"
    workload: dict = {"input_tokens": choice(PROMPTS), "output_tokens": choice((16, 256))}
    workload |= choice(
        (
            {"kind": "generate", "batch_size": choice((1, 8, 64, 256))},
            {"kind": "generate", "batch_size": choice((64, 256))},
            {"kind": "serve", "concurrency": choice((1, 16, 300))},
            {"kind": "serve", "burst_requests": choice((16, 500))},
        )
    )
    name = questions.model()
    document = {
        "model": name,
        "cluster": cluster,
        "workload": workload,
        "strategy": strategy,
        "engine": choice((*SERVING, *LOCAL)),
    }
    if choice((True, False)):
        longer = workload["input_tokens"] * choice((2, 8))
        return [document, {**document, "workload": {**workload, "input_tokens": longer}}]
    model = get_model(name).model_dump(mode="json")
    return [{**document, "model": model}, {**document, "model": _of_twice_the_layers(model)}]


def _of_twice_the_layers(model: dict) -> dict:
    groups = [{**group, "count": 2 * group["count"]} for group in model["attention_layers"]]
    kinds = ("num_hidden_layers", "num_dense_layers", "num_layers_without_feed_forward")
    return {**model, "attention_layers": groups, **{kind: 2 * model[kind] for kind in kinds}}


def takes_no_less_memory(
    documents: Sequence[dict], answers: Sequence[Estimate | None]
) -> Iterator[str]:
    """Longer prompts and more layers take at least as much memory, also while requests wait."""
    if None in answers:
        return
    less, more = (answer.memory.per_device_peak_bytes for answer in answers)
    if more < less / ROUNDING:
        sizes = [document["workload"]["input_tokens"] for document in documents]
        yield f"{less / 2**30:.2f} GiB of {sizes[0]} tokens, {more / 2**30:.2f} of {sizes[1]}"


def shortest(questions: Questions) -> dict:
    """Return a question of many callers whose prompts and answers are as short as they get."""
    choice = questions.draw.choice
    load = choice(({"concurrency": choice((4, 16, 300))}, {"request_rate_per_second": 1000}, {}))
    lengths = {"input_tokens": choice((1, 17, 100, 512)), "output_tokens": choice((1, 1, 2))}
    return {
        "model": questions.model(),
        "cluster": questions.cluster(nodes=1),
        "workload": {"kind": "serve", **lengths, **load},
        "strategy": dict(choice(FORMATS)),
        "engine": choice((*SERVING, *LOCAL)),
    }


def keeps_to_reached_rate(document: dict, answer: Estimate) -> Iterator[str]:
    """The arithmetic of the prompts stays within the share of the peak that the engine reaches.

    Rates that were fitted on published runs, or computed by a host beside the device, may exceed
    it; ``within_physics`` bounds those.
    """
    setting = resolve(EstimateRequest.model_validate(document))
    rates, counts = setting.rates, setting.counts
    fitted = setting.part_line("prefill", "", "linear", "compute").factor
    strategy, tokens = answer.strategy, document["workload"]["input_tokens"]
    each = 2 * (counts.layer_linear - counts.experts + counts.experts_active) * tokens
    reached = rates.peak_flops_per_s * rates.compute_efficiency * setting.layout.devices
    if fitted < 1 or strategy.sparsity or strategy.offload or not each:
        return
    rate = answer.performance.requests_per_second
    if rate and rate * each > reached * ROUNDING:
        yield f"{rate:.4g} requests/s need {rate * each:.3g} FLOP/s of {reached:.3g} reached"


def pinned_limit(questions: Questions) -> dict:
    """Return the question of the longest context of a batch, with formats and layout pinned."""
    choice = questions.draw.choice
    pins = {**choice(FORMATS), "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    batch = {"kind": "generate", "input_tokens": 512, "output_tokens": 16}
    return {
        "model": questions.model(),
        "cluster": questions.cluster(nodes=1, devices=1),
        "workload": {**batch, "batch_size": choice((1, 4, 64))},
        "engine": choice((*SERVING, *LOCAL)),
        "question": "longest_context",
        "pins": pins,
    }


def no_estimate_fits_beyond(document: dict) -> Iterator[str]:
    """An estimate of the same workload a fifth beyond the longest context does not fit."""
    try:
        answer = inverse(InverseRequest.model_validate(document))
    except PlannerError:
        return
    for limit in answer.limits:
        if limit.beyond is None or limit.beyond.constraint == "max_position_embeddings":
            continue
        longer = max(int(1.2 * float(limit.value)), int(float(limit.beyond.value)))
        workload = document["workload"]
        longer -= min(workload["output_tokens"], longer - 1)
        asked = {name: document[name] for name in ("model", "cluster", "engine")}
        asked |= {"strategy": document["pins"], "workload": {**workload, "input_tokens": longer}}
        further = estimated(asked)
        if further and further.fits:
            yield f"longest context {limit.value}, but a prompt of {longer} fits"
