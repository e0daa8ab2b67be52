"""K-quants written by our code, read by the gguf package's decoder."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from runners.jobs.compress.gguf import is_as_written, quantize, type_of

EACH = pytest.mark.parametrize(
    ("kind", "bits", "plain"),
    [(Type.Q4_K, 4.5, Type.Q4_0), (Type.Q5_K, 5.5, Type.Q5_0), (Type.Q6_K, 6.5625, Type.Q5_0)],
)
MATRIX = np.zeros((4, 512), np.float32)


@pytest.fixture(scope="module")
def rows():
    """Rows of unlike size; one of zeros, one above zero only, one with outliers."""
    generator = np.random.default_rng(17)
    sizes = np.exp(generator.standard_normal((64, 1))) * 0.02
    made = (generator.standard_normal((64, 512)) * sizes).astype(np.float32)
    made[0], made[1] = 0.0, np.abs(made[1])
    made[2, ::64] *= 30
    return made


def error(rows, decoded) -> float:
    return float(np.sqrt(((rows - decoded) ** 2).sum() / (rows**2).sum()))


@EACH
def test_a_row_takes_the_bits_of_its_type(rows, kind, bits, plain):
    assert quantize(rows, kind).shape[1] * 8 / rows.shape[1] == bits


@EACH
def test_the_decoder_gets_nearer_weights_than_from_a_plain_type(rows, kind, bits, plain):
    decoded = quants.dequantize(quantize(rows, kind), kind)

    again = quants.dequantize(quants.quantize(rows, plain), plain)
    assert error(rows, decoded) < 0.9 * error(rows, again)
    assert is_as_written(rows, decoded, kind)
    assert not decoded[0].any()


@EACH
def test_weights_of_another_matrix_are_told_apart(rows, kind, bits, plain):
    decoded = quants.dequantize(quantize(rows, kind), kind)

    assert not is_as_written(rows[::-1], decoded, kind)


def test_values_on_the_grid_come_back_as_they_were():
    codes = np.tile(np.arange(16, dtype=np.float32), (1, 16))
    exact = codes / 1024 * 63  # a scale of 63 codes, with no offset

    decoded = quants.dequantize(quantize(exact, Type.Q4_K), Type.Q4_K)

    assert decoded == pytest.approx(exact, rel=2e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("blk.0.attn_v.weight", MATRIX, Type.Q6_K),  # of the first eighth
        ("blk.1.attn_v.weight", MATRIX, Type.Q4_K),
        ("blk.3.ffn_down.weight", MATRIX, Type.Q6_K),  # each third after it
        ("blk.7.ffn_down.weight", MATRIX, Type.Q6_K),
        ("blk.0.attn_q.weight", MATRIX, Type.Q4_K),
        ("output.weight", MATRIX, Type.Q6_K),
        ("token_embd.weight", MATRIX, Type.Q4_K),
        ("blk.0.attn_q.weight", MATRIX[:, :192], Type.Q5_0),
        ("output.weight", MATRIX[:, :192], Type.Q8_0),
        ("blk.0.attn_norm.weight", MATRIX[0], Type.F32),
        ("blk.0.attn_q.weight", MATRIX[:, :40], Type.F16),
    ],
)
def test_the_mixture_is_that_of_llama_cpp(name, array, expected):
    assert type_of(name, array, "Q4_K_M", 8) == expected


def test_an_embedding_that_is_the_output_too_gets_its_bits():
    assert type_of("token_embd.weight", MATRIX, "Q4_K_M", 8, is_tied=True) == Type.Q6_K
