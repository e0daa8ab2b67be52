"""Whole trainings peak within 10 % of their plans, on a host that measured its own runtime."""

import subprocess
import sys

import pytest

from planner.api import estimate
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from runners.jobs.loading import demo_config
from runners.jobspec import DemoModel, RandomModel, SampleOptions, TrainSpec
from runners.jobspec.base import DEMO_ENCODER
from runners.jobspec.train import LayoutOptions
from tests.system.jobs.gang import run_on_ranks
from tests.system.jobs.harness import PROJECT

pytestmark = pytest.mark.slow
STEPS = {"max_steps": 6, "time_budget_seconds": None}
DTYPES = [  # a processor without units for bf16 takes it six times as long
    "fp32",
    pytest.param("bf16", marks=pytest.mark.soak),
]
MEASURE = """
from runners.jobs.bench.device_rates import DemoModel, runtime_memory_bytes, training_memory_bytes
print(runtime_memory_bytes(), training_memory_bytes(DemoModel()))
"""


@pytest.fixture(scope="module")
def processor(host):
    """Return this machine as its own micro-benchmark sees what a job's process holds."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURE]
    ended = subprocess.run(
        command, cwd=PROJECT, env=host.environment(), capture_output=True, text=True, check=True
    )
    runtime, training = map(int, ended.stdout.split())
    return DeviceSpec(
        id="here", kind="cpu", memory_bytes=2**34, memory_bandwidth_bytes_per_second=1e10,
        peak_flops_per_second={"fp32": 1e11, "bf16": 1e11}, runtime_overhead_bytes=runtime,
        training_overhead_bytes=training, provenance="measured",
    )  # fmt: skip


def planned(processor, model, workload, compute_dtype, **strategy):
    request = {
        "model": model,
        "cluster": ClusterSpec(
            device=processor, devices_per_node=strategy.get("data_parallel_size", 1)
        ),
        "workload": {"kind": "train", **workload},
        "engine": "torch",
        "strategy": {
            "compute_dtype": compute_dtype, "weight_dtype": "fp32", "attention": "eager",
            **strategy,
        },
    }  # fmt: skip
    return estimate(EstimateRequest.model_validate(request)).memory.per_device_peak_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_demos_training_peaks_as_planned(host, processor, dtype):
    spec = TrainSpec(compute_dtype=dtype, **STEPS)
    host.run("read before", TrainSpec(max_steps=1, time_budget_seconds=None))  # tokens: cached

    peak = host.run("demo", spec).measured["peak_memory_bytes"]

    workload = {"sequence_length": 256, "global_batch_size": 2, "method": "pretrain"}
    expected = planned(processor, demo_config(DemoModel()), workload, dtype, micro_batch_size=2)
    assert peak == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_templates_classifier_on_two_ranks_peaks_as_planned(host, processor, dtype):
    """Its batches are of many lengths: what is kept for each must not pile up."""
    spec = TrainSpec(
        model=RandomModel(config=dict(DEMO_ENCODER)), objective="classification",
        sequence_length=128, micro_batch_size=8, gradient_accumulation_steps=4,
        samples=SampleOptions(rows="padded"), layout=LayoutOptions(data_parallel_size=2),
        learning_rate=1e-3, compute_dtype=dtype, **STEPS,
    )  # fmt: skip

    ended = run_on_ranks(host, "classifier", spec)

    peak = ended.measured["peak_memory_bytes"]
    workload = {"sequence_length": 128, "global_batch_size": 32, "method": "full"}
    expected = planned(
        processor, dict(DEMO_ENCODER), workload, dtype,
        micro_batch_size=8, data_parallel_size=2, zero_stage=0,
    )  # fmt: skip
    assert peak == pytest.approx(expected, rel=0.1)
