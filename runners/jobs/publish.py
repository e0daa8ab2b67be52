"""Push a model's folder to the Hub: ``python -m runners.jobs.publish ATTEMPT_DIR``.

The token is checked before anything is sent. A run that was stopped goes on with the file at which
it was. It does not import torch.
"""

import os
import sys
import time

from runners.hub.errors import HubError
from runners.hub.publishing import VARIABLES, push
from runners.hub.settings import HubSettingsError, from_environment
from runners.jobs.fetch import MARKERS, own_variables, with_token
from runners.jobs.model_files import model_folder
from runners.jobs.runtime import EXIT_BAD_INPUT, BadInputError, Job, run_job
from runners.jobspec.compress import PublishSpec
from runners.supervision.classification import DOWNLOAD_FAILED


def main() -> None:
    """Push the model that the attempt folder in argv names."""
    run_job("publish", publish, prepare=lambda: None)


def publish(job: Job) -> None:
    """Push the model and its card, and report the commit."""
    spec = job.spec_of(PublishSpec)
    folder = model_folder(spec.model, job.host_dir, needed=())
    try:
        settings = with_token(from_environment(own_variables()))
        os.environ |= VARIABLES
        job.emitter.phase(f"Pushing to {spec.repository}"[:80])
        began = time.monotonic()
        sent = [0]

        def show(done: int, total: int) -> None:
            sent[0] = done
            seconds = time.monotonic() - began
            job.emitter.progress(done, total, "bytes", seconds * (total - done) / max(1, done))

        url = push(
            folder,
            spec.repository,
            spec.card,
            settings,
            revision=spec.revision,
            is_private=spec.is_private,
            message=f"Push the model of job {job.request.job_id}",
            on_progress=show,
        )
    except HubSettingsError as error:
        raise BadInputError(str(error)) from None
    except HubError as error:
        job.emitter.close()
        sys.stderr.write(f"{MARKERS.get(error.kind, DOWNLOAD_FAILED)}: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    finally:
        os.environ.pop("HF_TOKEN", None)
    job.emitter.log(f"{spec.repository} is at {url}")
    job.emitter.result({"pushed_bytes": float(sent[0])}, {"pushed_bytes": f"pushed as {url}"})


if __name__ == "__main__":
    main()
