"""Entropy coding of ternary symbols with an asymmetric numeral system (rANS).

Lanes of symbols are coded in parallel, so that every step is one vector operation; all lanes
share one stream of 16-bit words. Source: Duda 2013, arXiv:1311.2540; word order as in
interleaved coders.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[np.uint8]
SYMBOLS = 3
PRECISION_BITS = 12  # frequencies are multiples of 1/4096
TOTAL = 1 << PRECISION_BITS
WORD_BITS = 16
LOWEST = np.uint64(1 << WORD_BITS)  # of a state, which has 32 bits
SYMBOLS_A_LANE = 4096  # a lane's last state costs four bytes


class CorruptCodeError(Exception):
    """The words do not decode to valid symbols."""


@dataclass(frozen=True)
class Coded:
    """A stream of words, the final state of each lane, and the symbol frequencies."""

    words: npt.NDArray[np.uint16]
    states: npt.NDArray[np.uint32]
    frequencies: npt.NDArray[np.uint16]
    count: int

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of everything needed for decoding."""
        return int(self.words.nbytes + self.states.nbytes + self.frequencies.nbytes)


def entropy_bits(symbols: Symbols) -> float:
    """Return the entropy in bits per symbol, the lower bound of symbol codes."""
    shares = np.bincount(symbols.ravel(), minlength=SYMBOLS) / symbols.size
    return float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())


def encode(symbols: Symbols) -> Coded:
    """Return ternary symbols (0, 1, 2) as a code."""
    count = symbols.size
    frequencies = frequencies_of(symbols)
    lanes = -(-count // SYMBOLS_A_LANE)
    padded = np.full(lanes * SYMBOLS_A_LANE, frequencies.argmax(), np.uint8)
    padded[:count] = symbols.ravel()
    steps = padded.reshape(lanes, SYMBOLS_A_LANE).T
    parts, starts = frequencies.astype(np.uint64), _starts(frequencies)
    states = np.full(lanes, LOWEST, np.uint64)
    words: list[npt.NDArray[np.uint16]] = []
    for row in steps[::-1]:
        part = parts[row]
        is_full = states >= part << np.uint64(2 * WORD_BITS - PRECISION_BITS)
        words.append((states[is_full] & np.uint64(0xFFFF)).astype(np.uint16))
        states[is_full] >>= np.uint64(WORD_BITS)
        states = (states // part << np.uint64(PRECISION_BITS)) + states % part + starts[row]
    return Coded(np.concatenate(words[::-1]), states.astype(np.uint32), frequencies, count)


def decode(coded: Coded) -> Symbols:
    """Return the symbols of a code.

    Raises:
        CorruptCodeError: words are missing, surplus or changed.
    """
    if coded.frequencies.sum() != TOTAL or len(coded.frequencies) != SYMBOLS:
        raise CorruptCodeError("the frequencies of a ternary code do not add up")
    parts, starts = coded.frequencies.astype(np.uint64), _starts(coded.frequencies)
    symbol_of = np.repeat(np.arange(SYMBOLS, dtype=np.uint8), coded.frequencies)
    states, at = coded.states.astype(np.uint64), 0
    steps = np.empty((SYMBOLS_A_LANE, len(states)), np.uint8)
    for row in steps:
        place = states & np.uint64(TOTAL - 1)
        row[:] = symbol_of[place]
        states = parts[row] * (states >> np.uint64(PRECISION_BITS)) + place - starts[row]
        is_low = states < LOWEST
        taken = coded.words[at : at + int(is_low.sum())]
        if len(taken) < is_low.sum():
            raise CorruptCodeError("a ternary code ends too early")
        states[is_low] = states[is_low] << np.uint64(WORD_BITS) | taken
        at += len(taken)
    if at != len(coded.words) or (states != LOWEST).any():
        raise CorruptCodeError("a ternary code does not end as it was begun")
    return steps.T.reshape(-1)[: coded.count]


def frequencies_of(symbols: Symbols) -> npt.NDArray[np.uint16]:
    """Return each symbol's frequency in parts of 4096, at least 1 if it occurs."""
    counts = np.bincount(symbols.ravel(), minlength=SYMBOLS).astype(np.float64)
    parts = np.maximum(np.rint(counts / counts.sum() * TOTAL), counts > 0).astype(np.int64)
    parts[parts.argmax()] += TOTAL - parts.sum()
    frequencies: npt.NDArray[np.uint16] = parts.astype(np.uint16)
    return frequencies


def _starts(frequencies: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint64]:
    """Return the cumulative frequencies."""
    starts: npt.NDArray[np.uint64] = (np.cumsum(frequencies) - frequencies).astype(np.uint64)
    return starts
