"""Stored benchmark ratios that prove techniques.

A technique is proven if the confidence interval of each of its ratios (baseline / technique, in
one run) is above its floor. ``manage.py bench NAME --keep`` stores ratios.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from runners.host.abilities import ABILITIES, Level
from runners.host.bench import StoredRatio

RESULTS_PATH = Path(__file__).parent / "data" / "ratios.jsonl"
_DIRECTIONS = "tests/system/jobs/generate/test_directions.py"
_COMPRESS = "tests/system/jobs/compress"
_UNIT_TESTS = "tests/runners/jobs"
_ADAPTER = (
    "tests/runners/jobs/test_device_rates.py::"
    "test_an_adapter_trains_and_holds_far_less_than_the_whole_model"
)
_PACE = "tests/system/jobs/test_training_pace_bench.py"
_POLICY = (
    "tests/runners/jobs/generate/test_policy.py::"
    "test_each_layer_comes_once_a_pass_however_many_micro_batches_it_serves"
)
_FITTING = "tests/runners/jobs/test_device_rates.py::test_what_makes_training_fit_holds_less"


class Proof(NamedTuple):
    """A ratio required of a technique, and the test that proves its direction by counts."""

    ratio: str
    shows: str
    test: str
    floor: float = 1.0


def _proof(ratio: str, shows: str, test: str) -> Proof:
    return Proof(ratio, shows, f"{_DIRECTIONS}::{test}")


_PACKED = _proof(
    "padded / padding-free prefill",
    "the same prompts without padding take less",
    "test_no_position_is_computed_for_padding",
)
PROOFS: dict[str, tuple[Proof, ...]] = {
    "fp16_bf16": (
        Proof(
            "fp32 / bf16 weights",
            "half the bytes of FP32",
            "tests/runners/test_bench.py::test_half_as_many_bits_are_half_the_bytes",
        ),
        Proof(
            "fp32 / bf16 perplexity",
            "perplexity grows by less than a hundredth",
            "tests/runners/test_bench.py::test_half_precision_reads_text_as_well",
            floor=0.99,
        ),
    ),
    "int8_weight_only": (
        Proof(
            "bf16 / int8 matrices",
            "fewer bytes than 16 bit, and twice as many times fewer than FP32",
            f"{_COMPRESS}/test_library_job.py::"
            "test_int8_matrices_take_half_of_bf16_and_their_scales",
        ),
    ),
    "int8_dynamic": (
        Proof(
            "bf16 / int8 dynamic matrices",
            "fewer bytes than 16 bit, and twice as many times fewer than FP32",
            f"{_COMPRESS}/test_int8_dynamic_job.py::"
            "test_matrices_take_half_and_the_text_reads_nearly_as_before",
        ),
        Proof(
            "bf16 / int8 dynamic perplexity",
            "perplexity grows by less than a hundredth, with inputs in 8 bits too",
            f"{_COMPRESS}/test_int8_dynamic_job.py::"
            "test_matrices_take_half_and_the_text_reads_nearly_as_before",
            floor=0.99,
        ),
    ),
    "int4_weight_only": (
        Proof(
            "bf16 / nf4 matrices",
            "fewer bytes than 16 bit, and twice as many times fewer than FP32",
            f"{_COMPRESS}/test_library_job.py::test_int4_matrices_are_really_packed",
        ),
    ),
    "gptq": (
        Proof(
            "bf16 / GPTQ 4-bit matrices",
            "fewer bytes to store and read; speed is the kernels' of a GPU, not shown here",
            f"{_COMPRESS}/test_layerwise_job.py::"
            "test_codes_are_packed_as_compressed_tensors_has_them",
        ),
        Proof(
            "round-to-nearest / GPTQ perplexity, 2 bit",
            "reads text better than rounding to nearest",
            f"{_UNIT_TESTS}/compress/test_quantising_a_matrix.py::test_gptq_errs_less_than_the_nearest_codes",
        ),
    ),
    "sparsegpt": (
        Proof(
            "bf16 / SparseGPT matrices",
            "half of the weights gone: the values left and a bit for each take less",
            f"{_UNIT_TESTS}/compress/test_pruning_a_matrix.py::"
            "test_the_sparse_store_takes_a_bit_a_weight_and_the_values",
        ),
        Proof(
            "magnitude / SparseGPT perplexity, half of the weights",
            "reads text better than pruning by magnitude",
            f"{_UNIT_TESTS}/compress/test_pruning_a_matrix.py::"
            "test_errors_fall_from_magnitude_over_wanda_to_sparsegpt",
        ),
    ),
    "kv_cache": (
        _proof(
            "no cache / KV cache",
            "each token is computed once",
            "test_with_a_cache_every_token_is_computed_once",
        ),
    ),
    "paged_attention": (
        _proof(
            "contiguous / paged cache of the same bytes",
            "in the same bytes more prompts are worked on at once",
            "test_shared_pages_take_fewer_passes_than_reserved_ones_of_the_same_bytes",
        ),
    ),
    "continuous_batching": (
        _proof(
            "static / continuous batching",
            "no prompt waits for the longest of its batch",
            "test_continuous_batches_compute_less_than_static_ones",
        ),
    ),
    "dynamic_batching": (
        _proof(
            "one by one / one batch",
            "prompts together take less than one by one",
            "test_a_batch_takes_the_passes_of_one_prompt",
        ),
    ),
    "turbotransformers": (
        _proof(
            "given order / TurboTransformers",
            "less padding than batches in the given order",
            "test_the_dynamic_programme_computes_least_padding",
        ),
        _proof(
            "sorted / TurboTransformers",
            "less padding than full batches of sorted prompts",
            "test_the_dynamic_programme_computes_least_padding",
        ),
    ),
    "padding_free": (_PACKED,),
    "bytetransformer": (_PACKED,),
    "pets": (
        Proof(
            "adapters one by one / in one batch",
            "requests of different adapters share every pass over the base",
            "tests/runners/jobs/serve/test_padded_decode.py::"
            "test_adapters_in_one_batch_take_the_passes_of_one_of_them",
        ),
    ),
    "lora": (
        Proof(
            "full / LoRA trained parameters",
            "far fewer parameters are trained than there are",
            _ADAPTER,
        ),
        Proof(
            "full / LoRA optimiser states",
            "the optimiser holds states of the adapter alone",
            _ADAPTER,
        ),
    ),
    "lomo": (
        Proof(
            "AdamW / LOMO peak of a step",
            "weights, gradients, states and activations together take less",
            _FITTING,
        ),
    ),
    "adamw_8bit": (
        Proof("AdamW / AdamW 8-bit states", "about a quarter of the bytes of moments", _FITTING),
    ),
    "gradient_checkpointing": (
        Proof(
            "kept / full recomputation's activations",
            "activations halved or better, where layers keep more than the loss",
            _FITTING,
        ),
        Proof(
            "kept / selective recomputation's activations",
            "less is held although no product is computed again",
            _FITTING,
        ),
        *(
            Proof(
                f"kept / {how} recomputation's seconds",
                "at the price of a forward pass: the work of a step does not double",
                f"{_PACE}::test_recomputation_does_not_double_the_work_of_a_step",
                floor=0.5,
            )
            for how in ("selective", "full")
        ),
    ),
    "growlength": (
        Proof(
            "whole / growing lengths, time",
            "as many tokens in less time",
            f"{_PACE}::test_growing_lengths_take_less_time_for_as_many_tokens",
        ),
        Proof(
            "whole / growing lengths, loss",
            "the loss at the whole length grows by less than a hundredth",
            f"{_PACE}::test_growing_lengths_take_less_time_for_as_many_tokens",
            floor=0.99,
        ),
    ),
    **{
        key: (
            Proof(
                f"copies / {name} {term}, 4 ranks",
                f"{term} are divided among the ranks",
                "tests/system/jobs/train/test_equality.py::"
                "test_each_rank_holds_the_bytes_that_the_planner_counts_for_zero",
            ),
        )
        for key, name, term in (
            ("zero_1", "ZeRO-1", "optimiser states"),
            ("zero_2", "ZeRO-2", "gradients"),
            ("zero_3", "ZeRO-3", "weights"),
        )
    },
    "automatic_parallelism": tuple(
        Proof(
            f"fastest other layout / planner's first choice, {model} model",
            "the searched plan takes at most 5 % longer than the fastest of all others",
            "tests/runners/jobs/test_device_rates.py::"
            "test_the_regret_is_against_the_fastest_other_of_all_rounds",
            floor=0.95,
        )
        for model in ("wide", "deep")
    ),
    "swapadvisor": (
        Proof("kept / swapped activations", "what waits on disk is not in memory", _FITTING),
    ),
    "zero_inference": (
        _proof(
            "accelerate's map / streamed layers",
            "in the same memory, less than accelerate's default map",
            "test_at_one_cap_streamed_layers_bring_fewer_bytes_than_accelerates_map",
        ),
        _proof(
            "streamed one by one / for a batch",
            "a batch pays once for what comes from disk",
            "test_a_batch_takes_the_passes_of_one_prompt",
        ),
    ),
    "flexgen": (
        Proof(
            "accelerate's default map / the planner's policy, in one memory",
            "in the same memory the same pile is answered sooner",
            _POLICY,
        ),
        Proof(
            "accelerate's default map / the planner's policy, from one disk",
            "weights are read once for the whole pile, not for each batch that fits",
            _POLICY,
        ),
    ),
    "speculative_decoding": (
        _proof(
            "plain / speculative decoding",
            "the same text in fewer passes, where guesses are right",
            "test_right_guesses_save_passes",
        ),
    ),
}


def stored(path: Path = RESULTS_PATH) -> dict[str, StoredRatio]:
    """Return the stored ratios by name."""
    lines = path.read_text().splitlines() if path.is_file() else []
    ratios = [StoredRatio.model_validate_json(line) for line in lines]
    return {each.name: each for each in ratios}


def keep(rows: Iterable[StoredRatio], path: Path = RESULTS_PATH) -> None:
    """Store ratios in place of earlier ones of the same commands."""
    newer = list(rows)
    commands = {each.command for each in newer}
    older = [each for each in stored(path).values() if each.command not in commands]
    lines = [each.model_dump_json() for each in (*older, *newer)]
    path.write_text("".join(f"{line}\n" for line in lines))


def holds(proof: Proof, ratio: StoredRatio | None) -> bool:
    """Return whether a ratio is stored and its interval is above the floor."""
    return ratio is not None and ratio.low > proof.floor


def level_of(key: str, rows: dict[str, StoredRatio]) -> Level:
    """Return the level of a technique: planned, runs, or proven by measured ratios."""
    if key not in ABILITIES:
        return "planned"
    proofs = PROOFS.get(key, ())
    is_proven = bool(proofs) and all(holds(each, rows.get(each.ratio)) for each in proofs)
    return "proven" if is_proven else "runs"


def evidence(key: str, rows: dict[str, StoredRatio]) -> Sequence[tuple[Proof, StoredRatio]]:
    """Return a technique's proofs with their stored ratios."""
    return [(each, rows[each.ratio]) for each in PROOFS.get(key, ()) if each.ratio in rows]
