"""Files and functions stay small enough to be read at one go."""

from functools import cache

import pytest

from webapp.boot import census

TAKEN = census.take()


@cache
def functions() -> list[census.Function]:
    """Return the product's functions, read once and not while tests are collected."""
    return TAKEN.functions(TAKEN.code)


def test_no_file_is_longer_than_400_lines():
    assert [path for path in TAKEN.code if TAKEN.num_lines(path) > 400] == []


def test_no_function_is_longer_than_60_lines():
    long = [f"{f.path}:{f.line} {f.name} {f.num_lines}" for f in functions() if f.num_lines > 60]

    assert long == []


def test_every_function_is_typed():
    assert [f"{f.path}:{f.line} {f.name}" for f in functions() if not f.is_typed] == []


def test_functions_are_short_at_the_median_and_at_the_ninetieth_percentile():
    lengths = [function.num_lines for function in functions()]

    assert census.quantile(lengths, 0.5) <= 10
    assert census.quantile(lengths, 0.9) <= 36


def test_nine_files_of_ten_are_shorter_than_400_lines():
    assert census.quantile([TAKEN.num_lines(path) for path in TAKEN.code], 0.9) < 400


def test_tests_are_short():
    assert census.quantile([test.num_lines for test in TAKEN.test_functions], 0.5) <= 12


@pytest.mark.parametrize(
    ("numbers", "share", "expected"),
    [([1, 2, 3, 4], 0.5, 2), ([7], 0.9, 7), (list(range(1, 101)), 0.9, 90)],
)
def test_a_quantile_is_one_of_the_numbers(numbers, share, expected):
    assert census.quantile(numbers, share) == expected


@pytest.mark.parametrize(
    ("source", "is_typed"),
    [
        ("def f(a: int) -> int: ...", True),
        ("def f(a) -> int: ...", False),
        ("def f(a: int): ...", False),
        ("def f(*args) -> None: ...", False),
        ("class C:\n    def f(self) -> None: ...", True),
    ],
)
def test_a_function_counts_as_typed_only_when_all_of_it_is(tmp_path, source, is_typed):
    (tmp_path / "one.py").write_text(source)

    (found,) = census.Census(tmp_path, ()).functions(["one.py"])

    assert found.is_typed is is_typed
