"""What binds: phases apart, one operator once, and parts that add up to their headline."""

import functools

import pytest

from tests.webapp.plans.test_verdict_words import CARD, NODE, SERVE, WORK, answer_of
from webapp.core.units import NBSP
from webapp.plans.explanation import OTHERS, PHASES, _in_unit_of_total, phases_of
from webapp.plans.verdict import GOAL_FIGURES

LLAMA = "meta-llama/Llama-3.1-8B"
SMALL = "HuggingFaceTB/SmolLM2-135M"
CASES = {
    "serve": (LLAMA, CARD, SERVE, {"engine": "vllm"}),
    "serve on eight": ("meta-llama/Llama-3.1-70B", NODE, SERVE, {"engine": "vllm"}),
    "alone": (LLAMA, CARD, {**SERVE, "concurrency": 1}, {"engine": "vllm"}),
    "generate": (SMALL, CARD, WORK["generate"], {}),
    "finetune": (SMALL, CARD, WORK["finetune"], {}),
    "a pipeline": (
        LLAMA,
        NODE,
        WORK["pretrain"] | {"global_batch_size": 32},
        {"pins": {"pipeline_parallel_size": 4}},
    ),
    "compress": (SMALL, CARD, WORK["compress"], {}),
}


@functools.cache
def best_of(case):
    model, cluster, work, more = CASES[case]
    return answer_of(model, cluster, work, **more).plans[0]


def test_the_parts_of_a_phase_add_up_to_its_headline_the_largest_first():
    for case in CASES:
        best = best_of(case)
        phases = phases_of(best)
        assert phases, case
        for phase in phases:
            seconds = [part.seconds for part in phase.parts]
            assert sum(seconds) == pytest.approx(phase.seconds, rel=1e-9), (case, phase)
            figure = next(figure for name, figure, _ in PHASES.values() if name == phase.name)
            assert phase.seconds == getattr(best.performance, figure), (case, phase)

            names = [part.name for part in phase.parts]
            assert len(set(names)) == len(names), (case, names)
            assert OTHERS not in names[:-1], (case, names)  # what is gathered stands last
            named = [part.seconds for part in phase.parts if part.name != OTHERS]
            assert named == sorted(named, reverse=True), (case, phase)


def test_a_part_has_the_unit_and_the_decimals_of_its_total():
    for seconds, total, words in [
        (0.0929, 0.114, "93~ms"),
        (0.000658, 0.114, "1~ms"),
        (0.0000386, 0.00682, "0.04~ms"),
        (4.03, 5.11, "4.03~s"),
        (0.0474, 5.11, "0.05~s"),
        (0.001, 5.11, "< 0.01~s"),
        (816.0, 1249.0, "13.6~min"),
        (-0.2, 5.11, "\N{MINUS SIGN}0.20~s"),
        (400_000.0, 1_400_000.0, "4.6~days"),
    ]:
        assert _in_unit_of_total(seconds, total) == words.replace("~", NBSP), (seconds, total)


def test_reading_a_prompt_and_writing_a_token_are_two_phases_named_as_the_figures():
    phases = phases_of(best_of("generate"), is_batch=True)
    assert phases[0].name in [label for _, label, _ in GOAL_FIGURES["generate"]]
    assert [phase.name for phase in phases] == ["Prompts read in", "Each further token"]

    phases = phases_of(best_of("serve"))
    assert [phase.name for phase in phases] == ["First token, mean", "Each further token, mean"]
    assert phases[0].parts[0].name == "Linear layers" or "Queueing" in phases[0].parts[0].name
    assert "Linear layers" in [part.name for part in phases[1].parts]
