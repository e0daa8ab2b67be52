"""What the wizard asks of a training reaches the host's document, and nothing else does."""

import pytest

from planner.specs.workload import OffloadSpec
from runners.jobspec import FolderModel
from runners.jobspec.train import USUAL_LEARNING_RATES
from tests.webapp.plans.test_serving import with_gpus
from webapp.hosts.models import Host
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_of
from webapp.plans.planning import plan_compute
from webapp.plans.training import train_spec

pytestmark = pytest.mark.django_db(databases="__all__")


def test_each_optimizer_or_fused_method_reaches_the_host_with_its_usual_rate(plan_of):
    for optimizer in ["adamw", "adamw_8bit", "adafactor", "lion", "sgd"]:
        made = plan_of("finetune", "team")
        made.draft["workload"]["finetune"]["optimizer"] = optimizer
        spec = launch_of(made).spec
        assert (spec.optimizer, spec.learning_rate) == (
            optimizer,
            USUAL_LEARNING_RATES[optimizer],
        ), optimizer

    for method in ["lomo", "adalomo", "qft"]:
        made = plan_of("finetune", "team")
        made.draft["workload"]["finetune"] |= {"method": method, "global_batch_size": 1}
        assert launch_of(made).spec.optimizer == method, method

    made = plan_of("finetune", "team")
    made.draft["workload"]["finetune"] |= {"optimizer": "lion", "optimizer_offload": "disk"}
    with pytest.raises(DraftProblem, match="the optimizer is lion; choose adamw"):
        launch_of(made)


def test_what_waits_elsewhere_and_is_computed_again_reaches_the_host(plan_of):
    made = plan_of("finetune", "team")
    asked = {"activation_offload": "disk", "optimizer_offload": "disk", "optimizer": "adamw"}
    made.draft["workload"]["finetune"] |= asked
    made.draft["pins"] = {"activation_recomputation": "full"}

    spec = launch_of(made).spec

    assert asked.items() <= spec.model_dump().items()
    assert spec.activation_recomputation == "full"


def test_integers_reach_the_host(plan_of):
    for fields, expected in [
        ({"method": "alphatuning"}, ("alphatuning", 4)),
        ({"method": "full", "rounding": "8"}, ("qat", 8)),
    ]:
        made = plan_of("finetune", "team")
        made.draft["workload"]["finetune"] |= fields
        found = launch_of(made).spec.quantized
        assert (found.method, found.bits) == expected, fields


def test_moments_that_the_plan_has_on_disk_wait_there(plan_of):
    for planned, where in [("nvme", "disk"), ("none", "none")]:
        made = plan_of("finetune", "team")
        best = launch_of(made).best
        offload = OffloadSpec(optimizer=planned)
        placed = best.strategy.model_copy(update={"offload": offload})

        spec = train_spec(
            made.draft, FolderModel(path="m"), best.model_copy(update={"strategy": placed})
        )

        assert spec.optimizer_offload == where, planned


def test_products_in_8_bit_floats_are_taken_only_when_they_are_chosen(plan_of):
    for asked, computes in [("auto", {"fp32", "bf16"}), ("fp8", {"fp8"})]:
        made = plan_of("pretrain", "demo")
        made.draft["workload"]["pretrain"] |= {"products": asked}

        launch = launch_of(made)

        assert launch.spec.compute_dtype in computes, asked
        assert launch.best.strategy.compute_dtype == launch.spec.compute_dtype, asked
        said = [each for each in launch.best.warnings if "products in fp8 are emulated" in each]
        assert len(said) == (asked == "fp8"), asked


def test_kernels_that_were_chosen_reach_plan_and_host(plan_of):
    for way in ["eager", "flash", "auto"]:
        made = plan_of("finetune", "team")
        made.draft["workload"]["finetune"] |= {"attention": way, "training_step": "compiled"}
        launch = launch_of(made)
        assert (launch.spec.attention, launch.spec.compiled) == (way, True), way
        assert launch.best.strategy.attention == ("eager" if way == "eager" else "flash"), way


