"""Which techniques jobs execute, with which library, and the test of each.

Techniques without an entry are only planned; an entry is proven if a measured ratio of it is
stored. A test checks that every named test exists.
"""

import importlib.metadata
from typing import Literal, NamedTuple

Level = Literal["planned", "runs", "proven"]
OWN = "own code"
_COMPRESS = "tests/system/jobs/compress"
_UNIT_TESTS = "tests/runners/jobs"
_GENERATE = "tests/system/jobs/generate"
_TECHNIQUES = f"{_GENERATE}/test_techniques.py"
_TRAIN = "tests/system/jobs/train"
_SERVE = "tests/system/jobs/serve"
_EQUALITY = "tests/system/jobs/train/test_equality.py"
_LEARNS_THE_SAME = f"{_EQUALITY}::test_a_layout_learns_what_one_process_learns"
_RELOADS = (
    f"{_COMPRESS}/test_layerwise_job.py::"
    "test_plain_transformers_reads_the_folder_with_the_perplexity_of_the_result"
)


class Ability(NamedTuple):
    """How one technique runs: job kind, library distribution, and one test of it."""

    job_kind: str
    library: str
    test: str

    @property
    def version(self) -> str:
        """Return the library's version on this host; "" for own code or if not installed."""
        if self.library == OWN:
            return ""
        try:
            return importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return ""


