"""What a training by TRL is asked for, what its records become, and what it reports."""

import io
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from transformers import TrainerControl, TrainerState

from runners.jobs.data_files import DataFile
from runners.jobs.events import read_events
from runners.jobs.loading import fresh_model
from runners.jobs.memory import Peak
from runners.jobs.runtime import BadInputError
from runners.jobs.train.checkpoint import TrainState, checkpoints, read_latest_state
from runners.jobs.train.run_progress import DivergedError
from runners.jobs.train.trl.data import data_report, read_records
from runners.jobs.train.trl.events import Course, metrics_of
from runners.jobs.train.trl.job import _check_separation
from runners.jobspec import FileData, FolderModel, TrainSpec
from runners.jobspec.base import LoraOptions
from runners.jobspec.objectives import OBJECTIVES
from runners.launchers.launch import environment_of, render_argv
from tests.runners.jobs.tiny import TINY_CONFIG

DPO = {
    "engine": "trl",
    "objective": "dpo",
    "model": FolderModel(path="m"),
    "data": FileData(path="a.jsonl"),
    "max_steps": 2,
    "time_budget_seconds": None,
    "checkpoint_every_seconds": 1e-6,
}
SFT = {"objective": "next_token"}
FOLDER = FolderModel(path="large")
TAUGHT = {"objective": "distillation", "teacher": FOLDER, "max_completion_length": 64}
PACKED = {"samples": {"packing_strategy": "bfd"}}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
JUDGED = {"prompt": "q", "completion": "a", "label": True}


def lines(*rows):
    return DataFile(
        "a.jsonl", io.BytesIO("".join(f"{json.dumps(row)}\n" for row in rows).encode())
    )


def test_a_spec_that_trl_cannot_train_is_refused_with_the_way_out():
    for changes, said in [
        ({"engine": "slipway"}, "objective dpo is one of TRL's trainers.*choose engine trl"),
        ({"objective": "classification"}, "engine trl has no objective classification"),
        ({"compiled": True}, "compiled is an option of the engine slipway; leave it out"),
        ({"optimizer": "lion"}, "optimizer is an option of the engine slipway"),
        ({"compute_dtype": "fp8"}, "compute_dtype fp8 is not one of engine trl's; choose bf16"),
        ({"layout": {"data_parallel_size": 2}}, "engine trl trains on one device"),
        ({"model": {"source": "demo"}}, "engine trl tunes trained weights"),
        ({"data": {"source": "host"}}, "engine trl reads one file or data set"),
        ({"data": FileData(path="a.jsonl", format="kto")}, "DPO learns from records of preference"),
        ({"objective": "kto", "micro_batch_size": 1}, "KTO compares the answers of a micro-batch"),
        ({"objective": "orpo", "preference_loss": "ipo"}, "preference_loss is no option"),
        ({"objective": "reward", "beta": 0.3}, "beta is no option of the objective reward"),
        ({"teacher": FOLDER}, "teacher is no option of the objective dpo"),
        (TAUGHT | {"teacher": None}, "teacher is not given, and distillation learns its"),
        (TAUGHT | {"teacher": FolderModel(path="m")}, "teacher is the model itself"),
        (
            TAUGHT | {"teacher": FolderModel(path="m"), "lora": {"rank": 8}},
            "teacher is the model itself.*base_dtype nf4",
        ),
        (TAUGHT | {"beta": 1.5}, "beta is 1.5, and of distillation it lies between 0"),
        (TAUGHT | {"num_generations": 4}, "num_generations is no option of the objective dist"),
        (TAUGHT | {"text_samples": {"every_steps": 9}}, "text_samples is an option of the engine"),
        (TAUGHT | {"max_completion_length": 256}, "leaves no token for a prompt"),
        ({"keep_best": True}, "keep_best is an option of the engine slipway"),
        ({"samples": {"rows": "packed"}}, "name bfd, bfd_split or wrapped, or choose rows padded"),
        (PACKED, "gives each answer a row of its own; leave it out"),
        (SFT | {"samples": PACKED["samples"] | {"rows": "padded"}}, "samples.rows is padded and"),
        (SFT | {"samples": PACKED["samples"] | {"too_long": "leave_out"}}, "choose too_long cut"),
        ({"checkpoint_writing": "background"}, "checkpoint_writing background is not one of"),
        ({"attention": "eager"}, "attention is an option of the engine slipway"),
        ({"parallel": {"processes_per_host": 2}}, "engine trl trains in one process"),
        ({"objective": "reward", "lora": LoraOptions(is_merged=False)}, "lora.is_merged is false"),
        ({"objective": "reward", "lora": LoraOptions(base_dtype="nf4")}, "choose compute"),
    ]:  # fmt: skip
        with pytest.raises(ValidationError, match=said):
            TrainSpec(**(DPO | changes))
    with pytest.raises(ValidationError, match=r"data\.format is kto, whose answers are compared"):
        TrainSpec(data=FileData(path="a.jsonl", format="kto"), model=FolderModel(path="m"))
    with pytest.raises(ValidationError, match="whose packed rows are filled by best fit"):
        TrainSpec(**SFT | PACKED | {"engine": "slipway"})
    assert TrainSpec(**DPO | SFT | PACKED).samples.rows == "packed"
    for own in ({"beta": 0.2}, {"preference_loss": "ipo"}, {"precompute_reference": True}):
        with pytest.raises(ValidationError, match="is an option of the engine trl; leave it out"):
            TrainSpec(**own)
    spec = TrainSpec(**DPO)
    assert (spec.keep_best, spec.samples.rows) == (False, "padded")
    assert TrainSpec.model_validate_json(spec.model_dump_json()) == spec


