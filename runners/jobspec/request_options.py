"""What each engine does with each field of a request: one table for validation, docs and pages."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from runners.jobspec.engines import ENGINES, ROWS, Engine, EngineName, titles


class RequestOption(NamedTuple):
    """The engines that do what a field asks, and the values that ask nothing of any engine."""

    engines: tuple[EngineName, ...]
    neutral: tuple[object, ...] = ()


# Fields that every engine supports.
COMMON = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
    "n", "stop", "logprobs", "top_logprobs", "stream", "stream_options", "ignore_eos",
    "tools", "tool_choice", "parallel_tool_calls",  # if the model's calls can be read
)  # fmt: skip
# The others, which the rows of the engines name, with their neutral values.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "chat_template_kwargs": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
OPTIONS: Mapping[str, RequestOption] = {
    **dict.fromkeys(COMMON, RequestOption(tuple(ENGINES))),
    **{
        name: RequestOption(
            tuple(each.name for each in ROWS if name in each.request_options), neutral
        )
        for name, neutral in NEUTRAL.items()
    },
}


def refused_options(engine: EngineName) -> dict[str, RequestOption]:
    """Return the fields that an engine refuses unless their value is neutral."""
    return {name: each for name, each in OPTIONS.items() if engine not in each.engines}


def refusal_text(name: str, engine: EngineName) -> str:
    """Return why a field is refused, and the way out."""
    others = [ENGINES[each] for each in OPTIONS[name].engines]
    if not others:
        return f"{name} is not supported by any engine here; leave it out"
    way_out = f"leave it out, or serve the model with {titles(others, 'or')}"
    return f"{name} is not supported by {ENGINES[engine].title}; {way_out}"


def refusal_lines(engines: Iterable[EngineName]) -> list[str]:
    """Return which fields that another engine supports are refused, one line per set of fields."""
    refusing: dict[tuple[str, ...], list[Engine]] = {}
    for engine in engines:
        names = tuple(name for name, each in refused_options(engine).items() if each.engines)
        refusing.setdefault(names, []).append(ENGINES[engine])
    return [
        f"Refused in requests to {titles(those)}: {', '.join(names)}."
        for names, those in refusing.items()
        if names
    ]
