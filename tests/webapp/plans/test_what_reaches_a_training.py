"""What the wizard asks of a training reaches the host's document: data, layout and the rest."""

from types import SimpleNamespace

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from planner.exports.export import OWN_METHODS, formats_for
from planner.search.engine import blocks_of
from planner.search.question import questions
from planner.search.training_space import training_blocks
from planner.specs.estimate import PlanRequest
from planner.specs.workload import OffloadSpec, Strategy
from runners.jobspec import FolderModel, HostText, TrainSpec
from runners.jobspec.base import LoraOptions
from runners.jobspec.train import USUAL_LEARNING_RATES, LayoutOptions
from runners.plans.engine_choice import trainer_of
from runners.plans.fields import shown_of
from runners.plans.refusals import DraftProblem
from runners.plans.training_layout import layout_of
from runners.plans.training_spec import STATE_PLACES, train_spec
from runners.plans.workloads import FinetuneWork
from tests.planner.asking import LLAMA_8B, MIXTRAL, TRAIN, document
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from tests.webapp.plans.test_serving import with_gpus
from webapp.datasets.models import Dataset
from webapp.datasets.services import dataset_store
from webapp.hosts.models import Host
from webapp.jobs.calibration import is_as_planned
from webapp.jobs.launching import launch_note, launchable_of
from webapp.modelhub.models import demo_config
from webapp.plans.places import question_of
from webapp.plans.planning import plan_compute
from webapp.plans.verdict import verdict_of

pytestmark = pytest.mark.django_db(databases="__all__")


def test_each_optimizer_or_fused_method_reaches_the_host_with_its_usual_rate(plan_of):
    for optimizer in ["adamw", "adamw_8bit", "adafactor", "lion", "sgd"]:
        made = plan_of("finetune", "team", optimizer=optimizer)
        spec = launchable_of(made).spec
        assert (spec.optimizer, spec.learning_rate) == (
            optimizer,
            USUAL_LEARNING_RATES[optimizer],
        ), optimizer

    for method in ["lomo", "adalomo", "qft"]:
        made = plan_of("finetune", "team", method=method, global_batch_size=1)
        assert launchable_of(made).spec.optimizer == method, method

    made = plan_of("finetune", "team", optimizer="lion", optimizer_offload="disk")
    with pytest.raises(DraftProblem, match="the optimizer is lion; choose adamw"):
        launchable_of(made)


def test_what_waits_elsewhere_and_is_computed_again_reaches_the_host(plan_of):
    made = plan_of("finetune", "team")
    asked = {"activation_offload": "disk", "optimizer_offload": "disk", "optimizer": "adamw"}
    made.draft["workload"] |= asked
    made.draft["pins"] = {"activation_recomputation": "full"}

    spec = launchable_of(made).spec

    assert asked.items() <= spec.model_dump().items()
    assert spec.activation_recomputation == "full"


def test_what_is_ranked_first_on_several_gpus_can_be_launched(plan_of, host):
    """Options that need whole copies, undivided layers or one device leave others out."""
    with_gpus(host, 4)
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    cases = [
        ({}, {"zero_stage"}, 4),
        ({"qat_bits": 8}, set(), 4),
        ({"activation_offload": "disk"}, set(), 4),
        ({"compiled": True}, set(), 4),  # without it, recomputed selectively
        ({"compute_dtype": "fp8"}, {"zero_stage"}, 4),
        ({"method": "lomo"}, set(), 1),
        ({"method": "qft", "global_batch_size": 4}, set(), 1),
    ]
    for values, sharded, devices in cases:
        made = plan_of("finetune", "folder")
        made.draft["model"]["config"] = {**demo_config(), **shape, **heads}
        made.draft["workload"] |= {"global_batch_size": 16, "sequence_length": 2048}
        made.draft["workload"] |= values
        best = plan_compute(made).plans[0].strategy

        launch = launchable_of(made)

        assert launch.spread.devices_per_host == devices, values
        assert launch.spec.activation_recomputation == best.activation_recomputation, values
        if not sharded:
            sizes = [best.tensor_parallel_size, best.context_parallel_size or 1, best.zero_stage]
            assert sizes == [1, 1, 0], values
        if launch.spec.compiled or best.data_parallel_size == 1:
            assert best.activation_recomputation != "selective", values
        if best.data_parallel_size == 1:
            assert launch.spec.gradient_accumulation_steps == 1, values