def test_attention_by_blocks_reaches_a_host_with_a_gpu_and_no_other(plan_of):
    made = plan_of("pretrain", "demo")
    made.draft["workload"]["pretrain"] |= {"attention": "flex"}
    with pytest.raises(DraftProblem, match=r"no backward pass of FlexAttention on .*choose flash"):
        launch_of(made)

    with_gpus(Host.objects.get(pk=made.draft["hardware"]["choice"].removeprefix("host:")), 1)
    launch = launch_of(made)

    assert (launch.spec.attention, launch.best.strategy.attention) == ("flex", "flex")
    assert any(
        "no machine of ours has been measured with" in said for said in launch.best.warnings
    )
    made.draft["workload"]["pretrain"] |= {"attention": "auto"}
    plan_compute(made)
    assert launch_of(made).best.strategy.attention == "flash"


def test_growing_lengths_reach_the_host_with_the_plans_tokens(plan_of):
    made = plan_of("pretrain", "demo")
    asked = {"lengths": "grow", "million_tokens": 0.2, "time_budget_minutes": None}
    made.draft["workload"]["pretrain"] |= asked | {"sequence_length": 64, "on_spike": "skip"}

    spec = launch_of(made).spec

    assert spec.length_schedule == ((8, 0.25), (16, 0.25), (32, 0.25), (64, 0.25))
    assert spec.on_spike == "skip"


def test_validations_without_gain_end_a_training_if_asked(plan_of):
    for said, waits in [("never", None), ("2", 2), ("", None), ("3", 3)]:
        made = plan_of("pretrain", "demo")
        made.draft["workload"]["pretrain"] |= {"early_stop": said}
        assert launch_of(made).spec.early_stop_validations == waits, said


@pytest.mark.parametrize("goal", ["pretrain", "finetune"])
def test_how_checkpoints_are_written_and_which_weights_stay_is_a_choice(plan_of, goal):
    made = plan_of(goal, "demo" if goal == "pretrain" else "team")
    usual = launch_of(made).spec
    asked = {"checkpoint_writing": "in_step", "exported_weights": "last"}
    made.draft["workload"][goal] |= asked
    other = launch_of(made).spec

    assert (usual.checkpoint_writing, usual.keep_best) == ("auto", True)
    assert (other.checkpoint_writing, other.keep_best) == ("in_step", False)
    plan_compute(made)
    peaks = [launch_of(made).best.memory]
    made.draft["workload"][goal] |= {"checkpoint_writing": "background"}
    plan_compute(made)
    peaks.append(launch_of(made).best.memory)
    assert peaks[1].per_device_peak_bytes - peaks[0].per_device_peak_bytes == pytest.approx(
        peaks[0].breakdown_bytes["weights"] * 3, rel=0.05
    )
    for name in asked:  # an older draft has neither
        del made.draft["workload"][goal][name]
    plan_compute(made)
    assert launch_of(made).spec == usual


def test_text_samples_reach_the_host_with_their_prompts(plan_of):
    for goal in ["pretrain", "finetune"]:
        made = plan_of(goal, "demo" if goal == "pretrain" else "team")
        assert launch_of(made).spec.text_samples is None, goal
        made.draft["workload"][goal] |= {"text_samples": "20", "sample_prompts": "Once\n\nTwice"}
        asked = launch_of(made).spec.text_samples
        made.draft["workload"][goal] |= {"sample_prompts": ""}

        assert (asked.every_steps, asked.prompts) == (20, ("Once", "Twice")), goal
        assert launch_of(made).spec.text_samples.prompts == (), goal


def test_tokens_become_steps_of_no_more_than_a_batch(plan_of):
    for million, sequence, batch, steps in [
        (0.2048, 256, 8, 100),
        (0.001, 256, 8, 1),
        (1.0, 256, 1, 3906),
        (10.0, 128, 4, 19_531),
    ]:
        made = plan_of("pretrain", "demo")
        made.draft["workload"]["pretrain"] |= {
            "million_tokens": million,
            "time_budget_minutes": None,
            "sequence_length": sequence,
            "global_batch_size": batch,
        }
        assert launch_of(made).spec.max_steps == steps, (million, sequence, batch)

    for batch in [1, 2, 3, 7, 8, 12]:
        made = plan_of("pretrain", "demo")
        made.draft["workload"]["pretrain"]["global_batch_size"] = batch
        spec = launch_of(made).spec
        assert spec.micro_batch_size * spec.gradient_accumulation_steps <= batch, batch
