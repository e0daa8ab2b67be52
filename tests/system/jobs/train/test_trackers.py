"""Trackers' own libraries, in their environments: what they write is what the site has."""

import json
import subprocess

import pytest

from runners.environments.builder import Store
from runners.jobspec import TrainSpec
from runners.jobspec.trackers import TRACKERS
from runners.shared.config import HostDir
from tests.runners.jobs.tiny import tiny_training
from tests.system.jobs.environments import build_environment

pytestmark = pytest.mark.slow
# Reads what a library wrote, with the library: python -c READERS[NAME] FOLDER -> [[step, loss], …]
READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
import glob
files = EventAccumulator(glob.glob(f"{folder}/p/r")[0]); files.Reload()
rows = [[each.step, each.tensor_proto.float_val[0]] for each in files.Tensors("loss")]
""",
    "mlflow": """
import mlflow, os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
mlflow.set_tracking_uri(f"file://{folder}")
(run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
assert run.info.run_name == "r" and run.data.params["learning_rate"] == "0.003", run
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
rows = sorted([each.step, each.value] for each in history)
""",
    # No part of the library reads its file; each value is in a step's history and the summary.
    "wandb": r"""
import glob, re
(path,) = glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")
found = re.findall(rb"\x12\x04loss\x82\x01.(-?[0-9.e-]+)", open(path, "rb").read(), re.DOTALL)
rows = [[None, float(each)] for each in dict.fromkeys(found)]
""",
    "trackio": """
import sqlite3
rows = sqlite3.connect(f"{folder}/p.db").execute("SELECT step, metrics FROM metrics ORDER BY id")
values = [(step, json.loads(text)) for step, text in rows]
rows = [[step, each["loss"]] for step, each in values if "loss" in each]
""",
}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_training_is_in_its_tracker_as_on_the_site(host, name):
    build_environment(host.path, name)
    store = Store(HostDir(host.path))
    tracker = {"name": name, "project": "p", "run_name": "r"}
    fields = tiny_training().model_dump() | {"max_steps": 5, "time_budget_seconds": None}
    spec = TrainSpec.model_validate({**fields, "tracker": tracker, "learning_rate": 0.003})

    job = host.run(f"tracked-{name}", spec)

    assert job.returncode == 0, job.stderr
    found = [body for body in job.bodies("artefact") if body["name"] == "tracking"][-1]
    assert found["facts"] == {
        "tracker": name, "title": TRACKERS[name].title, "url": "", "project": "p", "run": "r",
    }  # fmt: skip
    folder = job.folder / "output" / "tracking"
    program = f"import json; folder = {str(folder)!r}\n{READERS[name]}\nprint(json.dumps(rows))"
    read = subprocess.run(
        [store.python(store.pins(name)), "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr[-2000:]
    rows = json.loads(read.stdout.splitlines()[-1])
    points = [body for body in job.bodies("metric") if "loss" in body["values"]]
    assert len(points) == len(rows) >= 2
    for point, (step, loss) in zip(points, rows, strict=True):
        assert loss == pytest.approx(point["values"]["loss"], rel=1e-6)
        assert step in {None, point["step"]}


def test_a_server_that_is_not_there_ends_the_job_with_its_reason(host):
    build_environment(host.path, "mlflow")
    tracker = {"name": "mlflow", "url": "http://127.0.0.1:9"}
    spec = tiny_training().model_copy(
        update={"tracker": TrainSpec.model_validate({"tracker": tracker}).tracker}
    )

    job = host.run("untracked", spec)

    assert job.returncode == 3
    assert "MLflow at http://127.0.0.1:9" in job.stderr
    assert "launch the job without a tracker" in job.stderr
