"""Sizes of GGUF files by the widths of a model's rows, compared with published files."""

import pytest

from planner.catalog.gguf import file_bytes, file_sizes, packed_format
from planner.catalog.models import get_model, list_models
from planner.cost.parameters import count_parameters
from planner.cost.weights import padded_expert_ratio
from planner.fitting.evidence import table
from planner.specs.model import ModelSpec
from tests.planner.asking import ask, held

GIB = 1024**3
ONE = {"kind": "generate", "batch_size": 1, "input_tokens": 512, "output_tokens": 128}
# A file is larger than its weights by the tokenizer, which counts in small models.
TOLERANCE = 0.02
WIDER = {("tiiuae/falcon-7b", "q4_k_m"): 0.03}  # the file has a head of its own
LIGHTNING = "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"


def weights(model, device="h100-sxm5-80gb", engine="llama_cpp", quantization=None, **fields):
    strategy = {"quantization": quantization} if quantization else {}
    strategy |= fields.pop("strategy", {})
    found = ask(
        model=model, device=device, engine=engine, workload=ONE, strategy=strategy, **fields
    )
    return held(found, "weights")


@pytest.mark.parametrize("row", table("gguf_sizes"), ids=lambda row: row["row_id"])
def test_a_file_is_as_large_as_published(row):
    tolerance = WIDER.get((row["model"], row["kind"]), TOLERANCE)

    found = file_bytes(row["kind"], get_model(row["model"]))

    assert found == pytest.approx(float(row["published_bytes"]), rel=tolerance)


@pytest.mark.parametrize("kind", ["q4_k_m", "iq3_xxs", "q8_0"])
def test_every_model_of_the_catalog_has_the_bits_of_its_parts(kind):
    for entry in list_models():
        model = get_model(entry.id)
        counts, sizes = count_parameters(model), file_sizes(kind, model)
        parts = (counts.layer_linear - counts.experts) * sizes.dense_bits
        parts += counts.experts * sizes.expert_bits

        assert parts == pytest.approx(counts.layer_linear * sizes.linear_bits), entry.id
        assert 2 < sizes.linear_bits <= 16, entry.id


def test_a_model_of_odd_widths_is_answered_by_its_own_bits():
    """ggml-org/llama.cpp PR#28474: 6.18 bits instead of the recipe's 5.00, 24.4 GB."""
    found = weights(LIGHTNING, device="rtx-3090", quantization="gguf:q4_k_m")

    assert found == pytest.approx(24.4e9, rel=0.05)


@pytest.mark.parametrize(
    ("width", "kind", "bits"),
    [
        (1024, "q4_k_s", 4.5),
        (1024 + 128, "q4_k_s", 5.5),
        (1024 + 128, "q5_k_s", 6.0),
        (1024 + 128, "q6_k", 8.5),
        (1024 + 128, "q3_k_s", 4.5),
        (1024 + 128, "iq3_s", 4.5),
        (1024 + 16, "q6_k", 16.0),
    ],
)
def test_rows_of_no_whole_block_fall_back_to_a_wider_type(width, kind, bits):
    model = ModelSpec(
        model_type="llama",
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=width,
        vocab_size=256,
        max_position_embeddings=256,
    )
    sizes = file_sizes(kind, model)

    # The first value and down projections of q4_k_s and q5_k_s take more bits in some models.
    assert sizes.linear_bits == pytest.approx(bits, rel=0.05)


def test_fractional_mixes_and_forks_keep_their_usual_bits():
    model = get_model(LIGHTNING)

    for name in ("gguf:3.9", "gguf:iq4_k", "exl2:4.25", None):
        assert packed_format(name, model) == packed_format(name)


@pytest.mark.parametrize(
    ("model", "gib"), [("openai/gpt-oss-20b", 11.27), ("openai/gpt-oss-120b", 59.02)]
)
def test_llama_cpp_stores_all_but_mxfp4_experts_in_8_bits(model, gib):
    """llama-bench of ggml-org's files, as in ggml-org/llama.cpp PR#16991."""
    assert weights(model) / GIB == pytest.approx(gib, rel=0.005)
    assert weights(model, quantization="gguf:mxfp4_moe") == weights(model)


@pytest.mark.parametrize(
    ("model", "device", "gib"),
    [
        ("openai/gpt-oss-120b", "h100-sxm5-80gb", 65.97),  # vllm-project/vllm#23278
        ("openai/gpt-oss-20b", "a100-sxm4-40gb", 13.72),  # "Model loading took 13.72 GiB"
    ],
)
def test_vllm_loads_mxfp4_experts_in_padded_widths(model, device, gib):
    assert weights(model, device, "vllm") / GIB == pytest.approx(gib, rel=0.005)
    assert weights(model, device, "sglang") / GIB < 0.95 * gib


@pytest.mark.parametrize(
    ("ranks", "multiples", "widths"),
    [
        (1, (128, 256), (2944, 3072)),
        (8, (128, 256), (8 * 384, 3072)),
        (1, (256, 256), (3072, 3072)),
    ],
)
def test_each_rank_rounds_its_own_columns_up(ranks, multiples, widths):
    found = padded_expert_ratio(2880, 2880, ranks, multiples)

    assert found == pytest.approx(widths[0] * widths[1] / 2880**2)
