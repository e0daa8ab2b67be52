"""The process of a tracker: python FILE. It runs in the environment of the tracker's library.

The first line of its input says what to write where, each further one is an event of the job, as
a supervisor gets them. The first line of its output is ``{"url": …}`` or ``{"error": …}``.
It imports nothing of ours but the library that it writes by.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Values = dict[str, float]


class Run(Protocol):
    """A run of a tracker."""

    url: str  # where people look at it; empty: nowhere but in its files

    def write(self, values: Values, step: int) -> None:
        """Write the values of a step."""

    def finish(self, figures: Values) -> None:
        """Write the figures of the result, and end the run."""


class TensorBoardRun:
    """Event files of TensorBoard."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Begin a run in a folder of its name, below that of its project."""
        summary: Any = importlib.import_module("tensorboard.summary")
        self.url = ""
        root = Path(options["folder"]).resolve()
        folder = (root / options["project"] / options["run_name"]).resolve()
        if not folder.is_relative_to(root):
            raise ValueError(f"the project and the run name {folder}, which is not below {root}")
        self._writer = summary.Writer(str(folder))

    def write(self, values: Values, step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, figures: Values) -> None:
        """Write the figures as scalars of their own at the first step, and close the files."""
        self.write({f"result/{name}": value for name, value in figures.items()}, 0)
        self._writer.close()


class MlflowRun:
    """A run of MLflow, on a server or in files."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Begin a run of the project's experiment, or go on with that of the same job."""
        if not options["url"]:  # files are what is asked for
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        mlflow: Any = importlib.import_module("mlflow")
        address = options["url"] or Path(options["folder"]).as_uri()
        mlflow.set_tracking_uri(address)
        experiment = mlflow.set_experiment(options["project"]).experiment_id
        found = mlflow.search_runs(
            [experiment], f"tags.`slipway.job` = '{options['job']}'", output_format="list"
        )
        run = mlflow.start_run(
            run_id=found[0].info.run_id if found else None,
            run_name=options["run_name"],
            tags={"slipway.job": options["job"]},
        )
        if not found:
            mlflow.log_params(options["settings"])
        place = f"{options['url'].rstrip('/')}/#/experiments/{experiment}/runs/{run.info.run_id}"
        self.url = place if options["url"] else ""
        self._mlflow = mlflow

    def write(self, values: Values, step: int) -> None:
        """Write metrics."""
        self._mlflow.log_metrics(values, step=step)

    def finish(self, figures: Values) -> None:
        """Write the figures as metrics of their own, and end the run."""
        self._mlflow.log_metrics({f"result/{name}": value for name, value in figures.items()})
        self._mlflow.end_run()


class WandbRun:
    """A run of Weights & Biases; without a key in files, which `wandb sync` sends later."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Begin a run, or go on with that of the same job."""
        wandb: Any = importlib.import_module("wandb")
        online = bool(os.environ.get("WANDB_API_KEY"))
        server = {"base_url": options["url"]} if options["url"] else {}
        self._run = wandb.init(
            project=options["project"],
            name=options["run_name"],
            id=options["job"],
            resume="allow",
            dir=options["folder"],
            config=options["settings"],
            mode="online" if online else "offline",
            settings=wandb.Settings(silent=True, **server),
        )
        self.url = (self._run.url or "") if online else ""

    def write(self, values: Values, step: int) -> None:
        """Write a step's history."""
        self._run.log(values, step=step)

    def finish(self, figures: Values) -> None:
        """Write the figures as the run's summary, and end it."""
        for name, value in figures.items():
            self._run.summary[f"result/{name}"] = value
        self._run.finish(exit_code=0 if figures else 1)


class TrackioRun:
    """A run of Trackio, in its files."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Begin a run, or go on with that of the same name."""
        os.environ["TRACKIO_DIR"] = options["folder"]
        trackio: Any = importlib.import_module("trackio")
        self.url = ""
        self._run = trackio.init(
            project=options["project"],
            name=options["run_name"],
            config=options["settings"],
            resume="allow",
            embed=False,
        )

    def write(self, values: Values, step: int) -> None:
        """Write a step's metrics."""
        self._run.log(values, step=step)

    def finish(self, figures: Values) -> None:
        """Write the figures as metrics of their own, and end the run."""
        if figures:
            self._run.log({f"result/{name}": value for name, value in figures.items()})
        self._run.finish()


RUNS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "tensorboard": TensorBoardRun,
    "mlflow": MlflowRun,
    "wandb": WandbRun,
    "trackio": TrackioRun,
}


def main() -> None:
    """Write what comes until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes to the log
    options = json.loads(sys.stdin.readline())
    os.environ.update(options.pop("secrets"))
    try:
        run = RUNS[options["name"]](options)
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        text = " ".join(str(error).split()) or type(error).__name__
        answers.write(json.dumps({"error": text[:400]}) + "\n")
        sys.exit(1)
    answers.write(json.dumps({"url": run.url}) + "\n")
    figures: Values = {}
    step = 0
    for line in sys.stdin:
        event = json.loads(line)
        body = event["body"]
        if event["kind"] == "metric":
            step = step if body["step"] is None else body["step"]
            run.write(body["values"], step)
        elif event["kind"] == "result":
            figures = body["measured"]
    run.finish(figures)


if __name__ == "__main__":
    main()
