"""The command line: JSON Lines in order, errors by name, exit statuses."""

import io
import json
import sys

import pytest

from planner.__main__ import main
from tests.planner.asking import LLAMA_70B, LLAMA_405B, TRAIN, document


def run(monkeypatch, capsys, arguments, lines=()):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    status = main(arguments)
    return status, capsys.readouterr()


def test_each_line_is_answered_in_order_with_its_id(monkeypatch, capsys):
    lines = [document(id=name) for name in ("a", "b", "c")]

    status, output = run(monkeypatch, capsys, ["estimate"], lines)

    answers = [json.loads(line) for line in output.out.splitlines()]
    assert status == 0
    assert [answer["id"] for answer in answers] == ["a", "b", "c"]
    assert all(answer["fits"] for answer in answers)


def test_a_wrong_line_gives_an_error_and_the_run_goes_on(monkeypatch, capsys):
    lines = [document(id=1, device="h1000"), document(id=2)]

    status, output = run(monkeypatch, capsys, ["estimate"], lines)

    wrong, right = (json.loads(line) for line in output.out.splitlines())
    assert status == 3
    assert wrong["id"] == 1
    assert wrong["error"]["code"] == "unknown_device"
    assert wrong["error"]["field"] == "cluster.device"
    assert right["fits"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"workload": {"kind": "serve", "input_tokens": -1, "output_tokens": 5}}, "input_tokens"),
        ({"workload": {"kind": "dance"}}, "workload"),
        ({"strategy": {"zero_stage": 7}}, "strategy.zero_stage"),
        ({"surprise": 1}, "surprise"),
        ({"cluster": {"device": {"memory_bytes": 5}}}, "memory_bandwidth_bytes_per_second"),
    ],
)
def test_a_wrong_field_is_named(monkeypatch, capsys, change, field):
    _, output = run(monkeypatch, capsys, ["estimate"], [document(id=9, **change)])

    error = json.loads(output.out)["error"]
    assert field in error["field"]
    assert field.rsplit(".", maxsplit=1)[-1] in error["message"]


def test_a_line_that_is_no_json_is_an_error_too(monkeypatch, capsys):
    status, output = run(monkeypatch, capsys, ["estimate"], ["{nonsense"])

    assert status == 3
    assert json.loads(output.out)["error"]["code"] == "bad_request"


def test_empty_lines_are_skipped(monkeypatch, capsys):
    status, output = run(monkeypatch, capsys, ["estimate"], ["", document(id=1), ""])

    assert status == 0
    assert len(output.out.splitlines()) == 1


def test_fields_that_do_not_apply_are_absent(monkeypatch, capsys):
    _, output = run(monkeypatch, capsys, ["estimate"], [document(id=1)])

    answer = json.loads(output.out)
    assert "mfu" not in answer["performance"]
    assert "gradients" not in answer["memory"]["breakdown_bytes"]
    assert "host_bytes" not in answer["memory"]


def test_a_plan_is_one_document_and_status_zero(monkeypatch, capsys):
    status, output = run(monkeypatch, capsys, ["plan"], [document(objective="latency")])

    answer = json.loads(output.out)
    assert status == 0
    assert set(answer) >= {"plans", "pareto", "rejected", "suggestions", "searched", "calibration"}
    assert answer["plans"][0]["techniques"]


def test_nothing_fits_is_status_three(monkeypatch, capsys):
    status, output = run(monkeypatch, capsys, ["plan"], [document(model=LLAMA_405B)])

    assert status == 3
    assert json.loads(output.out)["rejected"]


def test_a_wrong_request_is_status_two_with_one_line_of_words(monkeypatch, capsys):
    status, output = run(monkeypatch, capsys, ["plan"], [document(model="nobody/nothing")])

    assert status == 2
    assert "nobody/nothing" in output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize("kind", ["models", "devices", "instances", "techniques"])
def test_every_catalog_lists_entries_with_their_source(monkeypatch, capsys, kind):
    _, output = run(monkeypatch, capsys, [kind, "--json"])

    rows = json.loads(output.out)
    assert len(rows) >= 25
    assert all(row["source"] for row in rows)


def test_a_catalog_as_text_has_one_line_per_entry(monkeypatch, capsys):
    _, output = run(monkeypatch, capsys, ["models"])

    assert output.out.splitlines()[0].startswith("meta-llama/Llama-3.1-8B")
    assert "8,030,261,248 parameters" in output.out


