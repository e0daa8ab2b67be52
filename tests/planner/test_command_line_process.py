"""The command line as a process of its own: streams, exit codes, and lines that are wrong."""

import json
import subprocess
import sys

import pytest

from planner.__main__ import main
from tests.planner.asking import LLAMA_405B, document
from tests.plugins.extent import first

ROOT_OPTIONS = [sys.executable, "-m", "planner"]


def run(*arguments, given=""):
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
    return run("estimate", given="\n".join(lines) + "\n")


def answers(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_line_that_is_not_blank_gets_one_answer_in_its_order(mixed):
    assert [one.get("id") for one in answers(mixed)] == [
        "first",
        None,
        "third",
        None,
        "fifth",
        "last",
        "again",
    ]


def test_a_wrong_line_changes_nothing_for_those_behind_it(mixed):
    first, *_, last = answers(mixed)

    assert {**first, "id": ""} == {**last, "id": ""}
    assert last["fits"]


def test_one_wrong_line_makes_the_status_three_and_writes_nothing_beside_the_answers(mixed):
    assert mixed.returncode == 3
    assert mixed.stderr == ""


def test_an_error_names_the_field_the_value_and_what_is_allowed(mixed):
    error = next(one for one in answers(mixed) if one.get("id") == "fifth")["error"]

    assert error["code"] == "bad_request"
    assert error["field"] == "strategy.weight_dtype"
    assert "'int3'" in error["message"]
    assert "'int4'" in error["message"]


def test_a_missing_field_is_named_as_missing(mixed):
    error = next(one for one in answers(mixed) if one.get("id") == "last")["error"]

    assert error["field"] == "workload.output_tokens"
    assert "required" in error["message"]


def test_an_unknown_device_comes_with_one_that_is_known(mixed):
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


def test_nothing_asked_is_nothing_answered_and_no_error():
    done = run("estimate")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("given", first(["", "[]"]))
def test_a_plan_of_no_request_is_status_two_and_one_line_of_words(given):
    done = run("plan", given=given)

    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr


def test_a_model_too_large_for_its_device_is_status_three_with_the_reasons():
    done = run("plan", given=[document(model=LLAMA_405B)])

    answer = json.loads(done.stdout)
    assert done.returncode == 3
    assert answer["plans"] == []
    assert answer["rejected"]


def test_exporting_what_does_not_fit_says_that_there_is_no_plan():
    done = run("export", "--format", "vllm", given=[document(model=LLAMA_405B)])

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nothing fits this request: there is no plan to export\n"


@pytest.mark.parametrize("rank", first(["0", "1000"]))
def test_a_rank_counts_from_one_to_the_number_of_plans(rank):
    given = [document(engine="vllm")]

    done = run("export", "--format", "vllm", "--rank", rank, given=given)

    assert done.returncode == 2
    assert done.stderr.startswith(f"rank is {rank}: there are ")


def test_a_plan_goes_from_one_process_through_a_pipe_into_the_next():
    planned = run("plan", given=[document(engine="vllm", devices=2)])

    exported = run("export", "--format", "vllm", given=planned.stdout)

    first = json.loads(planned.stdout)["plans"][0]["strategy"]
    assert exported.returncode == 0
    assert "vllm serve meta-llama/Llama-3.1-8B" in exported.stdout
    tensor = first["tensor_parallel_size"] or 1
    assert ("--tensor-parallel-size 2" in exported.stdout) == (tensor == 2)


@pytest.mark.parametrize("arguments", first([["export", "--format", "word"], []]))
def test_a_command_that_does_not_exist_is_status_two_with_its_usage(arguments):
    done = run(*arguments)

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


def test_a_command_that_fits_nothing_loads_no_laboratory():
    slow = [
        "scipy",
        "planner.fitting.pages.accuracy",
        "planner.fitting.factors",
        "planner.fitting.robust_fit",
    ]
    code = f"import planner.__main__, sys; print(*sorted(set({slow}) & set(sys.modules)))"

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stdout.strip() == ""
