"""What compresses: the method, the bits and the group that a line, a script or a recipe states."""

from planner.imports import read_paste

QWEN = "Qwen/Qwen3-8B"
RECIPE = '''"""
quant_stage:
  quant_modifiers:
    GPTQModifier:
      scheme: W8A16
      targets: [Linear]
"""'''


def oneshot(recipe, extra="max_seq_length=LENGTH, num_calibration_samples=256"):
    """Return a script of LLM Compressor that loads a model by a constant."""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'from llmcompressor import oneshot\nMODEL_ID = "{QWEN}"\nLENGTH = 512\n'
        "model = AutoModelForCausalLM.from_pretrained(MODEL_ID, dtype='auto')\n"
        "tokenizer = AutoTokenizer.from_pretrained('other/tokenizer')\n"
        f"recipe = {recipe}\noneshot(model=model, dataset=ds, recipe=recipe, {extra})\n"
    )


INT4 = {"bits": 4, "group_size": 128}
LEARNED = {"method": "autoround", **INT4}
# A text, its workload beside the kind, and words of its assumptions.
TEXTS = {
    "llama-quantize Qwen3-8B-F16.gguf out.gguf Q4_K_M 8": ({"method": "gguf", "bits": 4}, ""),
    "llama quantize models/Qwen3-8B/ggml-model-bf16.gguf q8_0": (
        {"method": "gguf", "bits": 8}, ""
    ),
    "./llama-quantize --allow-requantize --imatrix i.dat Qwen3-8B-Q8_0.gguf o.gguf Q4_K": (
        {"method": "gguf", "bits": 4}, "the model's own weights"
    ),
    f"auto-round {QWEN}": (LEARNED, ""),
    f"auto_round --model {QWEN} --bits 3 --group_size 64": (
        {"method": "autoround", "bits": 3, "group_size": 64}, ""
    ),
    f"auto-round-best --model {QWEN} --scheme W2A16": (
        {"method": "autoround", "bits": 2, "group_size": 128, "calibration_tokens": 512 * 2048},
        "1000 steps of the recipe",
    ),
    f"auto-round --model {QWEN} --nsamples 64 --seqlen 1k --iters 500": (
        {**LEARNED, "calibration_tokens": 64_000}, "--iters 500: Slipway learns"
    ),
    f"auto-round --model {QWEN} --algorithm awq --asym": ({"method": "awq", **INT4}, "--asym"),
    f"auto-round --model {QWEN} --iters 0 --nsamples 4": (
        {"method": "int4_weight_only", "group_size": 128}, ""
    ),
    f"auto-round --model {QWEN} --format gguf:q4_k_m": ({"method": "gguf", "bits": 4}, ""),
    f"auto-round --model {QWEN} --scheme FP8_STATIC": ({"method": "fp8"}, "activations stay"),
    oneshot('[AWQModifier(scheme="W4A16_ASYM", ignore=["lm_head"])]'): (
        {"method": "awq", **INT4, "calibration_tokens": 256 * 512}, ""
    ),
    oneshot('GPTQModifier(targets="Linear", scheme="W4A16")', "max_seq_length=2048"): (
        {"method": "gptq", **INT4, "calibration_tokens": 512 * 2048}, ""
    ),
    oneshot('[SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(scheme="W8A8")]'): (
        {"method": "int8_dynamic"}, "by gptq: int8_dynamic rounds"
    ),
    oneshot('QuantizationModifier(scheme="FP8_DYNAMIC")', "output_dir='x'"): (
        {"method": "fp8"}, "activations stay in 16 bits"
    ),
    oneshot(RECIPE): ({"method": "gptq", "bits": 8, "calibration_tokens": 256 * 512}, ""),
}  # fmt: skip


def test_a_scheme_becomes_a_method_bits_and_a_group():
    for text, (workload, said) in TEXTS.items():
        draft = read_paste(text)
        assert draft.request["model"] == QWEN, text
        assert draft.request["workload"] == {"kind": "compress", **workload}, text
        assert said in " ".join(draft.assumptions), text
        assert bool(draft.assumptions) == bool(said), (text, draft.assumptions)
        assert draft.unknown == (), text
