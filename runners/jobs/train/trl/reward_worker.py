"""The process of reward functions: python FILE MEMORY_BYTES REPLIES_FD FUNCTIONS.

It loads the functions, says that it is ready, and scores the completions of each file of JSON
that a line of its input names. It imports nothing of ours: what a function does to its process
ends here. Replies are lines of JSON, ``{"rewards": [[…], …]}`` by function or ``{"error": …}``.
"""

import importlib.util
import json
import math
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Rewards = list[float | None]
# A minus after a digit or a letter is none of the number, as in 3-5; a comma separates thousands.
_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_THOUGHT = re.compile(r"<think>(?!.*<think>).*?</think>\s*\S.*", re.DOTALL)


class RewardError(Exception):
    """A function cannot be loaded, or returned what is no reward."""


# The functions that are built in.


def text_of(completion: Any) -> str:  # noqa: ANN401 - a text, or messages
    """Return the text of a completion; of messages the contents of the answers."""
    if isinstance(completion, str):
        return completion
    return "".join(str(each.get("content") or "") for each in completion)


def _expected(columns: dict[str, Any]) -> Sequence[Any]:
    for name in ("answer", "solution", "ground_truth"):
        if name in columns and None not in columns[name]:
            return list(columns[name])
    raise RewardError("it compares with “answer”, which not every record has; add the field")


def exact_match(completions: Sequence[Any], **columns: Any) -> Rewards:
    """Return 1 where an answer is the expected one, without regard to white space."""
    pairs = zip(map(text_of, completions), _expected(columns), strict=True)
    return [float(answer.split() == str(expected).split()) for answer, expected in pairs]


def last_number(completions: Sequence[Any], **columns: Any) -> Rewards:
    """Return 1 where the last number of an answer is the last one of the expected answer."""
    pairs = zip(map(text_of, completions), _expected(columns), strict=True)
    return [
        float((wanted := _last_number(str(expected))) is not None and _last_number(text) == wanted)
        for text, expected in pairs
    ]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def think_format(completions: Sequence[Any], **_columns: Any) -> Rewards:
    """Return 1 where an answer is one thought in tags, and then some text."""
    return [float(_THOUGHT.fullmatch(text_of(each).strip()) is not None) for each in completions]


BUILT_IN: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (exact_match, last_number, think_format)
}


# The process.


def load(path: str, name: str) -> Callable[..., Any]:
    """Return a built-in function, or one of a file.

    Raises:
        RewardError: the file cannot be imported, or has no such function.
    """
    if not path:
        return BUILT_IN[name]
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each in vars(module) if not each.startswith("_")]
        raise RewardError(f"it has no function {name}; it defines {', '.join(known)[:200]}")
    found: Callable[..., Any] = function
    return found


def checked(values: Any, count: int, *, may_abstain: bool) -> Rewards:  # noqa: ANN401 - whatever it returned
    """Return a function's rewards as numbers, one for each completion.

    Raises:
        RewardError: their number is another, or one is no finite number.
    """
    found = [None if value is None else float(value) for value in values]
    if len(found) != count:
        raise RewardError(
            f"it returned {len(found)} rewards for {count} completions; it must return one each"
        )
    for at, value in enumerate(found, 1):
        if value is None and not may_abstain:
            raise RewardError(f"it returned None for completion {at}, and no other scores it")
        if value is not None and not math.isfinite(value):
            raise RewardError(f"it returned {value} for completion {at}; a reward is finite")
    return found


def explained(error: BaseException) -> str:
    """Return an error in a sentence, with the line of the function where it happened."""
    if isinstance(error, RewardError):
        return str(error)
    if isinstance(error, MemoryError):
        return "it needs more memory than reward_memory_gib allows"
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__
    ]
    where = f", line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    return f"{type(error).__name__}: {error}"[:400] + where


@contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Give what a function raises its name.

    Raises:
        RewardError: it raised anything, or exited.
    """
    try:
        yield
    except BaseException as error:
        raise RewardError(f"{name}: {explained(error)}") from error


def main() -> None:
    """Score what the input names, until it ends."""
    memory, replies, named = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.dont_write_bytecode = True
    answers = os.fdopen(replies, "w", buffering=1)
    os.dup2(2, 1)  # what a function prints goes to the log
    functions: dict[str, Callable[..., Any]] = {}
    try:
        for path, name in named:
            with blamed_on(name):
                functions[name] = load(path, name)
        answers.write('{"rewards": []}\n')
        for line in sys.stdin:
            asked = json.loads(Path(line.strip()).read_text())
            answers.write(json.dumps({"rewards": scored(functions, **asked)}) + "\n")
    except RewardError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")


def scored(
    functions: dict[str, Callable[..., Any]], given: dict[str, Any], columns: dict[str, Any]
) -> list[Rewards]:
    """Return the rewards of completions by function.

    Raises:
        RewardError: a function fails, or returns what is no reward; the text names it.
    """
    rewards = []
    for name, function in functions.items():
        with blamed_on(name):
            values = function(**given, **columns)
            count, may_abstain = len(given["completions"]), len(functions) > 1
            rewards.append(checked(values, count, may_abstain=may_abstain))
    return rewards


if __name__ == "__main__":
    main()
