"""Everything on the wire: it survives JSON, and it is strict."""

import pytest
from pydantic import TypeAdapter, ValidationError

from runners import messages
from runners.jobspec import ArtefactModel, BenchmarkSpec, CompressSpec, JobSpec, TrainSpec
from runners.messages import EventBatch, ExitRecord, RunEvent, RunRequest, StopOrder
from runners.reasons import ERROR, FAILED, STOPPED, Reason

SPEC = TypeAdapter(JobSpec)
SPECS = [
    TrainSpec(max_steps=3),
    CompressSpec(model=ArtefactModel(attempt_id="a1"), method="nf4"),
    BenchmarkSpec(model=ArtefactModel(attempt_id="a1")),
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_survives_json(spec):
    request = RunRequest(attempt_id="a", job_id="j", number=1, fence="f", spec=spec)

    assert RunRequest.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_told_by_its_kind(spec):
    assert type(SPEC.validate_python(spec.model_dump())) is type(spec)


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(ValidationError, match="shell"):
        TrainSpec.model_validate({"kind": "train", "shell": "rm -rf /"})


def test_an_unknown_kind_of_job_is_refused():
    with pytest.raises(ValidationError, match="kind"):
        SPEC.validate_python({"kind": "exec", "argv": ["sh"]})


@pytest.mark.parametrize(
    ("name", "value"), [("max_steps", 0), ("micro_batch_size", -1), ("learning_rate", 0)]
)
def test_a_number_without_sense_is_refused_by_name(name, value):
    with pytest.raises(ValidationError, match=name):
        TrainSpec.model_validate({name: value})


def test_every_message_is_frozen():
    order = StopOrder(attempt_id="a", reason=Reason.SUPERSEDED)

    with pytest.raises(ValidationError, match="frozen"):
        order.reason = Reason.OK


def test_every_shape_on_the_wire_refuses_unknown_fields():
    shapes = messages.Message.__subclasses__()

    assert len(shapes) > 20
    assert {shape.model_config["extra"] for shape in shapes} == {"forbid"}


def test_a_batch_has_a_largest_size():
    event = RunEvent(seq=1, t_ms=0, kind="phase", body={})

    with pytest.raises(ValidationError, match="at most 500"):
        EventBatch(attempt_id="a", fence="f", events=(event,) * 501)


def test_numbers_of_events_start_at_one():
    with pytest.raises(ValidationError, match="seq"):
        RunEvent(seq=0, t_ms=0, kind="phase", body={})


def test_an_exit_record_needs_a_reason_of_the_list():
    with pytest.raises(ValidationError, match="reason"):
        ExitRecord.model_validate(
            {"exit_code": 0, "signal": None, "reason": "bad luck", "by": "reaper",
             "started_at_ms": None, "ended_at_ms": 1}
        )  # fmt: skip


def test_every_reason_but_success_and_expiry_has_one_class():
    classes = [FAILED, STOPPED, ERROR]

    assert sum(len(each) for each in classes) == len(FAILED | STOPPED | ERROR)
    assert set(Reason) - (FAILED | STOPPED | ERROR) == {Reason.OK, Reason.QUEUE_TIMEOUT}
