"""The figures against datasheet and planner: slow, too fast, on an unknown device."""

import pytest

from runners.prove.expected import Expectations, Hardware
from runners.prove.report import Check, Figure, Missing, Question

H100 = Hardware("NVIDIA H100 80GB HBM3", "gpu", 85_520_809_984, 2**38)
BANDWIDTH, PEAK = 3.35e12, 989.4e12  # of its datasheet
SHAPE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
}
DECODE = Question(
    model=SHAPE,
    workload={"kind": "generate", "batch_size": 1, "input_tokens": 128, "output_tokens": 64},
    strategy={"weight_dtype": "bf16"},
    engine="gpt_fast",
    metric="decode_tokens_per_second",
)


def figure(name: str, value: float, unit: str = "bytes/s", question=None) -> Figure:
    """Return a figure of the first GPU."""
    return Figure(name=name, unit=unit, value=value, device="cuda:0", question=question)


@pytest.mark.parametrize(
    ("name", "value", "is_met"),
    [
        ("memory triad", 0.92 * BANDWIDTH, True),
        ("memory copy", 0.4 * BANDWIDTH, False),  # slow: another program, a lowered clock
        ("memory triad", 1.2 * BANDWIDTH, False),  # another device than its name
        ("matmul bf16", 0.7 * PEAK, True),
        ("matmul bf16", 0.07 * PEAK, False),  # without tensor cores
        ("copy host to device, pinned", 6e9, False),  # four lanes of sixteen
    ],
)
def test_a_rate_far_from_the_datasheet_is_named(name, value, is_met):
    figured, check = Expectations(H100, []).complete([figure(name, value)])
    assert figured.prediction.value > 0
    assert isinstance(check, Check)
    assert (check.is_met, name in check.name) == (is_met, True)
    assert check.advice


def test_a_speed_is_predicted_from_the_datasheet_and_again_from_the_measured_rates():
    rates = [figure("memory triad", 0.5 * BANDWIDTH), figure("matmul bf16", 0.6 * PEAK, "op/s")]
    speed = figure("decode bf16, batch 1, compiled", 120.0, "tokens/s", DECODE)
    (predicted,) = (each.prediction for each in Expectations(H100, rates).complete([speed]))
    assert predicted.low < predicted.value < predicted.high
    assert predicted.calibrated < 0.8 * predicted.value  # half the bandwidth
    assert predicted.term


def test_a_cpu_has_no_datasheet_and_is_predicted_from_its_own_rates():
    cpu = Hardware("AMD EPYC", "cpu", 2**34, 2**34)
    rates = [figure("memory triad", 2e10), figure("matmul bf16", 2e11, "op/s")]
    speed = figure("decode bf16, batch 1, eager", 1.0, "tokens/s", DECODE)
    assert [each.prediction for each in Expectations(cpu, []).complete([speed])] == [None]
    triad, missing, *_, speed = Expectations(cpu, rates).complete([*rates, speed])
    assert (triad.prediction, isinstance(missing, Missing)) == (None, True)
    assert "no datasheets of CPUs" in missing.why
    assert "this run" in speed.prediction.source


def test_the_planner_learns_the_hosts_factors_from_what_was_measured():
    expectations = Expectations(H100, [])
    eager = DECODE.model_copy(update={"engine": None})
    speed = figure("decode bf16, batch 1, eager", 30.0, "tokens/s", eager)
    (completed,) = expectations.complete([speed])
    slower = completed.prediction.value / 30.0
    compiled = figure("decode bf16, batch 1, compiled", 60.0, "tokens/s", DECODE)
    calibration = expectations.calibration([speed, compiled], "lab")
    (factor,) = calibration.factors.values()
    assert factor.n == 1  # the compiled step is not how the runner works by default
    assert 1.0 < factor.factor <= slower  # one run moves a factor by a part of its error
    assert expectations.calibration([figure("memory triad", 1.0)], "lab") is None


@pytest.mark.parametrize(("tokens", "flops", "is_met"), [(170.0, 0.5, True), (100.0, 0.2, False)])
def test_the_products_own_goals_of_speed_are_checked_on_a_gpu(tokens, flops, is_met):
    rates = [figure("memory triad", 0.92 * BANDWIDTH), figure("matmul bf16", 0.7 * PEAK)]
    figures = [
        figure("model", 16.06e9, "bytes"),
        figure("decode bf16, batch 1, eager", 50.0, "tokens/s"),
        figure("decode bf16, batch 1, compiled", tokens, "tokens/s"),
        figure("decode int4, batch 1, compiled", 400.0 if is_met else 110.0, "tokens/s"),
        figure("training, model FLOP/s", flops * PEAK, "op/s"),
    ]
    goals = list(Expectations(H100, rates).goals(figures))
    assert [each.is_met for each in goals] == [is_met] * 3


def test_a_mig_instance_is_compared_with_its_share_and_an_unknown_gpu_says_that_it_is_not():
    triad = figure("memory triad", 0.9 * BANDWIDTH / 2)
    instance = Hardware("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "gpu", 42 * 10**9, 2**38)
    figured, check = Expectations(instance, []).complete([triad])
    assert figured.prediction.value == BANDWIDTH / 2
    assert check.is_met
    for name in ("NVIDIA H100 80GB HBM3 MIG 5g.50gb", "Homemade 9000"):
        unknown = instance._replace(name=name)
        _, missing = Expectations(unknown, []).complete([triad])
        assert f"no datasheet of {name} is known" in missing.why
