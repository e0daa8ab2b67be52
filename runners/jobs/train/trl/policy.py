"""What a reinforcement learning by TRL has besides: its prompts, rewards, and answers to show."""

# mypy: disable-error-code="no-untyped-call"
import hashlib
import os
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

from runners.jobs.model_files import open_file
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.train.text_samples import SampleReport, TextSample
from runners.jobs.train.trl.data import TrainingRecords
from runners.jobs.train.trl.events import Course
from runners.jobs.train.trl.rewards import RewardProcess, ScoredBatch
from runners.jobspec import TrainSpec
from runners.jobspec.rewards import RewardFunction

REWARD_ROOTS_VARIABLE = "SLIPWAY_REWARD_ROOTS"
SHOWN_ANSWERS = 4  # of a step
FINAL_STEPS = 10  # whose mean reward is the result's


@dataclass
class PolicyCourse(Course):
    """The course of a training that answers prompts itself; rewards come from another process."""

    rewards: RewardProcess | None = None
    samples: SampleReport | None = None
    last_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=FINAL_STEPS))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report a step's metrics, and the seconds of its parts."""
        scored = self.rewards.last if self.rewards else ScoredBatch()
        if logs is not None and "reward" in logs:
            self.last_rewards.append(float(logs["reward"]))
        if logs is not None and scored.began > self.began:  # it has answers of its own
            logs = {
                **logs,
                "generation_seconds": scored.began - self.began,
                "reward_seconds": scored.ended - scored.began,
                "update_seconds": self.began + self.step_seconds[-1] - scored.ended,
            }
        super().on_log(args, state, control, logs, **kwargs)
        every = self.spec.text_samples and self.spec.text_samples.every_steps
        step = state.global_step
        if self.samples and every and scored.completions and (step == 1 or not step % every):
            self.samples.add(step, shown_answers(step, scored, self.spec.reward_functions))

    def figures(self) -> dict[str, float]:
        """Return the figures of the run for its result, with the reward at its end."""
        reward = {"final_reward": statistics.fmean(self.last_rewards)} if self.last_rewards else {}
        return super().figures() | reward


def how_answered(spec: TrainSpec) -> str:
    """Return how the answers that the job's page shows come about."""
    return (
        f"answers of the training itself, at most {spec.max_completion_length} tokens drawn at "
        f"temperature {spec.temperature:g}, with their rewards"
    )


def shown_answers(
    step: int, scored: ScoredBatch, functions: tuple[RewardFunction, ...]
) -> list[TextSample]:
    """Return the first answers of a batch, each with its reward and the parts of it."""
    weights = {each.function: each.weight for each in functions}
    samples = []
    for at in range(min(SHOWN_ANSWERS, len(scored.completions))):
        parts = {name: values[at] for name, values in scored.rewards.items()}
        total = sum(weights[name] * (value or 0.0) for name, value in parts.items())
        words = ", ".join(
            f"{name} none" if value is None else f"{name} {value:.3g}"
            for name, value in parts.items()
        )
        note = f"reward {total:.3g}" + (f" ({words})" if len(parts) > 1 else "")
        prompt, answer = (text_of(each[at]) for each in (scored.prompts, scored.completions))
        samples.append(TextSample(step, prompt, answer, note=note))
    return samples


def text_of(passage: Any) -> str:  # noqa: ANN401 - a text, or messages
    """Return a prompt or an answer as text; of messages the last one's."""
    return passage if isinstance(passage, str) else str(passage[-1].get("content") or "")


def reward_files(job: Job, spec: TrainSpec) -> dict[str, str]:
    """Return the SHA-256 of each file of reward functions, by its name.

    Raises:
        MissingModelError: a file is not on this host, or not below a folder of rewards.
    """
    digests = {}
    for path in dict.fromkeys(each.path for each in spec.reward_functions if each.path):
        try:
            handle = open_file(_resolved(job, path), reward_roots(job.host_dir))
        except MissingModelError as error:
            raise MissingModelError(f"the file of reward functions: {error}") from None
        with os.fdopen(handle, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[f"reward functions of {path}"] = digest
    return digests


def reward_roots(host_dir: Path) -> list[Path]:
    """Return the folders of files of reward functions, the host's own first."""
    configured = os.environ.get(REWARD_ROOTS_VARIABLE, "").split(os.pathsep)
    return [
        path.resolve() for path in (host_dir / "rewards", *map(Path, filter(None, configured)))
    ]


def _resolved(job: Job, path: str) -> Path:
    return (reward_roots(job.host_dir)[0] / path).resolve()


def reward_process(job: Job, spec: TrainSpec) -> RewardProcess:
    """Start the process that scores answers.

    Raises:
        BadInputError: a function cannot be loaded.
    """
    found = [
        each.model_copy(update={"path": str(_resolved(job, each.path))}) if each.path else each
        for each in spec.reward_functions
    ]
    return RewardProcess(
        found,
        job.scratch_dir() / "rewards",
        timeout_seconds=spec.reward_timeout_seconds,
        memory_gib=spec.reward_memory_gib,
    )


def answerable_prompts(
    rows: Any,  # noqa: ANN401 - of the library datasets
    tokenizer: PreTrainedTokenizerBase,
    spec: TrainSpec,
    records: TrainingRecords,
) -> Any:  # noqa: ANN401 - of the library datasets
    """Return the rows whose prompts are short enough, with their token ids as ``prompt_ids``.

    Raises:
        BadInputError: they are fewer than a step's prompts.
    """

    def with_ids(row: Mapping[str, Any]) -> dict[str, Any]:
        prompt: Any = row["prompt"]
        if isinstance(prompt, str):
            return {"prompt_ids": tokenizer(text=prompt)["input_ids"]}
        written: Any = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return {"prompt_ids": written["input_ids"]}

    longest = spec.longest_prompt
    kept = rows.map(with_ids).filter(lambda row: len(row["prompt_ids"]) <= longest)
    if long := len(rows) - len(kept):
        records.remarks.append(
            f"{long:,} prompts of more than {longest} tokens (max_prompt_length) are left out"
        )
    if len(kept) < spec.prompts_per_step:
        raise BadInputError(
            f"a step answers {spec.prompts_per_step} prompts, and the data holds {len(kept)} of "
            f"at most {longest} tokens; choose a smaller batch, or raise max_prompt_length"
        )
    return kept
