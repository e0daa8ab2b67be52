"""Limits on request length and cache size; the same for every engine."""

from runners.jobs.runtime import BadInputError
from runners.jobspec import ServeSpec

USUAL_TOKENS = 2048  # of a request, if neither the model nor the spec has a limit


def longest_request(known: int | None, spec: ServeSpec) -> int:
    """Return the longest request, prompt and answer; ``known``: the model's position count.

    Raises:
        BadInputError: the spec's length exceeds the model's positions.
    """
    if spec.max_length is None:
        return int(known or USUAL_TOKENS)
    if known and spec.max_length > known:
        msg = f"max_length is {spec.max_length}, but the model knows {known} positions; ask less"
        raise BadInputError(msg)
    return spec.max_length


def check_room(tokens: int, longest: int) -> None:
    """Check that the cache holds one request of maximum length.

    Raises:
        BadInputError: it is too small.
    """
    if tokens < longest:
        msg = (
            f"kv_cache_tokens is {tokens}, less than one request of {longest} tokens; give more, "
            "or set a shorter max_length"
        )
        raise BadInputError(msg)
