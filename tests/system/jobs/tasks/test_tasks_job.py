"""lm-evaluation-harness in its environment, on the tiny trained model and its int8 form."""

import json
import math

import pytest
import yaml

from runners.jobs import evaluate
from runners.jobs.runtime import BadInputError
from runners.jobspec import ArtefactModel, EvaluateSpec, RandomModel
from runners.jobspec.compress import EvaluationTasks
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.environments import build_environment

pytestmark = pytest.mark.slow
OWN = {
    "task": "sums",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "sums.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}
ROWS = [
    {"question": f"{a} + {b} =", "choices": [str(a + b), str(a + b + 1)], "answer": 0}
    for a in range(3)
    for b in range(3)
]


@pytest.fixture(scope="module")
def environment(host):
    """Build the harness's environment once; skip where no package index is reached."""
    build_environment(host.path, "lm_eval")


@pytest.fixture(scope="module")
def folder(host):
    folder = host.path / "models" / "tasks"
    folder.mkdir()
    bad = {**OWN, "task": "bad", "doc_to_text": "{{nothing_of_that_name}}"}
    sly = {**OWN, "task": "sly", "doc_to_text": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}
    for config in (OWN, bad, sly):
        (folder / f"{config['task']}.yaml").write_text(yaml.safe_dump(config))
    (folder / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def judged(host, environment, int8, trained_model):
    """Our own tasks on the int8 model, beside the model that it was made from."""
    spec = EvaluateSpec(
        model=ArtefactModel(attempt_id="int8"),
        weight_dtype="int8",
        original=trained_model,
        evaluation_tokens=64,
        tasks=EvaluationTasks(documents=16),
    )
    finished = host.run("tasks-own", spec)
    assert finished.returncode == 0, finished.stderr
    return finished


def test_every_metric_has_its_error_its_original_and_its_change(judged):
    measured = judged.measured

    for name in ("held_out_choice/acc", "held_out_choice/acc_norm", "held_out_text/bits_per_byte"):
        assert measured[f"{name}_stderr"] >= 0
        low, middle, high = (measured[f"{name}_difference{end}"] for end in ("_low", "", "_high"))
        assert low <= middle <= high
        difference = measured[name] - measured[f"original_{name}"]
        assert middle == pytest.approx(difference, abs=1e-9)
    perplexity = measured["held_out_text/byte_perplexity"]
    assert math.log2(perplexity) == pytest.approx(measured["held_out_text/bits_per_byte"])


def test_the_result_says_what_ran_and_whether_a_change_is_one(judged):
    notes = judged.bodies("result")[0]["notes"]

    assert judged.measured["tasks_seconds"] > 0
    assert notes["tasks"].startswith("lm-evaluation-harness 0.4.13")
    assert notes["held_out_choice/acc"].startswith("16 documents; standard error")
    assert "the same documents pair by pair" in notes["held_out_choice/acc_difference"]


def test_an_operators_folder_runs_and_a_task_that_fails_is_named(
    host, environment, folder, trained_model
):
    def run(name):
        tasks = EvaluationTasks(names=(name,), folder="tasks")
        return host.run(f"tasks-{name}", EvaluateSpec(
            model=trained_model, evaluation_tokens=64, tasks=tasks
        ))  # fmt: skip

    good, sly = run("sums"), run("sly")

    assert good.returncode == 0, good.stderr
    assert 0.0 <= good.measured["sums/acc"] <= 1.0
    assert good.bodies("result")[0]["notes"]["sums/acc"].startswith("9 documents")
    assert sly.returncode == 3
    assert "BAD_INPUT: task sly does not run: SecurityError" in sly.stderr


def test_a_name_that_is_no_task_ends_before_a_model_is_loaded(host, folder):
    spec = EvaluateSpec(
        model=RandomModel(config=TINY_CONFIG),
        tasks=EvaluationTasks(names=("sumps",), folder="tasks"),
    )

    with pytest.raises(BadInputError, match=r"there is no task sumps.*near it are sums") as ended:
        host.run_here("tasks-unknown", spec, evaluate.work)

    assert ended.value.prefix == "BAD_INPUT"
