"""Formats that are named by their file: GGUF mixes, and a mean number of bits."""

import pytest

from planner.catalog.gguf import packed_format
from planner.catalog.reading import data_toml
from planner.errors import UnknownNameError
from tests.planner.asking import LLAMA_8B, ask, held

GIB = 1024**3


def asked(quantization, model=LLAMA_8B):
    return ask(
        model=model, device="rtx-4090", engine="llama_cpp", strategy={"quantization": quantization}
    )


@pytest.mark.parametrize(
    ("kind", "published_gib"),
    [("q4_k_m", 4.58), ("q8_0", 7.95), ("q6_k", 6.14), ("q2_k", 2.95), ("iq4_xs", 4.17)],
)
def test_a_gguf_file_is_as_large_as_published(kind, published_gib):
    """llama.cpp tools/quantize/README.md, Llama-3.1-8B."""
    assert held(asked(f"gguf:{kind}"), "weights") / GIB == pytest.approx(published_gib, rel=0.01)


def test_a_70b_file_is_as_large_as_published():
    """Llama-3-70B Q4_K_M: 39.6 GiB, whose mix and vocabulary weigh otherwise than the 8B's."""
    found = asked("gguf:q4_k_m", "meta-llama/Meta-Llama-3-70B")

    assert held(found, "weights") / GIB == pytest.approx(39.6, rel=0.01)


def test_tied_embeddings_are_stored_like_the_head():
    found = asked("gguf:q4_k_m", "meta-llama/Llama-3.2-1B")

    assert held(found, "weights") == pytest.approx(807e6, rel=0.03)


def test_the_answer_names_the_nearest_dtype():
    names = [asked(f"gguf:{kind}").strategy.weight_dtype for kind in ("iq1_s", "q4_0", "q8_0")]

    assert names == ["ternary", "int4", "int8"]


def test_sixteen_bits_in_a_file_are_sixteen_bits():
    norms = 65 * 4096  # a file keeps them in 32 bits

    assert held(asked("gguf:f16"), "weights") == held(asked(None), "weights") + 2 * norms


def test_any_method_can_give_its_mean_bits():
    packed = packed_format("exl2:4.25")

    assert packed.linear_bytes_per_element == 4.25 / 8
    assert packed.head_bytes_per_element == 2


def test_an_unknown_type_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="q4_k_m") as caught:
        asked("gguf:q4_k_x")

    assert caught.value.field == "strategy.quantization"


@pytest.mark.parametrize("bits", ["0.1", "64", "many"])
def test_bits_that_cannot_be_are_refused(bits):
    with pytest.raises(UnknownNameError, match="give bits"):
        packed_format(f"exl2:{bits}")


def test_a_name_without_a_colon_is_no_packed_format():
    assert packed_format("awq") is None
    assert packed_format(None) is None


@pytest.mark.parametrize("kind", sorted(data_toml("packed.toml")["gguf"]))
def test_embedding_and_head_keep_no_fewer_bits_than_the_layers_by_much(kind):
    packed = packed_format(f"gguf:{kind}")

    assert packed.embedding_bits > 0.8 * packed.linear_bits
    assert packed.head_bits >= packed.linear_bits
