"""How long a request may be, and how much room it needs; the same for every engine."""

from runners.jobs.runtime import BadInputError
from runners.jobspec import ServeSpec

USUAL_TOKENS = 2048  # of a request, where neither the model nor the spec says less


def longest_request(known: int | None, spec: ServeSpec) -> int:
    """Return the most tokens of prompt and answer together; ``known``: the model's positions.

    Raises:
        BadInputError: more are asked for than the model knows.
    """
    if spec.max_length is None:
        return int(known or USUAL_TOKENS)
    if known and spec.max_length > known:
        msg = f"max_length is {spec.max_length}, but the model knows {known} positions; ask less"
        raise BadInputError(msg)
    return spec.max_length


def check_room(tokens: int, longest: int) -> None:
    """Refuse a cache that does not hold one request at its longest.

    Raises:
        BadInputError: it does not.
    """
    if tokens < longest:
        msg = (
            f"kv_cache_tokens is {tokens}, less than one request of {longest} tokens; give more, "
            "or set a shorter max_length"
        )
        raise BadInputError(msg)
