"""What each engine does with each field of a request: one table for validation, docs and pages."""

from collections.abc import Iterable
from typing import NamedTuple

from runners.jobspec.serve import ON_GPUS, EngineName

TITLES: dict[EngineName, str] = {
    "slipway": "Slipway's own engine",
    "llamacpp": "llama.cpp",
    "vllm": "vLLM",
    "sglang": "SGLang",
}
EVERY: tuple[EngineName, ...] = ("slipway", "llamacpp", "vllm", "sglang")


class RequestOption(NamedTuple):
    """The engines that do what a field asks, and the values that ask nothing of any engine."""

    engines: tuple[EngineName, ...]
    neutral: tuple[object, ...] = ()


OPTIONS: dict[str, RequestOption] = {
    **dict.fromkeys(
        (
            "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
            "n", "stop", "logprobs", "top_logprobs", "stream", "stream_options", "ignore_eos",
        ),
        RequestOption(EVERY),
    ),
    "response_format": RequestOption(ON_GPUS, ({"type": "text"},)),
    # SGLang without a parser of the model's calls returns them as text: v0.5,
    # sglang/srt/entrypoints/openai/serving_chat.py.
    "tools": RequestOption(("vllm",), ([],)),
    "tool_choice": RequestOption(("vllm",), ("none", "auto")),
    "parallel_tool_calls": RequestOption(("vllm",), (True, False)),
    "min_tokens": RequestOption(ON_GPUS, (0,)),
    "stop_token_ids": RequestOption(ON_GPUS, ([],)),
    "chat_template_kwargs": RequestOption(ON_GPUS, ({},)),
    "functions": RequestOption((), ([],)),
    "function_call": RequestOption((), ("none", "auto")),
    "modalities": RequestOption((), (["text"],)),
    "echo": RequestOption((), (False,)),
    "suffix": RequestOption((), ("",)),
    "best_of": RequestOption((), (1,)),
}  # fmt: skip


def refused_options(engine: EngineName) -> dict[str, RequestOption]:
    """Return the fields that an engine refuses unless their value is neutral."""
    return {name: each for name, each in OPTIONS.items() if engine not in each.engines}


def refusal_text(name: str, engine: EngineName) -> str:
    """Return why a field is refused, and the way out."""
    others = " or ".join(TITLES[each] for each in OPTIONS[name].engines)
    way_out = f"leave it out, or serve the model with {others}" if others else "leave it out"
    who = TITLES[engine] if others else "any engine here"
    return f"{name} is not supported by {who}; {way_out}"


def refusal_lines(engines: Iterable[EngineName]) -> list[str]:
    """Return which fields that another engine supports are refused, one line per set of fields."""
    refusing: dict[tuple[str, ...], list[str]] = {}
    for engine in engines:
        names = tuple(name for name, each in refused_options(engine).items() if each.engines)
        refusing.setdefault(names, []).append(TITLES[engine])
    return [
        f"Refused in requests to {' and '.join(titles)}: {', '.join(names)}."
        for names, titles in refusing.items()
        if names
    ]