ABILITIES: dict[str, Ability] = {
    **dict.fromkeys(
        (
            "data_parallel",
            "tensor_parallel",
            "sequence_parallel",
            "pipeline_parallel",
            "ptd_p",
            "pipeline_gpipe",
            "pipeline_1f1b",
            "pipeline_interleaved",
            "pipeline_zero_bubble",
        ),
        Ability("train", "torch", _LEARNS_THE_SAME),
    ),
    "uneven_stages": Ability("train", "torch", _LEARNS_THE_SAME),
    "swarm": Ability(
        "train",
        "torch",
        f"{_TRAIN}/test_killed_ranks.py::test_the_loss_goes_on_unbroken_from_the_last_checkpoint",
    ),
    "elastic_training": Ability(
        "train",
        "torch",
        "tests/system/namespaces/test_three_hosts.py::test_the_others_go_on_from_the_last_checkpoint",
    ),
    **dict.fromkeys(
        ("expert_parallel", "colossal_ai", "collie"), Ability("train", OWN, _LEARNS_THE_SAME)
    ),
    **dict.fromkeys(
        ("zero_1", "zero_2"),
        Ability(
            "train",
            OWN,
            f"{_EQUALITY}::test_each_rank_holds_the_bytes_that_the_planner_counts_for_zero",
        ),
    ),
    "distilbert_validation": Ability(
        "train",
        "transformers",
        f"{_TRAIN}/test_encoder_equality.py::test_a_layout_learns_what_one_process_learns",
    ),
    "zero_3": Ability(
        "train",
        "torch",
        f"{_EQUALITY}::test_each_rank_holds_the_bytes_that_the_planner_counts_for_zero",
    ),
    "automatic_parallelism": Ability(
        "train",
        OWN,
        "tests/webapp/core/test_benches.py::"
        "test_every_layout_takes_all_ranks_and_the_planner_chooses_the_fastest_of_them",
    ),
    "gradient_compression": Ability(
        "train",
        "torch",
        f"{_EQUALITY}::test_copies_that_compress_nearly_learn_what_one_process_learns",
    ),
    "decentralized_training": Ability(
        "train",
        OWN,
        f"{_EQUALITY}::"
        "test_copies_that_meet_every_other_step_are_the_mean_of_two_that_learn_alone",
    ),
    "fp16_bf16": Ability(
        "train",
        "torch",
        "tests/system/jobs/train/test_train_job.py::"
        "test_the_published_model_reads_text_as_the_result_says",
    ),
    "int8_weight_only": Ability(
        "compress",
        "torchao",
        f"{_COMPRESS}/test_library_job.py::test_int8_matrices_take_half_of_bf16_and_their_scales",
    ),
    "int8_dynamic": Ability(
        "compress",
        "torchao",
        f"{_COMPRESS}/test_int8_dynamic_job.py::test_a_reader_rounds_each_tokens_inputs_too",
    ),
    "int4_weight_only": Ability(
        "compress",
        "bitsandbytes",
        f"{_COMPRESS}/test_library_job.py::test_int4_matrices_are_really_packed",
    ),
    "gptq": Ability("compress", OWN, _RELOADS),
    "quantease": Ability("compress", OWN, _RELOADS),
    "sparsegpt": Ability("compress", OWN, _RELOADS),
    "awq": Ability("compress", OWN, _RELOADS),
    "fptq_w4a8": Ability("compress", OWN, _RELOADS),
    "norm_tweaking": Ability(
        "compress",
        OWN,
        f"{_UNIT_TESTS}/compress/test_quantising_a_matrix.py::"
        "test_norms_bring_the_outputs_distribution_nearer_to_that_before",
    ),
    "finequant": Ability("compress", OWN, _RELOADS),
    "fp8": Ability(
        "compress",
        "torchao",
        f"{_COMPRESS}/test_fp8_job.py::test_matrices_take_a_byte_a_weight_and_a_scale_a_row",
    ),
    "llm_pruner": Ability(
        "compress",
        OWN,
        f"{_COMPRESS}/test_cutting_structure.py::test_the_folder_is_a_smaller_model_of_one_shape",
    ),
    "qmoe": Ability(
        "compress",
        OWN,
        f"{_COMPRESS}/test_qmoe_job.py::test_experts_take_about_as_few_bits_as_their_entropy",
    ),
    "sheared_llama": Ability(
        "compress",
        OWN,
        f"{_COMPRESS}/test_shearing.py::"
        "test_each_domains_loss_is_reported_before_pruned_and_after",
    ),
    "model_pruning": Ability(
        "compress",
        OWN,
        f"{_COMPRESS}/test_cutting_structure.py::test_the_folder_is_a_smaller_model_of_one_shape",
    ),
    "turbotransformers": Ability(
        "generate",
        OWN,
        f"{_GENERATE}/test_job.py::test_every_policy_writes_what_plain_greedy_generation_writes",
    ),
    "continuous_batching": Ability(
        "serve",
        OWN,
        f"{_SERVE}/test_openai_client.py::"
        "test_sixty_four_clients_at_once_get_what_each_would_get_alone",
    ),
    "paged_attention": Ability(
        "serve",
        OWN,
        f"{_SERVE}/test_engine.py::test_whoever_makes_room_for_others_still_writes_the_same",
    ),
    "speculative_decoding": Ability(
        "generate",
        OWN,
        f"{_TECHNIQUES}::test_looking_up_the_prompt_writes_the_same_and_counts_what_was_right",
    ),
    "quantized_kv_cache": Ability(
        "generate",
        OWN,
        f"{_TECHNIQUES}::test_a_narrow_cache_holds_less_and_changes_few_answers",
    ),
    "zero_inference": Ability(
        "generate",
        OWN,
        f"{_GENERATE}/test_placement.py::test_layers_read_in_every_pass_write_the_same",
    ),
    "accelerate_offload": Ability(
        "generate",
        "accelerate",
        f"{_GENERATE}/test_placement.py::test_weights_mapped_to_disk_by_accelerate_write_the_same",
    ),
    "flexgen": Ability(
        "generate",
        OWN,
        f"{_UNIT_TESTS}/generate/test_policy.py::"
        "test_wherever_a_block_lies_it_writes_what_the_device_alone_writes",
    ),
    "moe_offload": Ability(
        "generate",
        OWN,
        f"{_GENERATE}/test_experts.py::"
        "test_a_job_with_cached_experts_writes_the_same_and_says_what_it_brought",
    ),
    "tensor_parallel_inference": Ability(
        "generate",
        "transformers",
        f"{_GENERATE}/test_ranked.py::test_a_share_of_every_matrix_on_each_rank_writes_the_same",
    ),
    "expert_parallel_inference": Ability(
        "generate",
        "transformers",
        f"{_GENERATE}/test_ranked.py::test_whole_experts_on_each_rank_write_the_same",
    ),
    "pipeline_parallel_inference": Ability(
        "generate",
        OWN,
        f"{_GENERATE}/test_ranked.py::test_a_run_of_layers_on_each_rank_writes_the_same",
    ),
    "petals": Ability(
        "generate",
        OWN,
        f"{_GENERATE}/test_chained.py::"
        "test_a_server_killed_in_the_middle_is_replaced_and_the_text_is_unbroken",
    ),
    **dict.fromkeys(
        ("padding_free", "bytetransformer"),
        Ability("generate", OWN, f"{_TECHNIQUES}::test_batches_without_padding_write_the_same"),
    ),
    "dynamic_batching": Ability(
        "generate",
        "transformers",
        f"{_GENERATE}/test_job.py::test_every_policy_writes_what_plain_greedy_generation_writes",
    ),
    "kv_cache": Ability(
        "generate",
        "transformers",
        f"{_GENERATE}/test_job.py::test_every_policy_writes_what_plain_greedy_generation_writes",
    ),
    "energy_cost": Ability(
        "generate",
        OWN,
        "tests/system/jobs/test_energy.py::"
        "test_a_job_says_how_many_joules_its_tokens_took_by_the_hosts_counter",
    ),
    "nlp_fast": Ability(
        "benchmark",
        "torch",
        "tests/system/jobs/test_profiling.py::"
        "test_a_benchmark_leaves_the_operators_of_both_phases",
    ),
    "pets": Ability(
        "serve",
        OWN,
        f"{_SERVE}/test_adapters.py::"
        "test_each_text_of_a_mixed_batch_is_that_of_its_merged_model_alone",
    ),
    "lora": Ability(
        "train",
        "peft",
        "tests/system/jobs/train/test_adapter_training.py::"
        "test_peft_opens_the_adapter_and_answers_as_the_merged_model",
    ),
    **dict.fromkeys(
        ("lightseq", "eet", "fused_kernels"),
        Ability(
            "generate",
            "torch",
            f"{_GENERATE}/test_compiled.py::test_a_compiled_step_writes_the_same",
        ),
    ),
    "flash_attention": Ability(
        "generate",
        "torch",
        f"{_TECHNIQUES}::test_either_attention_writes_the_same_and_is_named",
    ),
    "gradient_checkpointing": Ability(
        "train",
        "torch",
        f"{_UNIT_TESTS}/train/test_optimizers.py::"
        "test_whatever_is_kept_the_gradients_are_the_same_to_the_bit",
    ),
    "swapadvisor": Ability(
        "train",
        OWN,
        f"{_UNIT_TESTS}/train/test_optimizers.py::"
        "test_the_more_is_computed_again_or_lies_on_disk_the_less_is_held",
    ),
    **{
        key: Ability("train", library, f"{_UNIT_TESTS}/train/test_optimizers.py::{test}")
        for key, library, test in (
            ("lomo", OWN, "test_lomo_takes_the_step_of_gradient_descent"),
            ("adalomo", OWN, "test_lomo_has_no_state_and_adalomo_a_row_and_a_column"),
            (
                "adamw_8bit",
                "bitsandbytes",
                "test_states_are_as_small_as_the_literature_has_them",
            ),
            ("zero_offload", OWN, "test_moments_on_disk_make_the_update_of_adamw"),
            ("zero_infinity", OWN, "test_moments_on_disk_take_the_planned_bytes_and_no_memory"),
        )
    },
    "qft": Ability(
        "train",
        OWN,
        f"{_UNIT_TESTS}/train/test_integers.py::test_every_training_state_is_as_planned",
    ),
    "qlora": Ability(
        "train",
        "peft",
        f"{_TRAIN}/test_adapter_training.py::test_qlora_is_merged_into_the_base_of_the_full_width",
    ),
    "alphatuning": Ability(
        "train",
        OWN,
        f"{_UNIT_TESTS}/train/test_integers.py::"
        "test_alphatuning_trains_a_scale_for_each_group_alone",
    ),
    "quantization_aware_training": Ability(
        "train",
        OWN,
        f"{_UNIT_TESTS}/train/test_integers.py::test_the_plain_weights_lie_on_the_grid",
    ),
    "lightseq2": Ability(
        "train",
        "torch",
        f"{_TRAIN}/test_compiled_training.py::test_compiled_layers_learn_what_plain_ones_learn",
    ),
    "growlength": Ability(
        "train",
        OWN,
        f"{_UNIT_TESTS}/train/test_rows.py::test_each_step_has_as_many_tokens_in_longer_and_longer_rows",
    ),
    "mixed_precision": Ability(
        "train",
        "torch",
        f"{_UNIT_TESTS}/train/test_trainer.py::test_a_training_in_fp16_learns_and_ends_with_unscaled_gradients",
    ),
    "cramming": Ability(
        "train", OWN, "tests/runners/jobs/train/test_trainer.py::test_it_ends_when_the_time_is_up"
    ),
}
