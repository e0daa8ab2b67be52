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


ASKED = {
    "model": "meta-llama/Llama-3.1-8B",
    "cluster": {"device": "h100-sxm-80gb"},
    "workload": {"kind": "serve", "input_tokens": 512, "output_tokens": 64, "concurrency": 4},
}
DOORS = {
    "estimate": ("planner.specs.estimate", "EstimateRequest"),
    "plan": ("planner.specs.estimate", "PlanRequest"),
}


def asking(door: str) -> str:
    """Return a program that asks one door one question."""
    module, document = DOORS[door]
    call = f"{door}({document}.model_validate({ASKED}))"
    return f"from planner.api import {door}; from {module} import {document}; {call}"


@pytest.mark.parametrize("door", DOORS)
def test_a_door_loads_nothing_heavy_while_it_answers_either(door):
    loaded = loaded_after(asking(door))

    assert loaded.isdisjoint({*HEAVY, "yaml"})
    assert "numpy" in loaded


def test_the_doors_load_what_answers_with_their_first_question():
    code = (
        "import sys; print(*(m for m in sys.modules if m.startswith('planner.') or m == 'numpy'))"
    )

    def modules(program: str) -> set[str]:
        command = [sys.executable, "-c", f"{program}\n{code}"]
        return set(subprocess.check_output(command, text=True, timeout=60).split())

    imported, estimated = modules("import planner.api"), modules(asking("estimate"))
    assert {name.split(".")[1] for name in imported if "." in name} == {"api", "specs"}
    assert "numpy" not in imported
    assert not any(name.startswith("planner.search") for name in estimated)
    assert "planner.search.inverse" not in modules(asking("plan"))


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