def test_it_runs_in_trls_environment_and_reads_its_data_once_without_an_end(tmp_path):
    spec = TrainSpec(**DPO | {"max_steps": None})

    assert environment_of(spec.model_dump()) == "trl"
    assert render_argv(spec, tmp_path)[1:] == [
        *("-m", "runners.jobs.in_environment", "trl", "runners.jobs.train"), str(tmp_path),
    ]  # fmt: skip
    assert environment_of(TrainSpec().model_dump()) == "main"


def test_records_become_trls_columns_and_what_was_read_is_said(tmp_path):
    message = {"role": "assistant", "content": "a"}
    chat = {"messages": [{"role": "user", "content": "q"}, message]}
    judged = [JUDGED, JUDGED | {"label": False}]
    for objective, rows, columns in (
        ("dpo", [PAIR, PAIR | {"rejected": "a", "id": 7}], None),
        ("kto", judged, judged),
        ("next_token", [chat, chat], [chat, chat]),
    ):
        target = tmp_path / f"{objective}.jsonl"
        found = read_records(lines(*rows), OBJECTIVES[objective], target)
        written = [json.loads(line) for line in target.read_text().splitlines()]
        assert written == (columns or [PAIR, PAIR | {"rejected": "a"}])
        assert found.num_records == 2
        if objective == "dpo":
            assert found.remarks == [
                "a.jsonl: fields that are left out, with their records: “id” (1)",
                "a.jsonl: 1 pairs have two equal answers, which teach nothing",
            ]


def test_records_that_an_objective_does_not_learn_from_are_refused_by_line_and_field(tmp_path):
    for objective, rows, said in [
        ("dpo", [JUDGED, JUDGED], "line 1: its fields are of the format kto.*; choose KTO"),
        ("kto", [PAIR, PAIR], "format preference.*; choose DPO or ORPO or reward model"),
        ("dpo", [PAIR, PAIR | {"chosen": 3}], "line 2: “chosen” is not text but int"),
        ("kto", [JUDGED, JUDGED | {"label": "x"}], "line 2: “label” is 'x'; it must be true or"),
        ("kto", [JUDGED, JUDGED], "every “label” says wanted; KTO learns from both"),
        ("dpo", [PAIR], "a.jsonl holds 1 records; give at least two"),
    ]:
        with pytest.raises(BadInputError, match=said):
            read_records(lines(*rows), OBJECTIVES[objective], tmp_path / "out.jsonl")


def test_the_report_of_the_data_has_each_sequence_its_length_and_its_cut():
    rows = [{"prompt_ids": [1], "chosen_ids": [2] * n, "rejected_ids": [3]} for n in (1, 4)]
    report = data_report(OBJECTIVES["dpo"], rows, str, found=3, longest=4)

    assert report.figures() == {
        "data_documents": 2, "data_tokens": 2 + 2 + 4 + 2, "data_cut": 1, "data_left_out": 1,
    }  # fmt: skip
    cut = {"tokens": 5, "cut": True, "text": "[1, 2, 2, 2]"}
    assert report.document()["first"][1]["chosen"] == cut
    assert report.document()["tokens"] == {"median": 2, "p95": 5, "longest": 5}
    with pytest.raises(BadInputError, match=r"all 3 records are longer than sequence_length.*4"):
        data_report(OBJECTIVES["dpo"], [], str, found=3, longest=4)


