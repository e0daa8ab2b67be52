"""Ternary symbols through the entropy code and back, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from runners.jobs.ternary_files import CorruptCodeError, decode, encode, entropy_bits


def drawn(shares, count=200_000):
    generator = np.random.default_rng(5)
    return generator.choice(3, size=count, p=shares).astype(np.uint8)


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 50_000])
@pytest.mark.parametrize("shares", [(0.9, 0.06, 0.04), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5)])
def test_what_goes_in_comes_out(shares, count):
    symbols = drawn(shares, count)

    assert np.array_equal(decode(encode(symbols)), symbols)


@pytest.mark.parametrize("shares", [(0.9, 0.06, 0.04), (1 / 3, 1 / 3, 1 / 3), (0.6, 0.39, 0.01)])
def test_the_code_is_hardly_longer_than_the_entropy(shares):
    symbols = drawn(shares)

    bits = 8 * encode(symbols).stored_bytes / symbols.size

    least = entropy_bits(symbols)
    assert least <= bits < least + 0.02


def test_the_entropy_is_that_of_the_formula():
    assert entropy_bits(np.array([0, 0, 1, 2], np.uint8)) == pytest.approx(1.5)
    assert entropy_bits(np.zeros(9, np.uint8)) == 0.0


def test_a_rare_symbol_still_has_a_part():
    symbols = np.zeros(100_000, np.uint8)
    symbols[77_777] = 2

    assert np.array_equal(decode(encode(symbols)), symbols)


@pytest.mark.parametrize("damage", ["cut", "changed", "longer", "parts"])
def test_damage_is_found(damage):
    coded = encode(drawn((0.8, 0.1, 0.1), 20_000))
    changed = coded.words.copy()
    changed[7] ^= 0x5A5A
    wrong = {
        "cut": replace(coded, words=coded.words[:-3]),
        "changed": replace(coded, words=changed),
        "longer": replace(coded, words=np.append(coded.words, np.uint16(1))),
        "parts": replace(coded, frequencies=coded.frequencies + np.uint16(1)),
    }[damage]

    with pytest.raises(CorruptCodeError):
        decode(wrong)
