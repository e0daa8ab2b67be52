"""A validation as a job: ``python -m runners.jobs.prove ATTEMPT_DIR``.

Its lines are the log, its stages the progress, and its report the artefact "proof". It ends with
an error if something is wrong, so that a failed validation is a failed job; a stopped one leaves
the report up to there. The report is not signed: a job has no credential of the host, and the
agent uploads the artefact with it.
"""

import shutil
import sys
from pathlib import Path

from runners.jobs.runtime import Job, end_by_sigterm, publish_folder, run_job
from runners.jobspec import ProveSpec
from runners.prove.report import TITLES, Record, Report, Stage, calibration_times, validation_rates
from runners.prove.run import JSON_NAME, PAGE_NAME, ValidationRun, as_line, problems

ARTEFACT = "proof"
FAILED = "PROOF_FAILED"
# Figures of the report under the names of a job's result.
HEADLINES = {
    "decode bf16, batch 1, eager": "decode_tokens_per_second",
    "prefill of 512": "prefill_tokens_per_second",
    "training step": "step_seconds",
}


def main() -> None:
    """Run the validation of the attempt folder in argv."""
    run_job("prove", work, prepare=lambda: None)


def work(job: Job) -> None:
    """Run the stages, publish the report and end as it says."""
    spec = job.spec_of(ProveSpec)
    folder = job.scratch_dir() / "proof"
    begun: list[str] = []
    done: list[Stage] = []

    def say(stage: Stage, record: Record | None) -> None:
        if stage.name not in begun:
            begun.append(stage.name)
            job.emitter.phase(TITLES[stage.name])
        if record is not None:
            job.emitter.log(as_line(record))
            return
        done.append(stage)
        job.emitter.log(f"{TITLES[stage.name]}: {stage.state}. {stage.problem or ''}".strip())
        job.emitter.progress(len(done), len(spec.stages), "stages")

    validation = ValidationRun(
        folder=folder,
        stages=spec.stages,
        seconds=60 * spec.minutes,
        is_small=spec.is_small,
        say=say,
    )
    report = validation.run()
    publish_folder(
        job,
        ARTEFACT,
        "report",
        lambda building: _copy_report(folder, building),
        facts(report, is_small=spec.is_small),
    )
    shutil.rmtree(folder)
    if validation.stopped_by is not None:
        job.stop_requested.set()
        end_by_sigterm(job)
    job.emitter.result(measured(report), {"verdict": report.verdict})
    if wrong := problems(report):
        sys.stderr.write("".join(f"{FAILED}: {words}\n" for words in wrong))
        sys.exit(1)


def _copy_report(folder: Path, building: Path) -> None:
    for name in (JSON_NAME, PAGE_NAME):
        shutil.copy(folder / name, building / name)


def facts(report: Report, *, is_small: bool = False) -> dict[str, object]:
    """Return what the site takes from a report without opening it.

    Rates of the smallest sizes are no rates of the device, and are left out.
    """
    figures = [
        figure for stage in report.stages if stage.name == "rates" for figure in stage.figures
    ]
    rates = None if is_small else validation_rates(figures)
    return {
        "rates": rates and rates.model_dump(mode="json"),
        "device": report.device,
        "verdict": report.verdict,
        "seconds": round(report.seconds, 1),
        "problems": problems(report)[:20],
        "lessons": [
            lesson.model_dump(mode="json")
            for stage in report.stages
            for lesson in calibration_times(stage.figures)
        ],
    }


def measured(report: Report) -> dict[str, float]:
    """Return the figures that a job's page shows."""
    return {
        HEADLINES[figure.name]: figure.value
        for stage in report.stages
        for figure in stage.figures
        if figure.name in HEADLINES
    }


if __name__ == "__main__":
    main()
