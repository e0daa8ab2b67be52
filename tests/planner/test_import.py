"""The planner stays light: no web framework, no tensors, on import and while it works."""

import subprocess
import sys

import pytest

HEAVY = ("django", "torch", "celery", "redis", "transformers", "plotly", "httpx")


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_importing_the_planner_loads_nothing_heavy():
    assert loaded_after("import planner").isdisjoint(HEAVY)


def test_importing_the_planner_loads_neither_numpy_nor_pydantic():
    assert loaded_after("import planner").isdisjoint({"numpy", "pydantic"})


@pytest.mark.parametrize("statement", ["import planner", "from planner import estimate, plan"])
def test_the_solver_is_loaded_only_when_it_is_asked(statement):
    assert "scipy" not in loaded_after(statement)


def test_the_doors_load_nothing_heavy_either():
    assert loaded_after("from planner import estimate, plan").isdisjoint(HEAVY)


def test_the_doors_load_no_format_that_nobody_has_asked_for():
    assert "yaml" not in loaded_after("import planner.api")


def test_the_doors_build_no_validator_before_the_first_question():
    # pydantic's first validator looks through every installed package for plugins of its own.
    code = "import planner.api, sys; print('pydantic.plugin._loader' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_the_doors_are_the_same_ones():
    import planner
    from planner import api

    assert planner.estimate is api.estimate
    assert planner.plan is api.plan


def test_an_unknown_name_is_an_attribute_error():
    import planner

    assert not hasattr(planner, "predict")