def spec_for(document, **sizes) -> TrainSpec:
    """Return the job of a document whose plan has these sizes; it raises where it is refused."""
    copies = sizes.get("data_parallel_size", 1)
    batch = document.workload.global_batch_size
    strategy = Strategy(micro_batch_size=batch // copies, **sizes)
    best = SimpleNamespace(
        strategy=strategy, memory=SimpleNamespace(per_stage_layers=None), reliability=None
    )
    is_encoder = document.workload.method == "classification"
    shape = SimpleNamespace(is_encoder=is_encoder)
    folder, trainer = FolderModel(path="model"), trainer_of(document)
    teacher = FolderModel(path="teacher") if document.workload.teacher_model else None
    return train_spec(document.workload, folder, best, shape, trainer=trainer, teacher=teacher)


def choices_of(field) -> list:
    """Return the values that a field of a document offers."""
    try:
        return [*(shown_of(field).choices or ())]
    except LookupError:
        return []


def complete(name: str, value) -> dict:
    """Return a choice with what it cannot be without."""
    needed = {
        "hub": {"data_repository": "acme/notes"},
        "file": {"data_path": "a.jsonl"},
        "upload": {"dataset": "x"},
        "mixed": {"mixture": [{"source": "host"}, {"source": "file", "path": "a.txt"}]},
    }
    if name == "objective" and value != "supervised":
        rewards = {"reward_function": "exact_match", "max_completion_length": 64}
        taught = {"teacher_model": "Qwen/Qwen3-8B", "max_completion_length": 64}
        own = {"grpo": rewards, "distillation": taught}.get(value, {})
        return {name: value, "data_source": "file", "data_path": "a.jsonl", **own}  # TRL's
    if name == "precompute_reference" and value:
        return {name: value} | complete("objective", "dpo")
    return {name: value} | (needed.get(value, {}) if name == "data_source" else {})


def refusal_of(function, *args, **sizes) -> str:
    try:
        function(*args, **sizes)
    except DraftProblem as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("fixed", [{"tensor_parallel_size": 2}, {"zero_stage": 3}])
def test_sizes_that_an_option_excludes_are_refused_in_the_wizard_as_by_the_trainer(
    plan_of, host, fixed
):
    """Every choice of the form is tried: an option that only the launch refuses fails here."""
    with_gpus(host, 4)
    fields = FinetuneWork.model_fields.items()
    cases = [(name, value) for name, each in fields for value in choices_of(each)]
    assert len(cases) > 40
    refused = set()
    for name, value in cases:
        made = plan_of(
            "finetune", "folder", global_batch_size=4, tokens=1_000_000, **complete(name, value)
        )
        if refusal_of(spec_for, made.document):  # it does not go without a layout either
            continue
        copies = {"data_parallel_size": 2} if "zero_stage" in fixed else {}
        by_trainer = refusal_of(spec_for, made.document, **fixed, **copies)
        made.draft["pins"] = dict(fixed)
        by_wizard = refusal_of(question_of, made)
        says = "does not run what is fixed on the step" in by_wizard
        assert says == bool(by_trainer), (name, value, by_trainer, by_wizard)
        refused |= {(name, value)} if says else set()
    assert {("objective", "dpo"), ("objective", "distillation")} <= refused
    assert ("compiled", True) in refused
    assert ("compute_dtype", "fp8") in refused or "zero_stage" in fixed


def test_offload_is_in_the_plans_figures_or_said_not_to_be(plan_of, host):
    """Host memory and the optimiser's disk are costed; a CPU is refused, the rest is said."""
    made = plan_of("finetune", "team", optimizer="adamw")

    def planned(**values):
        made.draft["workload"] |= values
        answer = plan_compute(made)
        return answer.plans[0], verdict_of(answer, made.document).warnings

    for name in ["optimizer_offload", "activation_offload"]:
        with pytest.raises(DraftProblem, match="is a CPU, which computes from the host's memory"):
            planned(**{name: "cpu"})
        made.draft["workload"][name] = "none"

    with_gpus(host, 1)
    plain, silent = planned()
    assert not [each for each in silent if "not costed" in each]
    both, _ = planned(optimizer_offload="cpu", activation_offload="cpu")
    assert both.memory.per_device_peak_bytes < plain.memory.per_device_peak_bytes
    assert both.memory.host_bytes > plain.memory.host_bytes
    spec = launchable_of(made).spec
    assert (spec.optimizer_offload, spec.activation_offload) == ("cpu", "cpu")

    disk, warnings = planned(
        optimizer_offload="disk", activation_offload="disk", qat_bits=8, compiled=False
    )
    assert disk.memory.disk_bytes > 0
    assert [each for each in warnings if "activations on the host's disk are not costed" in each]
    assert [each for each in warnings if "rounding in training is not costed" in each]


def test_integers_and_moments_on_disk_reach_the_host(plan_of):
    for fields, expected in [
        ({"method": "alphatuning"}, ("alphatuning", 4)),
        ({"method": "full", "qat_bits": 8}, ("qat", 8)),
    ]:
        made = plan_of("finetune", "team", **fields)
        found = launchable_of(made).spec.quantized
        assert (found.method, found.bits) == expected, fields

    for planned, where in [("nvme", "disk"), ("none", "none")]:
        made = plan_of("finetune", "team")
        best = launchable_of(made).best
        offload = OffloadSpec(optimizer=planned)
        placed = best.strategy.model_copy(update={"offload": offload})
        spec = train_spec(
            made.document.workload,
            FolderModel(path="m"),
            best.model_copy(update={"strategy": placed}),
            trainer="slipway",
        )
        assert spec.optimizer_offload == where, planned


def test_products_in_8_bit_floats_are_taken_only_when_they_are_chosen(plan_of):
    for asked, computes in [("auto", {"fp32", "bf16"}), ("fp8", {"fp8"})]:
        made = plan_of("pretrain", "demo", compute_dtype=asked)

        launch = launchable_of(made)

        assert launch.spec.compute_dtype in computes, asked
        assert launch.best.strategy.compute_dtype == launch.spec.compute_dtype, asked
        said = [each for each in launch.best.warnings if "products in fp8 are emulated" in each]
        assert len(said) == (asked == "fp8"), asked


def test_kernels_that_were_chosen_reach_plan_and_host(plan_of):
    for way in ["eager", "flash", "auto"]:
        made = plan_of("finetune", "team", attention=way, compiled=True)
        launch = launchable_of(made)
        assert (launch.spec.attention, launch.spec.compiled) == (way, True), way
        assert launch.best.strategy.attention == ("eager" if way == "eager" else "flash"), way


def test_attention_by_blocks_reaches_a_host_with_a_gpu_and_no_other(plan_of):
    made = plan_of("pretrain", "demo", attention="flex")
    with pytest.raises(DraftProblem, match=r"no backward pass of FlexAttention on .*choose flash"):
        launchable_of(made)

    with_gpus(Host.objects.get(pk=made.document.hardware.host), 1)
    launch = launchable_of(made)

    assert (launch.spec.attention, launch.best.strategy.attention) == ("flex", "flex")
    assert any(
        "no machine of ours has been measured with" in said for said in launch.best.warnings
    )
    made.draft["workload"] |= {"attention": "auto"}
    plan_compute(made)
    assert launchable_of(made).best.strategy.attention == "flash"


def test_growing_lengths_reach_the_host_with_the_plans_tokens(plan_of):
    made = plan_of("pretrain", "demo")
    asked = {"length_schedule": "grow", "tokens": 200_000, "time_budget_seconds": None}
    made.draft["workload"] |= asked | {"sequence_length": 64, "on_spike": "skip"}

    spec = launchable_of(made).spec

    assert spec.length_schedule == ((8, 0.25), (16, 0.25), (32, 0.25), (64, 0.25))
    assert spec.on_spike == "skip"


def test_validations_without_gain_end_a_training_if_asked(plan_of):
    for waits in [None, 2, 3]:
        made = plan_of("pretrain", "demo", early_stop_validations=waits)
        assert launchable_of(made).spec.early_stop_validations == waits


@pytest.mark.parametrize("goal", ["pretrain", "finetune"])
def test_how_checkpoints_are_written_and_which_weights_stay_is_a_choice(plan_of, goal):
    made = plan_of(goal, "demo" if goal == "pretrain" else "team")
    usual = launchable_of(made).spec
    asked = {"checkpoint_writing": "in_step", "keep_best": False}
    made.draft["workload"] |= asked
    other = launchable_of(made).spec

    assert (usual.checkpoint_writing, usual.keep_best) == ("auto", True)
    assert (other.checkpoint_writing, other.keep_best) == ("in_step", False)
    plan_compute(made)
    peaks = [launchable_of(made).best.memory]
    made.draft["workload"] |= {"checkpoint_writing": "background"}
    plan_compute(made)
    peaks.append(launchable_of(made).best.memory)
    assert peaks[1].per_device_peak_bytes - peaks[0].per_device_peak_bytes == pytest.approx(
        peaks[0].breakdown_bytes["weights"] * 3, rel=0.05
    )
    for name in asked:  # an older draft has neither
        del made.draft["workload"][name]
    plan_compute(made)
    assert launchable_of(made).spec == usual


def test_text_samples_reach_the_host_with_their_prompts(plan_of):
    for goal in ["pretrain", "finetune"]:
        made = plan_of(goal, "demo" if goal == "pretrain" else "team")
        assert launchable_of(made).spec.text_samples is None, goal
        made.draft["workload"] |= {
            "text_samples_every_steps": 20,
            "sample_prompts": "Once\n\nTwice",
        }
        asked = launchable_of(made).spec.text_samples
        made.draft["workload"] |= {"sample_prompts": ""}

        assert (asked.every_steps, asked.prompts) == (20, ("Once", "Twice")), goal
        assert launchable_of(made).spec.text_samples.prompts == (), goal


def test_tokens_become_steps_of_no_more_than_a_batch(plan_of):
    for tokens, sequence, batch, steps in [
        (204_800, 256, 8, 100),
        (1000, 256, 8, 1),
        (1_000_000, 256, 1, 3906),
        (10_000_000, 128, 4, 19_531),
    ]:
        made = plan_of("pretrain", "demo")
        made.draft["workload"] |= {
            "tokens": tokens,
            "time_budget_seconds": None,
            "sequence_length": sequence,
            "global_batch_size": batch,
        }
        spec = launchable_of(made).spec
        assert spec.max_steps == steps, (tokens, sequence, batch)
        assert spec.time_budget_seconds is None

    for batch in [1, 2, 3, 7, 8, 12]:
        made = plan_of("pretrain", "demo", global_batch_size=batch)
        spec = launchable_of(made).spec
        assert spec.micro_batch_size * spec.gradient_accumulation_steps <= batch, batch


# What a training plan reads: from the wizard's step to the document that the host runs


CONTENT = b"".join(
    b'{"instruction": "Say %d.", "output": "It is %d."}\n' % (n, n) for n in range(9)
)


def upload(content=CONTENT):
    return SimpleUploadedFile("asked.jsonl", content)


@pytest.fixture(autouse=True)
def _folder(settings, tmp_path):
    settings.DATASETS_DIR = tmp_path / "datasets"


@pytest.fixture
def dataset(team, alice) -> Dataset:
    return dataset_store(team=team, by=alice, upload=upload())


@pytest.fixture
def plan(demo_plan, trained):
    found = with_model(demo_plan, trained, "finetune")
    return choose(found, sequence_length=64, tokens=10_000)


def choose(plan, **values):
    plan.draft["workload"] |= values
    plan.save()
    return plan


def test_the_hosts_own_text_a_chosen_file_or_a_path_reaches_the_job(plan, dataset):
    spec = launchable_of(plan).spec
    assert spec.data == HostText()
    assert is_as_planned(spec)
    assert "on its own text" in launch_note(plan)["text"]

    choose(plan, data_source="upload", dataset=dataset.pk, rows="padded", too_long="leave_out")
    spec = launchable_of(plan).spec
    assert (spec.data.dataset_id, spec.data.sha256) == (dataset.pk, dataset.sha256)
    assert spec.data.format == "instruction"
    assert (spec.samples.rows, spec.samples.too_long) == ("padded", "leave_out")
    assert "on the uploaded asked.jsonl" in launch_note(plan)["text"]

    choose(plan, data_source="file", data_path="data/mine.jsonl", data_format="chat")
    spec = launchable_of(plan).spec
    assert (spec.data.path, spec.data.format) == ("data/mine.jsonl", "chat")
    assert is_as_planned(spec)  # once it has read them: its rows have lengths of their own
    assert not is_as_planned(spec.model_copy(update={"objective": "classification"}))


def test_what_was_chosen_and_is_gone_or_foreign_is_the_plans_problem(plan, dataset, other_team):
    for values in [
        {"data_source": "upload", "dataset": "gone"},
        {"data_source": "file", "data_path": ""},
    ]:
        with pytest.raises(DraftProblem, match=r"it was deleted|Name the file"):
            launchable_of(choose(plan, **values))

    Dataset.objects.filter(pk=dataset.pk).update(team=other_team)
    with pytest.raises(DraftProblem, match="it was deleted"):
        launchable_of(choose(plan, data_source="upload", dataset=dataset.pk))


def test_an_upload_in_the_wizard_is_chosen_and_shown(plan, alice):
    client = client_of(alice)

    answer = client.post(f"/plans/{plan.pk}/upload/", {"file": upload()})

    plan.refresh_from_db()
    values = plan.draft["workload"]
    assert answer["Location"] == f"/plans/{plan.pk}/edit/workload/"
    assert values["data_source"] == "upload"
    assert values["dataset"] == Dataset.objects.get().pk
    html = client.get(answer["Location"]).content.decode()
    assert "9 records · instruction" in html
    assert "It is 2." in html


MIXTURE = {
    "data_source": "mixed", "mix_source_1": "host", "mix_weight_1": "3", "mix_source_3": "file",
    "mix_path_3": " notes/a.txt ", "mix_weight_3": "0.5",
}  # fmt: skip


def saved(client, plan, changes):
    """Post the workload step as a browser would, with some controls changed."""
    url = f"/plans/{plan.pk}/edit/workload/"
    form = client.get(url).context["form"]
    shown = {each.html_name: each.value() for each in form if each.value() is not None}
    return client.post(url, {**shown, **changes})


def test_sources_that_are_mixed_by_weight_reach_the_job(plan, alice, dataset):
    client = client_of(alice)
    third = {"mix_source_4": dataset.pk, "mix_weight_4": "1.5"}

    assert saved(client, plan, MIXTURE | third).status_code == 302

    plan.refresh_from_db()
    spec = launchable_of(plan).spec
    assert [part.weight for part in spec.data.parts] == [3.0, 0.5, 1.5]
    own, file, uploaded = (part.data for part in spec.data.parts)
    assert (own, file.path, uploaded.sha256) == (HostText(), "notes/a.txt", dataset.sha256)
    words = launch_note(plan)["text"].replace("\N{NO-BREAK SPACE}", " ")
    assert "on 60 % its own text and 10 % its file notes/a.txt and 30 % the uploaded" in words
    page = client.get(f"/plans/{plan.pk}/edit/workload/").content.decode()
    assert 'value="mixed" checked' in page
    assert 'value="notes/a.txt"' in page


MOVING = {
    "mixture_weights": "dynamic",
    "mixture_update_every_steps": "25",
    "mix_reference_3": "2.5",
}


def test_weights_that_follow_the_losses_reach_the_job_and_its_words(plan, alice):
    client = client_of(alice)

    assert saved(client, plan, MIXTURE | MOVING).status_code == 302

    plan.refresh_from_db()
    data = launchable_of(plan).spec.data
    assert (data.weights, data.update_every_steps) == ("dynamic", 25)
    assert [part.reference_loss for part in data.parts] == [None, 2.5]
    words = launch_note(plan)["text"].replace("\N{NO-BREAK SPACE}", " ")
    assert "on at first 86 % its own text and 14 % its file notes/a.txt by weights that" in words
    page = client.get(f"/plans/{plan.pk}/edit/workload/").content.decode()
    assert 'name="mixture_weights" value="dynamic" checked' in page
    # Fixed ones follow nothing, whatever still stands in the fields that are folded away then.
    assert saved(client, plan, {"mixture_weights": "fixed"}).status_code == 302
    plan.refresh_from_db()
    assert launchable_of(plan).spec.data.parts[1].reference_loss is None


def test_a_step_that_lacks_something_or_a_mixture_that_cannot_be_is_refused_by_its_field(
    plan, alice
):
    for changes, field, said in [
        (
            MOVING | {"mixture_update_every_steps": "0"},
            "mixture_update_every_steps",
            "Steps between two updates is 0. It must be",
        ),
        (
            MOVING | {"mix_reference_3": "-1"},
            "mix_reference_3",
            "Reference loss of source 3 is -1. It must be a number from 0 to 20.",
        ),
        (MOVING | {"mixture_weights": "fast"}, "mixture_weights", "which is not offered here"),
        ({"mix_source_3": ""}, "mix_source_1", "1 of these rows name a source. Choose at least 2"),
        ({"mix_weight_3": ""}, "mix_weight_3", "Give the source a weight, for example 1."),
        ({"mix_weight_3": "0"}, "mix_weight_3", "Weight of source 3 is 0. It must be"),
        ({"mix_weight_1": "much"}, "mix_weight_1", "It must be a number from 0.001 to 1,000."),
        ({"mix_path_3": ""}, "mix_path_3", "Name the file."),
        ({"mix_path_3": "../a.txt"}, "mix_path_3", "may not contain"),
        ({"mix_path_3": "a.xls"}, "mix_path_3", "end in .jsonl, .json, .parquet, .csv or .txt"),
        ({"mix_source_3": "gone"}, "mix_source_3", "not one of the available"),
        ({"mix_source_2": "host", "mix_weight_2": "1"}, "mix_source_2", "is already listed"),
    ]:
        answer = saved(client_of(alice), plan, MIXTURE | changes)
        assert answer.status_code == 422, (changes, field)
        assert said in " ".join(answer.context["form"].errors[field]), (changes, field)

    for changes, field, said in [
        ({"data_source": "file"}, "data_path", "Name the file."),
        ({"data_source": "hub"}, "data_repository", "Name a data set, for example"),
        ({"data_source": "hub", "data_repository": "squad"}, "data_repository", "org/name:split"),
        (
            {"data_source": "hub", "data_repository": "a/b:test", "data_split": "train"},
            "data_split",
            "states test. Give one.",
        ),
        (
            {"data_source": "hub", "data_repository": "a/b", "data_split": "train[:9%]"},
            "data_split",
            "is no name of one",
        ),
        ({"data_source": "file", "data_path": "../a.jsonl"}, "data_path", "may not contain"),
        (
            {"data_source": "file", "data_path": "a.feather"},
            "data_path",
            "end in .jsonl, .json, .parquet, .csv or .txt",
        ),
        (
            {"data_source": "file", "data_path": "a.xls"},
            "data_path",
            "end in .jsonl, .json, .parquet, .csv or .txt",
        ),
        ({"data_source": "upload"}, "dataset", "Choose a file, or upload one."),
        ({"data_source": "upload", "dataset": "other"}, "dataset", "not one of the available"),
    ]:
        answer = saved(client_of(alice), plan, changes)
        assert answer.status_code == 422, (changes, field)
        assert said in " ".join(answer.context["form"].errors[field]), (changes, field)


def test_a_bad_upload_in_the_wizard_changes_no_plan(plan, alice):
    answer = client_of(alice).post(f"/plans/{plan.pk}/upload/", {"file": upload(b"{\n")})
    plan.refresh_from_db()
    assert answer.status_code == 422
    assert plan.draft["workload"].get("data_source", "host") == "host"


# A plan's sizes become the trainer's layout; what it does not run is refused by name


COPIES = {"data_parallel_size": 2}


def test_whole_copies_need_no_layout_and_stages_of_unlike_devices_hold_their_layers():
    for strategy in [
        {},
        COPIES,
        {"zero_stage": 3},
        {"sequence_parallel": True, "pipeline_schedule": "gpipe", "virtual_pipeline_size": 1},
    ]:
        assert layout_of(Strategy(**strategy)) is None, strategy

    for planned, named in [((9, 7), (9, 7)), ((8, 8), None), ((9, 8), None), (None, None)]:
        strategy = Strategy(pipeline_parallel_size=2)
        assert layout_of(strategy, planned).pipeline_layers == named, planned


def test_each_size_of_a_plan_is_the_layouts():
    interleaved = {"pipeline_schedule": "interleaved", "virtual_pipeline_size": 2}
    for sizes in (
        {**COPIES, "zero_stage": 2},
        {"data_parallel_size": 4, "zero_stage": 3, "zero_shard_size": 2},
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_parallel_size": 2, **interleaved},
        {"context_parallel_size": 2},
        {**COPIES, "expert_parallel_size": 2},
        {**COPIES, "synchronization_interval_steps": 8},
    ):
        assert layout_of(Strategy(**sizes)) == LayoutOptions(**sizes), sizes
    compressed = layout_of(Strategy(**COPIES, gradient_compression_ratio=4.0))
    assert compressed == LayoutOptions(**COPIES, gradient_compression="int8")


def test_what_the_trainer_does_not_run_is_told_as_the_plans_problem():
    for sizes, why in (
        ({"gradient_compression_ratio": 3.0},
         "gradient_compression_ratio is 3; .* 2 .bf16. or 4 .int8."),
        ({"zero_stage": 2, "pipeline_parallel_size": 2},
         "zero_stage is 2 and pipeline_parallel_size 2"),
        ({"expert_parallel_size": 2, "tensor_parallel_size": 2},
         "expert_parallel_size is 2 and tensor_parallel_size 2"),
    ):  # fmt: skip
        with pytest.raises(DraftProblem, match=why) as problem:
            layout_of(Strategy(**COPIES, **sizes))
        assert problem.value.field == next(iter(sizes)), sizes


# Every layout that is searched for a training runs: as a job of the host, or by an export


CASES = [
    ("full", None),
    ("full", "adamw_8bit"),
    ("full", "sgd"),
    ("lora", None),
    ("qlora", None),
    ("qft", None),
    ("lomo", None),
]
MOST = 64  # strategies of a block: its layouts differ most at its start


def searched(engine, case, model):
    method, optimizer = case
    workload = {**TRAIN, "global_batch_size": 4, "method": method, "optimizer": optimizer}
    fields = {"engine": engine, "devices": 4, "model": model, "workload": workload}
    question = next(questions(PlanRequest.model_validate(document(**fields))))
    last = training_blocks(question, question.request.workload, last_resort=True)
    return question, [
        block.strategy(row)
        for block in (*blocks_of(question), *last)
        for row in range(len(block.cells[:MOST]))
    ]


def run_by_trainer(strategy, case):
    """Return the job of a layout; it raises where the trainer refuses it."""
    method, optimizer = case
    adapters = LoraOptions(base_dtype="nf4" if method == "qlora" else "compute")
    offload = strategy.offload.optimizer if strategy.offload else "none"
    return TrainSpec(
        model=FolderModel(path="model"),
        gradient_accumulation_steps=strategy.data_parallel_size if method == "full" else 1,
        optimizer=optimizer or (method if method in {"lomo", "qft"} else "adamw"),
        lora=adapters if "lora" in method else None,
        optimizer_offload=STATE_PLACES[offload],
        layout=layout_of(strategy),
    )


@pytest.mark.parametrize("model", [LLAMA_8B, MIXTRAL])
def test_what_is_searched_for_slipways_trainer_is_a_job_of_it(model):
    for case in CASES:
        _, strategies = searched("torch", case, model)
        assert strategies, case
        for strategy in strategies:
            run_by_trainer(strategy, case)


@pytest.mark.parametrize("engine", [None, "transformers", "deepspeed"])
@pytest.mark.parametrize("model", [LLAMA_8B, MIXTRAL])
def test_what_is_searched_otherwise_is_a_job_or_an_export(engine, model):
    """A tool that lacks the method is not asked: what it would take is costed all the same."""
    for case in CASES:
        question, strategies = searched(engine, case, model)
        if engine is not None and case[0] in OWN_METHODS:
            continue
        for strategy in strategies:
            if not formats_for(question.case, strategy, engine):
                assert engine is None, (case, strategy)
                run_by_trainer(strategy, case)
