"""The command line, called and as a process of its own, and what it loads."""

import io
import json
import subprocess
import sys
from functools import cache

import pytest

import planner
from planner import api
from planner.__main__ import main
from tests.planner.asking import LLAMA_70B, LLAMA_405B, TRAIN, document
from tests.plugins.extent import first


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a way to run the command line, which tells its status and what it wrote."""

    def run_(arguments, lines=()):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status = main(arguments)
        return status, capsys.readouterr()

    return run_


def test_each_line_is_answered_in_order_with_its_id(run):
    lines = [document(id=name) for name in ("a", "b", "c")]
    status, output = run(["estimate"], lines)
    answers = [json.loads(line) for line in output.out.splitlines()]
    assert status == 0
    assert [answer["id"] for answer in answers] == ["a", "b", "c"]
    assert all(answer["fits"] for answer in answers)

    # Empty lines are skipped.
    status, output = run(["estimate"], ["", document(id=1), ""])
    assert status == 0
    assert len(output.out.splitlines()) == 1

    # Fields that do not apply are absent.
    _, output = run(["estimate"], [document(id=1)])
    answer = json.loads(output.out)
    assert "mfu" not in answer["performance"]
    assert "gradients" not in answer["memory"]["breakdown_bytes"]
    assert "host_bytes" not in answer["memory"]


def test_a_wrong_line_gives_an_error_and_the_run_goes_on(run):
    lines = [document(id=1, device="h1000"), document(id=2)]
    status, output = run(["estimate"], lines)
    wrong, right = (json.loads(line) for line in output.out.splitlines())
    assert status == 3
    assert wrong["id"] == 1
    assert wrong["error"]["code"] == "unknown_device"
    assert wrong["error"]["field"] == "cluster.device"
    assert right["fits"]

    # A wrong field is named.
    for change, field in [
        ({"workload": {"kind": "serve", "input_tokens": -1, "output_tokens": 5}}, "input_tokens"),
        ({"workload": {"kind": "dance"}}, "workload"),
        ({"strategy": {"zero_stage": 7}}, "strategy.zero_stage"),
        ({"surprise": 1}, "surprise"),
        ({"cluster": {"device": {"memory_bytes": 5}}}, "memory_bandwidth_bytes_per_second"),
    ]:
        _, output = run(["estimate"], [document(id=9, **change)])
        error = json.loads(output.out)["error"]
        assert field in error["field"]
        assert field.rsplit(".", maxsplit=1)[-1] in error["message"]

    # A line that is no JSON is an error too.
    status, output = run(["estimate"], ["{nonsense"])
    assert status == 3
    assert json.loads(output.out)["error"]["code"] == "bad_request"


def test_a_plan_is_one_document_with_a_status(run):
    # A plan is one document and status zero.
    status, output = run(["plan"], [document(objective="latency")])
    answer = json.loads(output.out)
    assert status == 0
    assert set(answer) >= {"plans", "pareto", "rejected", "suggestions", "searched", "calibration"}
    assert answer["plans"][0]["techniques"]

    # A wrong request is status two with one line of words.
    status, output = run(["plan"], [document(model="nobody/nothing")])
    assert status == 2
    assert "nobody/nothing" in output.err
    assert "Traceback" not in output.err


def test_every_catalog_lists_its_entries_or_one(run):
    # Every catalog lists entries with their source.
    for kind in ["models", "devices", "instances", "techniques"]:
        _, output = run([kind, "--json"])
        rows = json.loads(output.out)
        assert len(rows) >= 25
        assert all(row["source"] for row in rows)

    # A catalog as text has one line per entry.
    _, output = run(["models"])
    assert output.out.splitlines()[0].startswith("meta-llama/Llama-3.1-8B")
    assert "8,030,261,248 parameters" in output.out

    # One entry can be asked for.
    for kind, key, field, value in [
        ("models", LLAMA_70B, "parameters", 70_553_706_496),
        ("devices", "h100", "id", "h100-sxm5-80gb"),
        ("techniques", "gptq", "key", "gptq"),
        ("topologies", "gb200-nvl72", "nvlink_domain_devices", 72),
    ]:
        _, output = run([kind, "--json", key])
        assert json.loads(output.out)[field] == value

    # An unknown entry is status two.
    for kind in ["models", "devices", "instances", "topologies", "techniques"]:
        status, output = run([kind, "zzz-unknown"])
        assert status == 2
        assert "zzz-unknown" in output.err


def test_a_plan_is_exported_by_its_request_itself_or_its_rank(run):
    # The first plan of a request can be exported.
    request = document(model=LLAMA_70B, devices=8, engine="vllm")
    status, output = run(["export", "--format", "vllm"], [request])
    assert status == 0
    assert f"vllm serve {LLAMA_70B} \\\n  --tensor-parallel-size" in output.out

    # A chosen plan is exported as it is.
    request = document(model=LLAMA_70B, devices=8, engine="vllm", top=3)
    _, planned = run(["plan"], [request])
    third = json.loads(planned.out)["plans"][2]
    _, output = run(["export", "--format", "sglang"], [{**request, "plan": third}])
    assert f"--tp-size {third['strategy']['tensor_parallel_size']}" in output.out

    # An answer of plan is exported by itself at any rank.
    _, planned = run(["plan"], [document(engine="vllm", devices=8, top=3)])
    answer = json.loads(planned.out)
    arguments = ["export", "--format", "sglang", "--rank", "2"]
    _, output = run(arguments, [answer])
    second = answer["plans"][1]["strategy"]
    assert f"--max-running-requests {-(-16 // second['data_parallel_size'])}" in output.out

    # A rank that the answer lacks is refused.
    arguments = ["export", "--format", "vllm", "--rank", "99"]
    status, output = run(arguments, [document(engine="vllm")])
    assert status == 2
    assert "rank is 99: it must be 1 to " in output.err


def test_an_export_can_be_measured_and_keeps_its_notes(run):
    # What measures an export is a script with the prediction.
    arguments = ["export", "--format", "vllm", "--measure"]
    status, output = run(arguments, [document(engine="vllm")])
    assert status == 0
    compile(output.out, "measure.py", "exec")
    assert '"ttft_seconds": {' in output.out

    # Notes of a format without comments go to standard error.
    request = document(devices=8, workload={**TRAIN, "method": "lora"})
    _, output = run(["export", "--format", "deepspeed"], [request])
    assert "train_batch_size" in json.loads(output.out)
    assert "method lora" in output.err


def test_the_laboratory_prints_its_page_and_its_factors(monkeypatch, capsys):
    # Accuracy prints the page of the docs.
    monkeypatch.setattr("planner.fitting.accuracy.accuracy_page", lambda: "# Accuracy\n")
    assert main(["accuracy"]) == 0
    assert capsys.readouterr().out == "# Accuracy\n"
    # Calibrate prints the factor file.
    monkeypatch.setattr(
        "planner.fitting.published_speeds.build_factors", lambda: {"version": "factors-1"}
    )
    assert main(["calibrate"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": "factors-1"}


def test_an_inverse_question_is_answered_with_one_document(run):
    request = {**document(engine="vllm"), "question": "most_users"}
    status, output = run(["inverse"], [request])
    answer = json.loads(output.out)
    assert status == 0
    assert answer["limits"][0]["value"] >= 16
    assert answer["limits"][0]["beyond"]["value"] == answer["limits"][0]["value"] + 1

    # An inverse question without an answer is status three.
    small = document(model=LLAMA_405B, device="rtx-4090", engine="vllm")
    status, output = run(["inverse"], [{**small, "question": "most_users"}])
    assert status == 3
    assert json.loads(output.out)["smallest"]["constraint"] == "memory"

    # An unknown question is refused with its field.
    status, output = run(["inverse"], [{**document(), "question": "meaning_of_life"}])
    assert status == 2
    assert output.err.startswith("question: ")


ROOT_OPTIONS = [sys.executable, "-m", "planner"]


def called(*arguments, given=""):
    text = given if isinstance(given, str) else "".join(json.dumps(one) + "\n" for one in given)
    return subprocess.run(
        [*ROOT_OPTIONS, *arguments], input=text, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def mixed():
    """Return what one process says to right and wrong lines in turn."""
    lines = [
        json.dumps(document(id="first")),
        "{broken",
        "",
        json.dumps(document(id="third", device="h1000")),
        json.dumps([1, 2]),
        json.dumps(document(id="fifth", strategy={"weight_dtype": "int3"})),
        json.dumps(document(id="last", workload={"kind": "serve", "input_tokens": 10})),
        json.dumps(document(id="again")),
    ]
    return called("estimate", given="\n".join(lines) + "\n")


def answers(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_line_that_is_not_blank_gets_one_answer_in_its_order(mixed):
    ids = ["first", None, "third", None, "fifth", "last", "again"]
    assert [one.get("id") for one in answers(mixed)] == ids
    # A wrong line changes nothing for those behind it.
    first, *_, last = answers(mixed)
    assert {**first, "id": ""} == {**last, "id": ""}
    assert last["fits"]
    # One wrong line makes the status three and writes nothing beside the answers.
    assert mixed.returncode == 3
    assert mixed.stderr == ""


def test_an_error_names_the_field_the_value_and_what_is_allowed(mixed):
    error = next(one for one in answers(mixed) if one.get("id") == "fifth")["error"]
    assert error["code"] == "bad_request"
    assert error["field"] == "strategy.weight_dtype"
    assert "'int3'" in error["message"]
    assert "'int4'" in error["message"]

    # A missing field is named as missing.
    error = next(one for one in answers(mixed) if one.get("id") == "last")["error"]
    assert error["field"] == "workload.output_tokens"
    assert "required" in error["message"]

    # An unknown device comes with one that is known.
    error = next(one for one in answers(mixed) if one.get("id") == "third")["error"]
    assert (error["code"], error["field"]) == ("unknown_device", "cluster.device")
    assert "h1000" in error["message"]
    assert "h100" in error["message"].replace("h1000", "")


def test_an_answer_comes_before_the_next_question_is_asked():
    """A program that keeps the process open can talk to it line by line."""
    with subprocess.Popen(
        [*ROOT_OPTIONS, "estimate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for number in (1, 2):
            process.stdin.write(json.dumps(document(id=number)) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdin.close()
        assert process.wait() == 0


def test_nothing_asked_is_nothing_answered_and_no_error(run):
    status, output = run(["estimate"])
    assert (status, output.out, output.err) == (0, "", "")


@pytest.mark.parametrize("given", ["", "[]"])
def test_a_plan_of_no_request_is_status_two_and_one_line_of_words(run, given):
    status, output = run(["plan"], [given])
    assert (status, output.out) == (2, "")
    assert len(output.err.splitlines()) <= 2
    assert "Traceback" not in output.err


def test_a_model_too_large_has_reasons_and_no_export(run):
    # A model too large for its device is status three with the reasons.
    status, output = run(["plan"], [document(model=LLAMA_405B)])
    answer = json.loads(output.out)
    assert status == 3
    assert answer["plans"] == []
    assert answer["rejected"]

    # Exporting what does not fit says that there is no plan.
    status, output = run(["export", "--format", "vllm"], [document(model=LLAMA_405B)])
    assert (status, output.out) == (2, "")
    assert output.err == "nothing fits this request: there is no plan to export\n"


@pytest.mark.parametrize("rank", ["0", "1000"])
def test_a_rank_counts_from_one_to_the_number_of_plans(run, rank):
    arguments = ["export", "--format", "vllm", "--rank", rank]
    status, output = run(arguments, [document(engine="vllm")])
    assert status == 2
    assert output.err.startswith(f"rank is {rank}: it must be 1 to ")


def test_a_plan_goes_from_one_process_through_a_pipe_into_the_next():
    planned = called("plan", given=[document(engine="vllm", devices=2)])
    exported = called("export", "--format", "vllm", given=planned.stdout)
    first = json.loads(planned.stdout)["plans"][0]["strategy"]
    assert exported.returncode == 0
    assert "vllm serve meta-llama/Llama-3.1-8B" in exported.stdout
    tensor = first["tensor_parallel_size"] or 1
    assert ("--tensor-parallel-size 2" in exported.stdout) == (tensor == 2)


@pytest.mark.parametrize("arguments", first([["export", "--format", "word"], []]))
def test_a_command_that_does_not_exist_is_status_two_with_its_usage(arguments):
    done = called(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m planner")


def test_a_catalogs_lines_and_its_json_tell_of_the_same_entries(capsys):
    assert main(["devices"]) == 0
    ids = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert main(["devices", "--json"]) == 0
    assert ids == [one["id"] for one in json.loads(capsys.readouterr().out)]
    assert len(set(ids)) == len(ids)


def test_an_entry_that_a_catalog_lacks_is_answered_with_its_nearest(capsys):
    assert main(["models", "meta-llama/Llama-3.1-8"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nearest: meta-llama/llama-3.1-8b," in err.lower()
    assert "its config.json" in err


HEAVY = {"django", "torch", "celery", "redis", "transformers", "plotly", "httpx"}
LABORATORY = {"scipy"} | {
    f"planner.fitting.{name}" for name in ("accuracy", "published_speeds", "step_fitting")
}
ASKED = {
    "model": "meta-llama/Llama-3.1-8B",
    "cluster": {"device": "h100-sxm-80gb"},
    "workload": {"kind": "serve", "input_tokens": 512, "output_tokens": 64, "concurrency": 4},
}
DOORS = {"estimate": "EstimateRequest", "plan": "PlanRequest"}


@cache
def loaded_after(statement):
    """Return the modules that a process has loaded after a statement."""
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    return set(subprocess.check_output(command, text=True, timeout=60).split())


def asking(door):
    """Return a program that asks one door one question."""
    document = DOORS[door]
    call = f"{door}({document}.model_validate({ASKED}))"
    module = "planner.specs.estimate"
    return f"from planner.api import {door}; from {module} import {document}; {call}"


def test_importing_the_planner_loads_nothing_heavy_and_its_commands_no_laboratory():
    loaded = loaded_after("import planner")
    assert "planner" in loaded
    assert loaded.isdisjoint({*HEAVY, "numpy", "pydantic", "scipy"})
    assert "scipy" not in loaded_after("from planner import estimate, plan")
    assert loaded_after("import planner.__main__").isdisjoint(LABORATORY)


def test_the_doors_load_what_answers_with_their_first_question_and_nothing_heavy():
    imported = loaded_after("import planner.api")
    ours = {name.split(".")[1] for name in imported if name.startswith("planner.")}
    assert ours == {"api", "specs"}
    # pydantic's first validator looks through every installed package for plugins of its own.
    assert imported.isdisjoint({"numpy", "yaml", "pydantic.plugin._loader"})
    for door in DOORS:
        loaded = loaded_after(asking(door))
        assert loaded.isdisjoint({*HEAVY, "yaml"})
        assert "numpy" in loaded
    assert not any(name.startswith("planner.search") for name in loaded_after(asking("estimate")))
    assert "planner.search.inverse" not in loaded_after(asking("plan"))


def test_the_doors_are_the_same_ones_and_no_others():
    assert planner.estimate is api.estimate
    assert planner.plan is api.plan
    assert not hasattr(planner, "predict")


def test_another_tools_settings_become_a_draft(run, tmp_path):
    line = "vllm serve meta-llama/Llama-3.1-8B -tp 2"
    status, output = run(["import", "--json"], [line])
    assert status == 0
    assert json.loads(output.out)["request"]["pins"] == {"tensor_parallel_size": 2}

    # A file instead of standard input, as a table.
    path = tmp_path / "serve.sh"
    path.write_text(line)
    status, output = run(["import", str(path)])
    assert status == 0
    assert "pins.tensor_parallel_size = 2" in output.out

    for arguments, lines, words in (
        (["import"], ["ls"], "no command of a known tool"),
        (["import", str(tmp_path / "none")], [], "cannot be read"),
    ):
        status, output = run(arguments, lines)
        assert (status, output.out) == (2, ""), arguments
        assert words in output.err, arguments
