"""The record of an estimate: every term with equation, values, result and origin."""

import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping

import pytest

from planner.cost.quantity import Equation
from tests.planner.asking import CPU, GENERATE, LLAMA_70B, SERVE, TINY, TRAIN, ask, held

WORKLOADS = {
    "serve": SERVE,
    "generate": GENERATE,
    "train": TRAIN,
    "compress": {"kind": "compress", "method": "gptq"},
}


@pytest.fixture(params=sorted(WORKLOADS))
def explained(request):
    return ask(devices=2, workload=WORKLOADS[request.param])


def test_every_term_has_an_equation_and_a_unit(explained):
    assert explained.terms or explained.strategy
    for term in explained.terms:
        assert "=" in term.equation
        assert term.unit
        assert term.name


def test_every_input_has_a_symbol_and_a_value(explained):
    for term in explained.terms:
        for entry in term.inputs:
            assert entry.symbol
            assert isinstance(entry.value, int | float | str)


def _equations() -> Iterator[Equation]:
    """Yield the equations that modules of the planner hold, also in their tables."""
    modules = [module for name, module in sys.modules.items() if name.startswith("planner.")]
    for value in [each for module in modules for each in vars(module).values()]:
        inner = value.values() if isinstance(value, Mapping) else value
        for one in inner if isinstance(inner, Iterable) else (value,):
            if type(one) is Equation:
                yield one


def test_an_equation_lists_every_symbol_also_of_what_nobody_gives():
    """Arguments with a default were left out: the number of all-reduces, the chunks of a stage."""
    formulas = {id(one): one for one in _equations()}.values()
    assert len(formulas) > 40
    for formula in formulas:
        needed = inspect.signature(formula.compute).parameters.values()
        given = {one.name: 1.0 for one in needed if one.default is inspect.Parameter.empty}
        listed = {one.symbol for one in formula.inputs(given)}

        optional = {one.name for one in needed if one.default is None}
        told = {symbol for name, symbol in formula.symbols.items() if name not in optional}
        assert told <= listed, formula.key


def test_a_calibrated_equation_lists_its_factor_by_the_symbol_that_it_has(explained):
    for term in explained.terms:
        if "= k · (" in term.equation:
            assert "k" in {one.symbol for one in term.inputs}, term.key


def test_every_modelled_rate_says_who_published_it(explained):
    for term in explained.terms:
        if term.operator_class in {"compute", "memory_bandwidth", "communication", "overhead"}:
            assert term.source


def test_the_memory_terms_are_the_memory_of_the_answer():
    found = ask()
    for name in ("weights", "kv_cache"):
        recorded = sum(t.value for t in found.terms if (t.group, t.key) == ("memory", name))
        assert recorded == pytest.approx(held(found, name), abs=1)


def test_the_terms_of_a_pass_add_up_to_its_seconds():
    found = ask(engine="vllm", devices=4, strategy={"tensor_parallel_size": 4})
    seconds = [term.value for term in found.terms if term.group == "prefill" and term.unit == "s"]

    assert sum(seconds) == pytest.approx(found.performance.prefill_seconds)


def test_the_breakdown_of_a_phase_adds_up_to_its_seconds():
    found = ask(model=TINY, device=CPU, workload=GENERATE)

    decode = sum(found.time_breakdown_seconds["decode"].values())
    assert decode == pytest.approx(found.performance.tpot_seconds)


def test_an_equation_of_a_roofline_can_be_checked_by_hand():
    (term,) = [t for t in ask().terms if (t.group, t.key) == ("decode", "linear")]
    given = {entry.symbol: entry.value for entry in term.inputs}

    compute = given["F"] / (given["peak"] * given["e_c"])
    memory = given["Q"] / (given["bandwidth"] * given["e_m"])
    assert term.value == pytest.approx(max(compute, memory))


def test_only_the_fullest_stage_is_explained():
    found = ask(model=LLAMA_70B, devices=4, strategy={"pipeline_parallel_size": 4})

    assert len([t for t in found.terms if (t.group, t.key) == ("memory", "weights")]) == 1


def test_the_bound_is_the_class_that_takes_the_most_time():
    found = ask(workload={**GENERATE, "output_tokens": 500})
    decode = found.time_breakdown_seconds["decode"]

    assert found.bound_by == max(decode, key=decode.get)


def test_no_figure_is_without_a_number(explained):
    for name, value in explained.performance:
        assert value is None or math.isfinite(value), name


def test_an_interval_holds_its_figure(explained):
    for name, (low, high) in explained.interval.items():
        value = getattr(explained.performance, name, None) or getattr(explained, name, None)
        value = explained.memory.per_device_peak_bytes if value is None else value
        assert low <= value <= high
