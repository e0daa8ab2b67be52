"""Every model that a row of the validation tables names is one that the planner can cost."""

import pytest

from planner.fitting.evidence import model_named, model_of, table
from planner.workload.resolve import resolve_model

# Pictures go through a tower of their own before these models' text is costed.
WITH_PICTURES = ("VILA", "NVILA")


@pytest.mark.parametrize("name", ["memory", "memory_fit", "training"])
def test_every_model_of_a_table_resolves(name):
    models = [model_of(row) for row in table(name)]

    for model in {model for model in models if isinstance(model, str)}:
        assert resolve_model(model).num_hidden_layers > 0, model


def test_every_language_model_of_other_inference_rows_resolves():
    names = {row["model"] for row in table("inference_other")}

    for name in sorted(names):
        if not name.startswith(WITH_PICTURES):
            assert resolve_model(model_named(name)).num_hidden_layers > 0, name
