"""Durations, sizes, counts, rates and shares as people write them on a command line."""

import re
from collections.abc import Callable, Mapping

from runners.cli.errors import CliError

SECONDS = {
    "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0,
    "h": 3600.0, "d": 86400.0,
}  # fmt: skip
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
BYTES = {
    "b": 1,
    **{f"{prefix}b": size for prefix, size in {**DECIMAL, **BINARY}.items()},
    **BINARY,
}
COUNTS = {**DECIMAL, "b": 10**9, **BINARY}  # 15B tokens are 15 billion
PER_SECOND = {"": 1.0, "/s": 1.0, "/min": 1 / 60, "/m": 1 / 60, "/h": 1 / 3600}
# Commas stand between thousands alone: 1,5 is refused, whatever it meant.
NUMBER = re.compile(
    r"\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)?(?:\.\d+)?(?:e[+-]?\d+)?)\s*([^\d,.]*?)\s*",
    re.IGNORECASE,
)

Reader = Callable[[str, str], object]  # name of the option or field, its text -> value


def _number(name: str, text: str, units: Mapping[str, float], example: str) -> float:
    """Return the value of a positive number with one of the units.

    Raises:
        CliError: the text is not a number, its unit is unknown, or it is not above zero.
    """
    match = NUMBER.fullmatch(text)
    digits, unit = (match[1], match[2]) if match else ("", text)
    try:
        value = float(digits.replace("_", "").replace(",", ""))
    except ValueError:
        raise CliError(
            f"{name} is {text!r}, not a number: write it as {example}", field=name
        ) from None
    if unit.lower() not in units:
        known = ", ".join(each for each in units if each)
        found = f"its unit {unit!r} is not known" if unit else "it has no unit"
        raise CliError(f"{name} is {text!r}: {found}; units are {known}: {example}", field=name)
    if not 0 < value < float("inf"):
        raise CliError(f"{name} is {text!r}: it must be above 0, such as {example}", field=name)
    return value * units[unit.lower()]


def duration(name: str, text: str) -> float:
    """Return a duration in seconds; its unit is required.

    >>> duration("--ttft", "500ms"), duration("--time-budget", "1.5h")
    (0.5, 5400.0)
    """
    return _number(name, text, SECONDS, "500ms or 1.5s")


def size(name: str, text: str) -> int:
    """Return a size in bytes; its unit is required.

    >>> size("host_memory_bytes", "24GiB"), size("host_memory_bytes", "24 GB")
    (25769803776, 24000000000)
    """
    return round(_number(name, text, BYTES, "24GiB or 80GB"))


def count(name: str, text: str) -> int:
    """Return a count; k, M, B (or G) and T are decimal, Ki, Mi and Gi binary.

    Raises:
        CliError: the text is not a number, or not a whole one.

    >>> count("--tokens", "1.5B"), count("--max-model-len", "128Ki")
    (1500000000, 131072)
    """
    value = _number(name, text, {"": 1, **COUNTS}, "8192, 8k or 1.5B")
    if value != round(value):
        raise CliError(f"{name} is {text!r}: it must be a whole number", field=name)
    return round(value)


def number(name: str, text: str) -> float:
    """Return a positive number without a unit.

    >>> number("--hours", "1.5")
    1.5
    """
    return _number(name, text, {"": 1.0}, "8 or 0.5")


def length(name: str, text: str) -> int:
    """Return a number of tokens of a text, as vLLM reads it: k is 1,000, and K is 1,024.

    A context is seldom 8,000 tokens long where 8k is written, so that a k is said.

    >>> length("--max-model-len", "16K"), length("--max-model-len", "4000")
    (16384, 4000)
    """
    bare = text.strip()
    if bare.endswith("K"):
        return count(name, f"{bare}i")
    value = count(name, text)
    if bare.endswith("k"):
        import typer

        typer.echo(
            f"{name} {bare} is {value:,} tokens; {bare[:-1].strip()}K is {value // 1000 * 1024:,}",
            err=True,
        )
    return value


def count_or_max(name: str, text: str) -> int | None:
    """Return a count, or None for ``max``, which leaves it to the planner.

    >>> count_or_max("--concurrency", "max"), count_or_max("--concurrency", "1k")
    (None, 1000)
    """
    return None if text.strip().lower() == "max" else count(name, text)


def rate(name: str, text: str) -> float:
    """Return a rate per second.

    >>> rate("--rate", "5"), rate("--rate", "300/min")
    (5.0, 5.0)
    """
    return _number(name, text, PER_SECOND, "5, 5/s or 300/min")


def share(name: str, text: str) -> float:
    """Return a share of 1.

    Raises:
        CliError: the text is not a number from 0 to 1, or 0 % to 100 %.

    >>> share("--prefix-share", "30%"), share("--prefix-share", "0.3")
    (0.3, 0.3)
    """
    bare, is_percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(bare) / (100 if is_percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise CliError(
            f"{name} is {text!r}: it must be from 0 to 1, such as 0.3 or 30%", field=name
        )
    return value


def word(_name: str, text: str) -> str:
    """Return a name without the blanks around it."""
    return text.strip()


# Ending of a field's name, which is its unit -> reader; the first that matches.
BY_ENDING: Mapping[str, Reader] = {
    "bytes_per_second": word,
    "_per_second": rate,
    "_seconds": duration,
    "_bytes": size,
    "compression_ratio": word,
    "_ratio": share,
    "_utilization": share,
    "calibration_tokens": count,  # of many texts
    "_tokens": length,
    "_length": length,
    "concurrency": count_or_max,
    "tokens": count,
    "_size": count,
    "_requests": count,
}


def reader_of_unit(name: str) -> Reader | None:
    """Return the reader of the unit that the name of a field ends in, None if it has none.

    >>> reader_of_unit("sequence_length").__name__, reader_of_unit("objective")
    ('length', None)
    """
    return next((read for ending, read in BY_ENDING.items() if name.endswith(ending)), None)


def value_of_field(path: str, text: str) -> object:
    """Return the value of ``--set PATH=TEXT``: JSON, a quantity by the field's unit, or text.

    >>> value_of_field("workload.ttft_slo_seconds", "500ms"), value_of_field("top", "3")
    (0.5, 3)
    >>> value_of_field("cluster.host_memory_bytes", "1TiB"), value_of_field("engine", "vllm 0.12")
    (1099511627776, 'vllm 0.12')
    """
    import json

    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and Infinity are no JSON

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        pass
    # A bound of a constraint has the unit of its figure: constraints.ttft_seconds.max.
    name = path.removesuffix(".min").removesuffix(".max").rpartition(".")[2]
    read = reader_of_unit(name) if text[:1].isdigit() or text[:1] in ".+-" else None
    return read(path, text) if read else text
