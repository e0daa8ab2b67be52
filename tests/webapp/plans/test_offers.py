"""Changes that are offered: what each brings and costs, and what it is for."""

from tests.webapp.plans.test_verdict_words import SERVE, WORK, answer_of, draft_of
from webapp.plans.offers import offers_of, suggestion_effect


def test_a_suggestion_says_what_it_brings_under_its_own_number():
    answer = answer_of("meta-llama/Llama-3.1-70B")
    for suggestion in answer.suggestions:
        assert suggestion_effect(suggestion).startswith("fits, ")

    answer = answer_of("meta-llama/Llama-3.1-70B")
    assert [chip.at for chip in chips_of(answer, draft_of())] == list(
        range(len(answer.suggestions))
    )


def chips_of(answer, draft):
    return [chip for group in offers_of(answer, draft) for chip in group.chips]


def test_fine_tuning_and_not_pre_training_is_offered_another_method():
    answer = answer_of("meta-llama/Llama-3.1-8B", workload=WORK["pretrain"])
    methods = [one.changes.get("workload", {}).get("method") for one in answer.suggestions]
    assert "lora" not in methods
    assert "adalomo" in methods
    offered = [chip.at for chip in chips_of(answer, draft_of("pretrain"))]
    assert methods.index("adalomo") not in offered

    work = WORK["pretrain"] | {"method": "full"}
    answer = answer_of("meta-llama/Llama-3.1-8B", workload=work)
    assert len(chips_of(answer, draft_of("finetune"))) == len(answer.suggestions)

    answer = answer_of("meta-llama/Llama-3.1-8B", workload=WORK["pretrain"] | {"method": "full"})
    other = answer.suggestions[0].model_copy(update={"changes": {"workload": {"method": "lora"}}})
    draft = draft_of("finetune")
    draft["workload"]["finetune"]["method"] = "full"
    [chip] = chips_of(answer.model_copy(update={"suggestions": (other,)}), draft)
    assert chip.title == "LoRA instead of all weights"


def test_headings_say_whether_a_change_is_for_the_fit_or_for_the_target():
    target = SERVE | {"ttft_slo_seconds": 1.0, "tpot_slo_seconds": 0.05}
    answer = answer_of(
        "meta-llama/Llama-3.1-70B", workload=target, engine="vllm", pins={"weight_dtype": "bf16"}
    )

    fit, meets = offers_of(answer, draft_of())

    assert fit.heading.endswith("make it fit")
    assert fit.chips[0].title == "8 devices instead of 1"
    assert meets.heading.endswith("meet the target")
    assert all(chip.effect.startswith("meets it, ") for chip in meets.chips)


def test_lifting_a_target_is_not_offered_as_a_way_to_meet_it():
    target = SERVE | {"ttft_slo_seconds": 1.0}
    card, bounds = {"device": "a100-sxm4-80gb"}, {"ttft_p95_seconds": {"max": 1.0}}
    answer = answer_of("Qwen/Qwen3-32B", card, target, engine="vllm", constraints=bounds)
    lifted = [at for at, one in enumerate(answer.suggestions) if "constraints" in one.changes]
    assert lifted

    assert not {chip.at for chip in chips_of(answer, draft_of())} & set(lifted)


def test_a_change_of_hardware_says_what_all_of_it_costs_an_hour():
    answer = answer_of("meta-llama/Llama-3.1-70B", engine="vllm", pins={"weight_dtype": "bf16"})
    [eight, *_] = chips_of(answer, draft_of())
    assert eight.effect.endswith("3.72\N{NO-BREAK SPACE}$ an hour in all")


def test_a_smaller_workload_is_named_as_the_form_names_it_with_what_it_is_now():
    work = SERVE | {"input_tokens": 4096, "concurrency": 64}
    target = work | {"ttft_slo_seconds": 0.5, "tpot_slo_seconds": 0.03}
    node = {"device": "a100-sxm4-80gb", "devices_per_node": 4}
    answer = answer_of("meta-llama/Llama-3.1-70B", node, target, engine="vllm")
    draft = draft_of(slo="code")
    draft["workload"]["serve"] |= {"input_tokens": 4096, "concurrency": 64}
    sizes = [one for one in answer.suggestions if "workload" in one.changes]

    titles = [chip.title for chip in chips_of(answer, draft)]

    assert sizes
    assert all(" instead of " in title for title in titles)
    assert not [title for title in titles if "tokens" in title]