def test_the_report_of_packed_rows_counts_samples_and_what_is_cut_of_them():
    rows = [
        {"input_ids": [1] * 4, "seq_lengths": [4]},
        {"input_ids": [2, 3, 3], "seq_lengths": [1, 2]},
    ]
    for packing, cut, left_out in (("bfd", 1, 1), ("bfd_split", 0, 0), ("wrapped", 0, 0)):
        given = [{"input_ids": row["input_ids"]} for row in rows] if packing == "wrapped" else rows
        report = data_report(OBJECTIVES["next_token"], given, str, 4, 4, packing)
        found = (report.num_cut, report.num_left_out, report.num_rows)
        assert found == (cut, left_out, 2), packing
        assert report.figures()["data_tokens"] == 7
        assert report.figures()["data_documents"] == (3 if packing == "bfd" else 4), packing
        shown = [each["text"]["text"] for each in report.first]
        assert shown == (["[1, 1, 1, 1]", "[2, 3, 3]"] if packing == "wrapped" else
                         ["[1, 1, 1, 1]", "[2]", "[3, 3]"])  # fmt: skip


def test_a_model_that_mixes_the_texts_of_a_packed_row_is_refused_by_name():
    model = fresh_model(TINY_CONFIG, torch.float32)

    def collate(rows, *, restarts):
        (row,) = rows
        starts = [range(length) for length in row["seq_lengths"]]
        positions = [each for start in starts for each in start]
        ids = torch.tensor([row["input_ids"]])
        places = torch.tensor([positions if restarts else list(range(ids.shape[1]))])
        return {"input_ids": ids, "labels": ids, "position_ids": places}

    given = SimpleNamespace(model=model, data_collator=partial(collate, restarts=True))
    _check_separation(given)
    given.data_collator = partial(collate, restarts=False)
    with pytest.raises(
        BadInputError, match=r"LlamaForCausalLM with attention sdpa mixes the texts"
    ):
        _check_separation(given)


class Meter:
    """A meter of memory that always reads the same."""

    def read(self):
        return Peak(7, 3, "")


@pytest.fixture
def course(make_job):
    job = make_job(TrainSpec(**DPO))
    return Course(job, job.spec, Meter(), TrainState(inputs=(("training data", "d"),)), 2)


def step(course, number, loss=0.5, **logs):
    """Take one step as transformers' trainer does, and return its control."""
    control, state = TrainerControl(), TrainerState(global_step=number)
    output = course.job.scratch_dir()
    course.on_step_begin()
    course.on_step_end(None, state, control)
    course.on_log(None, state, control, {"loss": loss, "grad_norm": 1.0, **logs})
    if control.should_save:
        (output / f"checkpoint-{number}").mkdir()
        (output / f"checkpoint-{number}" / "model.safetensors").write_text("w")
        course.on_save(SimpleNamespace(output_dir=str(output)), state, control)
    return control


def test_a_steps_metrics_have_the_usual_names_and_tokens_per_second(course, events_path):
    step(course, 1, learning_rate=1e-3, num_tokens=30, epoch=0.1, **{"rewards/margins": 0.2})
    step(course, 2, num_tokens=50)
    course.job.emitter.close()

    points = [each["body"] for each in read_events(events_path) if each["kind"] == "metric"]
    first = next(each for each in points if "loss" in each["values"])
    assert first["step"] == 1
    assert first["values"]["rewards/margins"] == 0.2
    assert first["values"]["peak_memory_bytes"] == 7
    assert {"epoch", "num_tokens"}.isdisjoint(first["values"])
    assert course.state.tokens == 50
    assert course.figures()["steps"] == 2
    reward = metrics_of({"loss": 1.0, "accuracy": 0.5, "margin": 2.0, "mean_reward": 3.0})
    assert reward == {
        "loss": 1.0, "rewards/accuracies": 0.5, "rewards/margins": 2.0, "rewards/mean": 3.0,
    }  # fmt: skip


def test_checkpoints_are_complete_and_kept_by_rule_and_a_stop_saves_the_last(course):
    for number in (1, 2, 3):
        course.max_steps = 9
        assert step(course, number).should_training_stop is False
    [newest] = checkpoints(course.job.checkpoint_dir)
    assert sorted(each.name for each in newest.iterdir()) == ["model.safetensors", "state.json"]
    assert read_latest_state(course.job.checkpoint_dir).inputs == (("training data", "d"),)

    course.job.stop_requested.set()
    assert step(course, 4).should_training_stop
    assert course.is_stopped
    assert read_latest_state(course.job.checkpoint_dir).step == 4


def test_the_last_step_ends_the_training_and_a_loss_that_is_no_number_is_named(course):
    assert step(course, 2).should_training_stop
    assert not course.is_stopped
    with pytest.raises(DivergedError, match=r"the loss became nan at step 1.*below 0.003"):
        step(course, 1, loss=math.nan)
