"""The share of memory that a serving engine is started with: its meaning, default and flags."""

import pytest

from planner.api import plan
from planner.errors import NotCoveredError
from planner.exports.registry import export, export_case
from planner.specs.estimate import PlanRequest
from planner.specs.workload import Strategy
from tests.planner.asking import GENERATE, LLAMA_70B, SERVE, TRAIN, ask, document

GIB = 1024**3
SATURATED = {"kind": "serve", "input_tokens": 8000, "output_tokens": 128}


def requests_at(share=None, **fields):
    strategy = {} if share is None else {"gpu_memory_utilization": share}
    found = ask(workload=SATURATED, strategy=strategy, **fields)
    return found.performance.max_concurrency if found.fits else 0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
def test_more_memory_holds_more_requests(engine):
    held = [requests_at(share, engine=engine) for share in (0.5, 0.8, 0.9, 0.95)]

    assert held == sorted(set(held))


@pytest.mark.parametrize(
    ("engine", "share"),
    [
        ("vllm", 0.9),
        ("vllm 0.10", 0.9),
        ("vLLM 0.19.1", 0.9),
        ("vllm 0.20.0", 0.92),  # vllm/config/cache.py
        ("vllm v0.27", 0.92),
        ("sglang", None),
    ],
)
def test_the_default_of_a_release_is_the_share_it_documents(engine, share):
    explicit = {} if share is None else {"gpu_memory_utilization": share}
    found = ask(workload=SATURATED, engine=engine, strategy=explicit)

    assert requests_at(engine=engine) == found.performance.max_concurrency


def test_vllm_counts_everything_sglang_not_the_activations_tensorrt_only_what_is_free():
    """A share of 0.5 of 80 GiB with 15 GiB of weights and some of activations."""
    vllm, sglang, trt = (
        requests_at(0.5, engine=engine) for engine in ("vllm", "sglang", "tensorrt_llm")
    )
    cache = 8128 * 2 * 32 * 8 * 128 * 2  # bytes of one request

    assert vllm < sglang < trt
    assert sglang == int((40 * GIB - ask().memory.breakdown_bytes["weights"]) // cache)


def test_a_share_above_what_the_device_has_is_limited_by_it():
    assert requests_at(1.0, engine="sglang") == requests_at(0.99, engine="sglang")


@pytest.mark.parametrize("engine", ["llama_cpp", "exllamav2", "torch", "transformers"])
def test_engines_without_the_option_refuse_it(engine):
    with pytest.raises(NotCoveredError, match="gpu_memory_utilization is"):
        ask(workload=GENERATE, engine=engine, strategy={"gpu_memory_utilization": 0.8})


def test_training_has_no_serving_engine():
    with pytest.raises(NotCoveredError, match="gpu_memory_utilization"):
        ask(workload=TRAIN, strategy={"gpu_memory_utilization": 0.8})


@pytest.mark.parametrize(
    "name",
    [
        "gpu_memory_utilization",
        "gpu-memory-utilization",
        "--gpu-memory-utilization",
        "gpu_memory_utilisation",
        "mem_fraction_static",
        "mem-fraction-static",
        "free_gpu_memory_fraction",
        "kv_cache_free_gpu_mem_fraction",
    ],
)
def test_each_engines_spelling_is_read(name):
    assert Strategy.model_validate({name: 0.85}).gpu_memory_utilization == 0.85


@pytest.mark.parametrize("share", [0, 1.5, -0.1, "much"])
def test_no_other_number_is_a_share(share):
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        Strategy.model_validate({"gpu_memory_utilization": share})


def test_an_absent_share_stays_out_of_the_answer():
    found = ask(engine="vllm").strategy.model_dump(mode="json")

    assert "gpu_memory_utilization" not in found


FLAGS = [
    ("vllm", "--gpu-memory-utilization 0.95"),
    ("sglang", "--mem-fraction-static 0.95"),
    ("tensorrt_llm", "free_gpu_memory_fraction: 0.95"),
]


SHARE = {"gpu_memory_utilization": 0.95}


def command(text):
    """Return a command without its line breaks."""
    return " ".join(text.replace("\\\n", " ").split())


@pytest.mark.parametrize(("engine", "flag"), FLAGS)
def test_a_pinned_share_reaches_the_plan_and_its_own_command_alone(engine, flag):
    question = document(
        model=LLAMA_70B, devices=4, engine=engine, workload=SERVE, objective="throughput", top=1
    )
    pinned = plan(PlanRequest.model_validate({**question, "pins": SHARE}))
    plain = plan(PlanRequest.model_validate(question))

    assert pinned.plans[0].strategy.gpu_memory_utilization == 0.95
    case = export_case(pinned.request, pinned.plans[0])
    for target, other in FLAGS:
        files = export(target, case)
        assert (other in command(files.text)) == (target == engine)
        assert any("in the meaning of" in note for note in files.notes) == (target != engine)
    unset = export(engine, export_case(plain.request, plain.plans[0]))
    assert flag.split()[0] not in command(unset.text)


def test_a_model_that_needs_more_than_the_default_fits_with_a_larger_share():
    """vllm-project/vllm issue 12569: 67.72 GiB on 80 GB were served at 0.98."""
    tight = {"model": LLAMA_70B, "engine": "vllm", "workload": {**SERVE, "concurrency": 1}}
    formats = {"weight_dtype": "int8", "activation_dtype": "int8"}

    assert not ask(**tight, strategy={**formats, "gpu_memory_utilization": 0.8}).fits
    assert ask(**tight, strategy={**formats, "gpu_memory_utilization": 0.98}).fits
