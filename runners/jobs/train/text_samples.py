"""Texts that a training wrote on its way, as a report that the job's page shows."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runners.jobs.runtime import Job, publish_report

NAME = "samples"
SHOWN_STEPS = 8  # the first step, and the newest ones


@dataclass(frozen=True)
class TextSample:
    """A prompt and its continuation by the weights of a step."""

    step: int
    prompt: str
    continuation: str
    is_final: bool = False  # from the exported weights
    note: str = ""  # what else is known of it, such as its reward


class SampleReport:
    """The samples of a training's attempt; of many steps the first and the newest."""

    def __init__(self, job: Job, how: str) -> None:
        """Go on from what this attempt published before a restart; ``how`` they are written."""
        self._job, self._how = job, how
        self.taken = _earlier_samples(job.output_dir(NAME))

    def add(self, step: int, samples: Sequence[TextSample], *, is_final: bool = False) -> None:
        """Publish the samples of a step, in place of those that it had."""
        at = (is_final, step)  # after a restart the same step comes again
        others = [each for each in self.taken if (each.is_final, each.step) != at]
        self.taken = _shown(
            sorted([*others, *samples], key=lambda each: (each.is_final, each.step))
        )
        document = {"samples": [asdict(each) for each in self.taken], "how": self._how}
        publish_report(self._job, NAME, document)


def _shown(samples: list[TextSample]) -> list[TextSample]:
    """Return the samples of the first step, the newest steps and the final ones."""
    steps = sorted({each.step for each in samples if not each.is_final})
    shown_steps = {*steps[:1], *steps[1 - SHOWN_STEPS :]}
    return [each for each in samples if each.is_final or each.step in shown_steps]


def _earlier_samples(folder: Path) -> list[TextSample]:
    """Return this attempt's samples from before a restart."""
    try:
        document = json.loads((folder / f"{NAME}.json").read_text())
    except OSError:
        return []
    return [TextSample(**each) for each in document["samples"]]