@pytest.mark.parametrize(
    ("kind", "key", "field", "value"),
    [
        ("models", LLAMA_70B, "parameters", 70_553_706_496),
        ("devices", "h100", "id", "h100-sxm5-80gb"),
        ("techniques", "gptq", "key", "gptq"),
    ],
)
def test_one_entry_can_be_asked_for(monkeypatch, capsys, kind, key, field, value):
    _, output = run(monkeypatch, capsys, [kind, "--json", key])

    assert json.loads(output.out)[field] == value


@pytest.mark.parametrize("kind", ["models", "devices", "instances", "techniques"])
def test_an_unknown_entry_is_status_two(monkeypatch, capsys, kind):
    status, output = run(monkeypatch, capsys, [kind, "zzz-unknown"])

    assert status == 2
    assert "zzz-unknown" in output.err


def test_the_first_plan_of_a_request_can_be_exported(monkeypatch, capsys):
    request = document(model=LLAMA_70B, devices=8, engine="vllm")

    status, output = run(monkeypatch, capsys, ["export", "--format", "vllm"], [request])

    assert status == 0
    assert f"vllm serve {LLAMA_70B} \\\n  --tensor-parallel-size" in output.out


def test_a_chosen_plan_is_exported_as_it_is(monkeypatch, capsys):
    request = document(model=LLAMA_70B, devices=8, engine="vllm", top=3)
    _, planned = run(monkeypatch, capsys, ["plan"], [request])
    third = json.loads(planned.out)["plans"][2]

    _, output = run(
        monkeypatch, capsys, ["export", "--format", "sglang"], [{**request, "plan": third}]
    )

    assert f"--tp-size {third['strategy']['tensor_parallel_size']}" in output.out


def test_an_answer_of_plan_is_exported_by_itself_at_any_rank(monkeypatch, capsys):
    _, planned = run(monkeypatch, capsys, ["plan"], [document(engine="vllm", devices=8, top=3)])
    answer = json.loads(planned.out)
    arguments = ["export", "--format", "sglang", "--rank", "2"]

    _, output = run(monkeypatch, capsys, arguments, [answer])

    second = answer["plans"][1]["strategy"]
    assert f"--max-running-requests {-(-16 // second['data_parallel_size'])}" in output.out


def test_a_rank_that_the_answer_lacks_is_refused(monkeypatch, capsys):
    arguments = ["export", "--format", "vllm", "--rank", "99"]
    status, output = run(monkeypatch, capsys, arguments, [document(engine="vllm")])

    assert status == 2
    assert "rank is 99: there are" in output.err


def test_what_measures_an_export_is_a_script_with_the_prediction(monkeypatch, capsys):
    arguments = ["export", "--format", "vllm", "--measure"]
    status, output = run(monkeypatch, capsys, arguments, [document(engine="vllm")])

    assert status == 0
    compile(output.out, "measure.py", "exec")
    assert '"ttft_seconds": {' in output.out


def test_notes_of_a_format_without_comments_go_to_standard_error(monkeypatch, capsys):
    request = document(devices=8, workload={**TRAIN, "method": "lora"})
    _, output = run(monkeypatch, capsys, ["export", "--format", "deepspeed"], [request])

    assert "train_batch_size" in json.loads(output.out)
    assert "method lora" in output.err


def test_accuracy_prints_the_page_of_the_docs(monkeypatch, capsys):
    monkeypatch.setattr("planner.fitting.pages.accuracy.accuracy_page", lambda: "# Accuracy\n")

    assert main(["accuracy"]) == 0
    assert capsys.readouterr().out == "# Accuracy\n"


def test_calibrate_prints_the_factor_file(monkeypatch, capsys):
    monkeypatch.setattr("planner.fitting.factors.build_factors", lambda: {"version": "factors-1"})

    assert main(["calibrate"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": "factors-1"}


def test_an_inverse_question_is_answered_with_one_document(monkeypatch, capsys):
    request = {**document(engine="vllm"), "question": "most_users"}
    status, output = run(monkeypatch, capsys, ["inverse"], [request])
    answer = json.loads(output.out)

    assert status == 0
    assert answer["limits"][0]["value"] >= 16
    assert answer["limits"][0]["beyond"]["value"] == answer["limits"][0]["value"] + 1


def test_an_inverse_question_without_an_answer_is_status_three(monkeypatch, capsys):
    small = document(model=LLAMA_405B, device="rtx-4090", engine="vllm")
    status, output = run(monkeypatch, capsys, ["inverse"], [{**small, "question": "most_users"}])

    assert status == 3
    assert json.loads(output.out)["smallest"]["constraint"] == "memory"


def test_an_unknown_question_is_refused_with_its_field(monkeypatch, capsys):
    status, output = run(
        monkeypatch, capsys, ["inverse"], [{**document(), "question": "meaning_of_life"}]
    )

    assert status == 2
    assert output.err.startswith("question: ")
