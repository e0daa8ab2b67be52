"""Reward functions in a process of their own, with limits of time and memory."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.specs.units import GIB
from runners.jobs.bound import bound
from runners.jobs.runtime import BadInputError
from runners.jobspec.rewards import RewardFunction
from runners.supervision.procfs import MARKER

WORKER = Path(__file__).with_name("reward_worker.py")
# The attempt's mark is among them: who cleans up after the attempt finds the process by it.
PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", MARKER)
START_SECONDS = 60.0  # to import what the functions' files import
PIECE = 1 << 16


@dataclass
class ScoredBatch:
    """Completions that were scored last, with the rewards of each function by its name."""

    prompts: Sequence[Any] = ()
    completions: Sequence[Any] = ()
    rewards: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    began: float = 0.0  # on the monotonic clock
    ended: float = 0.0


class RewardProcess:
    """Scores completions by functions that cannot harm the training's process.

    The process ends with the training, when it is closed, and at its first error.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        folder: Path,
        *,
        timeout_seconds: float,
        memory_gib: float,
    ) -> None:
        """Load the functions; ``folder`` holds what is passed between the processes.

        Raises:
            BadInputError: a function cannot be loaded; the text says which one, and why.
        """
        self._functions = functions
        self._timeout_seconds, self._memory_gib = timeout_seconds, memory_gib
        self._folder = folder
        self.last = ScoredBatch()
        folder.mkdir(parents=True, exist_ok=True)
        replies, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                bound(
                    [
                        sys.executable,
                        "-P",
                        str(WORKER),
                        str(int(memory_gib * GIB)),
                        str(writing),
                        json.dumps([(each.path, each.function) for each in functions]),
                    ]
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[writing],
                cwd=folder,
                env=self._environment(),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self._replies, self._read = replies, b""
        self._reply(START_SECONDS, "to be imported")

    def _environment(self) -> dict[str, str]:
        """Return the variables of the process: none of the job's secrets."""
        env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        return {**env, "HOME": str(self._folder), "OMP_NUM_THREADS": "1"}

    @property
    def functions(self) -> list[Callable[..., list[float | None]]]:
        """Return a function for each, as TRL's trainer calls them one after the other."""
        return [self._named(at, each.function) for at, each in enumerate(self._functions)]

    def _named(self, at: int, name: str) -> Callable[..., list[float | None]]:
        def score(
            prompts: list[Any],
            completions: list[Any],
            completion_ids: list[list[int]],
            record: list[str],
            **_of_trl: object,
        ) -> list[float | None]:
            if at == 0:
                self._score(prompts, completions, completion_ids, record)
            return list(self.last.rewards[name])

        score.__name__ = name
        return score

    def _score(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        records: list[str],
    ) -> None:
        began = time.monotonic()
        columns = [json.loads(each) for each in records]
        names = sorted({name for each in columns for name in each})
        path = self._folder / "completions.json"
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        by_name = {name: [each.get(name) for each in columns] for name in names}
        path.write_text(json.dumps({"given": given, "columns": by_name}))
        with contextlib.suppress(BrokenPipeError):  # its reply says what happened
            assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
            self._process.stdin.write(f"{path}\n".encode())
            self._process.stdin.flush()
        rewards = self._reply(self._timeout_seconds, f"to score {len(completions)} completions")
        by_function = zip((each.function for each in self._functions), rewards, strict=True)
        self.last = ScoredBatch(prompts, completions, dict(by_function), began, time.monotonic())

    def _reply(self, seconds: float, what: str) -> list[list[float | None]]:
        """Return the rewards by function.

        Raises:
            BadInputError: it is late, ended, or says an error.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                self.close()
                raise BadInputError(
                    f"the reward functions ({self._names}) took more than {seconds:g} s {what}; "
                    "make them faster, or raise reward_timeout_seconds"
                )
            if not (piece := os.read(self._replies, PIECE)):
                raise BadInputError(self._ended())
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            self.close()
            raise BadInputError(f"reward function {reply['error']}")
        rewards: list[list[float | None]] = reply["rewards"]
        return rewards

    @property
    def _names(self) -> str:
        return ", ".join(each.function for each in self._functions)

    def _ended(self) -> str:
        status = self._process.wait()
        how = f"status {status}"
        if status < 0:
            how = signal.Signals(-status).name
        return (
            f"the process of the reward functions ({self._names}) ended with {how}: a function "
            f"crashed, or needed more memory than reward_memory_gib allows ({self._memory_gib:g})"
        )

    def close(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
