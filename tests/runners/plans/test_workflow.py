"""The document of a workflow: what is refused before anything is planned."""

import pytest
from pydantic import ValidationError

from planner.specs.base import location_of
from runners.plans.workflow import WorkflowDocument, document_of_variant, variants_of

TUNE = {"goal": "finetune", "model": "demo"}
AWQ = {"goal": "compress", "workload": {"method": "awq"}}
GGUF = {"goal": "compress", "workload": {"method": "gguf"}}
ENDPOINT = {"goal": "serve", "launch": {"run": "endpoint"}}


def swept(*methods):
    return {**AWQ, "sweep": {"workload.method": list(methods)}}


SWEEP = {"workload.lora_rank": [8, 16], "workload.learning_rate": [1e-4, 2e-4]}


@pytest.mark.parametrize(
    ("steps", "field"),
    [
        ([], "steps"),
        ([TUNE] * 9, "steps"),
        ([{"goal": "evaluate"}], "steps.0.goal"),
        ([{"goal": "serve"}, {"goal": "evaluate"}], "steps.0.goal"),
        ([TUNE, {**AWQ, "model": "demo"}], "steps.1.model"),
        ([TUNE, {"goal": "pretrain"}], "steps.1.goal"),
        ([AWQ, {"goal": "finetune"}], "steps.1.goal"),
        ([AWQ, AWQ], "steps.1.goal"),
        ([GGUF, {"goal": "evaluate"}], "steps.1.goal"),
        ([TUNE, ENDPOINT, {"goal": "evaluate"}], "steps.1.launch.run"),
        ([TUNE, {**ENDPOINT, "sweep": {"workload.concurrency": [1, 2]}}], "steps.1.sweep"),
        ([{**TUNE, "sweep": {"workload.lora_rank": list(range(1, 18))}}], "steps.0"),
        ([{**TUNE, "sweep": SWEEP | {"pins.micro_batch_size": [1, 2, 3, 4, 5]}}], "steps.0.sweep"),
        ([{**TUNE, "sweep": {"workload.no": [1]}}], "steps.0.sweep"),
        ([{**TUNE, "sweep": {"model.path": ["/"]}}], "steps.0.sweep"),
        (
            [TUNE, {"goal": "generate", "sweep": {"workload.batch_size": [1]}}, AWQ],
            "steps.1.sweep",
        ),
        ([{**TUNE, "sweep": {"workload.lora_rank": [8, "many"]}}], "steps.0.sweep"),
        ([TUNE, {"goal": "serve", "sweep": {"launch.run": ["job", "endpoint"]}}], "steps.1.sweep"),
        ([swept("awq", "gptq"), {"goal": "finetune"}], "steps.1.goal"),
        ([swept("awq", "gguf"), {"goal": "evaluate"}], "steps.0.sweep"),
        ([swept("gguf"), {"goal": "generate"}], "steps.1.goal"),
    ],
)
def test_what_does_not_go_together_is_refused_at_its_field(steps, field):
    with pytest.raises(ValidationError) as raised:
        WorkflowDocument.model_validate({"steps": steps})
    paths = [".".join(map(str, location_of(each))) for each in raised.value.errors()]
    assert any(path.startswith(field) for path in paths), paths


def test_every_combination_of_a_sweep_is_a_document_and_a_name_says_the_order():
    workflow = WorkflowDocument.model_validate(
        {"steps": [{**TUNE, "sweep": SWEEP}, {"goal": "evaluate"}, AWQ, ENDPOINT]}
    )
    assert workflow.title == "Fine-tune, evaluate, compress and serve"
    first = workflow.steps[0]
    made = [document_of_variant(first, each) for each in variants_of(first)]
    assert [each["workload"] for each in made] == [
        {"lora_rank": rank, "learning_rate": rate} for rank in (8, 16) for rate in (1e-4, 2e-4)
    ]
    assert variants_of(workflow.steps[1]) == [{}]
