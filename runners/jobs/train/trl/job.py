"""A training by one of TRL's trainers, from records to the published model or adapter."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
import importlib
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from runners.jobs.adapters import Lora, lora_config, weights_digest
from runners.jobs.data_files import open_source
from runners.jobs.energy import Work
from runners.jobs.inputs import check_unchanged, digest_of_model
from runners.jobs.loading import TORCH_DTYPES, load_folder, pick_device, ready, stored_quantisation
from runners.jobs.memory import PeakMeter, map_large_blocks
from runners.jobs.model_files import opened_model
from runners.jobs.runtime import (
    BadInputError,
    Job,
    card_text,
    checkpoint_on_sigterm,
    end_by_sigterm,
    job_telemetry,
    publish_model,
    publish_report,
    weight_file_bytes,
)
from runners.jobs.train.checkpoint import TrainState, checkpoints, read_latest_state
from runners.jobs.train.text_samples import SampleReport
from runners.jobs.train.tokenised_samples import set_default_template
from runners.jobs.train.trl.data import DataReport, TrainingRecords, data_report, read_records
from runners.jobs.train.trl.events import Course
from runners.jobs.train.trl.policy import (
    PolicyCourse,
    answerable_prompts,
    how_answered,
    reward_files,
    reward_process,
)
from runners.jobs.train.trl.rewards import RewardProcess
from runners.jobs.train.trl.teacher import (
    check_vocabularies,
    how_taught,
    opened_teacher,
    teacher_arguments,
    teacher_digest,
)
from runners.jobs.weights import first_line
from runners.jobspec import (
    ArtefactModel,
    DownloadedData,
    FileData,
    FolderModel,
    TrainSpec,
    UploadedData,
)
from runners.jobspec.base import PackingStrategy
from runners.jobspec.compress import TRAINING
from runners.jobspec.objectives import GENERATING, OBJECTIVES, Objective

DATA_REPORT = "data"  # the artefact with what became of the records
SEPARATING = ("bfd", "bfd_split")  # strategies whose texts do not see each other
PROBED = 8  # tokens of each text of a packed row that is tried
# Of the spread of the logits: 16-bit products differ by hundredths, mixed texts by tenths.
MOST_APART = 0.1


@dataclass
class Tuning:
    """One training: what it reads, its course, and TRL's trainer once it is built."""

    job: Job
    spec: TrainSpec
    objective: Objective
    folder: Path  # of the model
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    records: TrainingRecords
    course: Course
    notes: dict[str, str]
    teacher: Path | None = None  # the folder of a distillation's teacher
    trainer: Any = None
    report: DataReport = field(init=False)

    @property
    def rewards(self) -> RewardProcess | None:
        """Return the process that scores answers, of a training that generates them."""
        return self.course.rewards if isinstance(self.course, PolicyCourse) else None


def work(job: Job) -> None:
    """Run one attempt of a training by TRL."""
    map_large_blocks()
    spec = job.spec_of(TrainSpec)
    with job_telemetry(job), ExitStack() as stack:
        tuning = _prepare(job, spec, stack)
        checkpoint_on_sigterm(job)  # until here a stop has nothing to save
        job.emitter.phase(TRAINING)
        last = [str(each) for each in checkpoints(job.checkpoint_dir)[-1:]]
        tuning.trainer.train(resume_from_checkpoint=last[0] if last else None)
        if tuning.course.is_stopped:
            end_by_sigterm(job)
            return
        _finish(tuning)
    shutil.rmtree(job.checkpoint_dir, ignore_errors=True)


def _prepare(job: Job, spec: TrainSpec, stack: ExitStack) -> Tuning:
    """Build everything that the training needs, after the records and the checkpoint are checked.

    Raises:
        BadInputError: a record, the model, a reward function, or what a checkpoint was made of.
    """
    objective = OBJECTIVES[spec.objective]
    folder, source = _opened(job, spec)
    teacher = opened_teacher(job, spec)
    job.emitter.phase("Checking the data")
    shutil.rmtree(job.scratch_dir(), ignore_errors=True)
    with open_source(job, source) as data:
        records = read_records(data, objective, job.scratch_dir() / "records.jsonl")
    inputs = {"training data": records.digest, "model": digest_of_model(spec.model, job.host_dir)}
    inputs |= reward_files(job, spec) | teacher_digest(job, spec)
    state, notes = _resumed(job, inputs)
    device = pick_device()
    meter = PeakMeter(device)
    course = Course(job, spec, meter, state)
    if objective.is_rewarded:
        rewards = reward_process(job, spec)
        stack.callback(rewards.close)
        samples = SampleReport(job, how_answered(spec))
        course = PolicyCourse(job, spec, meter, state, rewards=rewards, samples=samples)
    job.emitter.phase("Building the model")
    tokenizer = _tokenizer(folder, records)
    if teacher is not None:
        records.remarks += check_vocabularies(folder, tokenizer, teacher, spec.sequence_length)
    tuning = Tuning(
        job, spec, objective, folder, tokenizer, device, records, course, notes, teacher
    )
    trainer = tuning.trainer = _trainer(tuning)
    of_an_epoch = _steps_of_an_epoch(spec, len(trainer.train_dataset))
    course.max_steps = spec.max_steps or of_an_epoch
    if objective.generates:
        _keep_order(trainer, state.step // of_an_epoch)
    longest = spec.longest_prompt if objective.generates else spec.sequence_length
    tuning.report = data_report(
        objective,
        trainer.train_dataset,
        lambda ids: str(tokenizer.decode(ids)),
        records.num_records,
        longest,
        spec.samples.packing_strategy,
    )
    publish_report(job, DATA_REPORT, tuning.report.document() | {"remarks": records.remarks})
    return tuning


def _opened(job: Job, spec: TrainSpec) -> tuple[Path, FileData | UploadedData | DownloadedData]:
    source = spec.data
    if not isinstance(spec.model, FolderModel | ArtefactModel) or not isinstance(
        source, FileData | UploadedData | DownloadedData
    ):
        raise BadInputError(
            f"engine trl trains a folder's model on a file, not '{spec.model.source}' on "
            f"'{source.source}'"
        )
    folder = opened_model(spec.model, job.host_dir)
    if stored_quantisation(folder) is not None:
        msg = f"{folder} holds quantised weights, which do not train; use the unquantised model"
        raise BadInputError(msg)
    return folder, source


def _resumed(job: Job, inputs: Mapping[str, str]) -> tuple[TrainState, dict[str, str]]:
    """Return the state to go on from, with a note; a new one without a checkpoint.

    Raises:
        BadInputError: the checkpoint is of other data or another model.
    """
    digests = tuple((name, digest) for name, digest in inputs.items() if digest)
    state = read_latest_state(job.checkpoint_dir)
    if state is None:
        return TrainState(inputs=digests), {}
    remark = check_unchanged(
        f"the checkpoint at step {state.step}", dict(state.inputs), dict(digests)
    )
    where = f"from the checkpoint at step {state.step}" + (f"; {remark}" if remark else "")
    job.emitter.log(f"resumed {where}")
    state.inputs = digests
    return state, {"resumed": where}


def _tokenizer(folder: Path, records: TrainingRecords) -> PreTrainedTokenizerBase:
    """Return the tokenizer as TRL loads it, with a template if the records need one.

    Raises:
        BadInputError: the folder has none, or the library cannot read it.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # tokenizers raises nothing narrower
        raise BadInputError(
            f"{folder.name}: its tokenizer cannot be read: {first_line(error)}; copy "
            "tokenizer.json and tokenizer_config.json again"
        ) from error
    if records.num_chats and set_default_template(tokenizer):
        records.remarks.append(
            "the tokenizer has no chat template, so conversations are written in Slipway's own, "
            "like ChatML; the model keeps it"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise BadInputError(
            "the tokenizer has neither a padding nor an end token, and records of unlike lengths "
            "need one; set eos_token in tokenizer_config.json"
        )
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def _trainer(tuning: Tuning) -> Any:  # noqa: ANN401 - a class of the environment's library
    """Return TRL's trainer of an objective, as its documentation builds it.

    Raises:
        BadInputError: TRL or a library below it refuses the model or the records.
    """
    job, spec, objective = tuning.job, tuning.spec, tuning.objective
    library: Any = importlib.import_module(objective.module)
    rows = _rows(tuning)
    config = getattr(library, objective.config)(**arguments(spec, objective, job, tuning.device))
    own: dict[str, Any] = {}
    if spec.lora:
        own["peft_config"] = lora_config(spec.lora, scores=objective.scores)
    if tuning.rewards:
        own["reward_funcs"] = tuning.rewards.functions
    if tuning.teacher is not None:
        own["teacher_model"] = str(tuning.teacher)
    try:
        trainer = getattr(library, objective.trainer)(
            model=str(tuning.folder),
            args=config,
            train_dataset=rows,
            processing_class=tuning.tokenizer,
            callbacks=[tuning.course],
            **own,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise BadInputError(f"{objective.trainer} refuses: {first_line(error)}") from error
    _remove_printing(trainer)
    if spec.samples.packing_strategy in SEPARATING:
        _check_separation(trainer)
    if spec.samples.too_long == "leave_out" and not objective.generates:
        trainer.train_dataset = _short_enough(trainer.train_dataset, objective, spec)
    _count_tokens(trainer, tuning.course)
    return trainer


def _check_separation(trainer: Any) -> None:  # noqa: ANN401 - TRL's trainer
    """Check that a text in a packed row is computed as if it were alone.

    TRL packs for every attention, and not each model builds its mask of positions that restart.

    Raises:
        BadInputError: the model mixes the texts of a row.
    """
    model, collate = trainer.model, trainer.data_collator
    vocabulary = model.config.get_text_config().vocab_size
    texts = [[(7 * at + start) % vocabulary for at in range(PROBED)] for start in (1, 5)]

    def logits_of(*together: list[int]) -> torch.Tensor:
        ids = [each for text in together for each in text]
        row = {"input_ids": ids, "labels": ids, "seq_lengths": [len(text) for text in together]}
        inputs = {name: value for name, value in collate([row]).items() if name != "labels"}
        on_device = {
            name: value.to(model.device) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        with torch.no_grad():
            found: torch.Tensor = model(**on_device, use_cache=False).logits
        return found[0, -PROBED:].float()

    was_training = model.training
    model.eval()
    alone, packed = logits_of(texts[1]), logits_of(*texts)
    model.train(was_training)
    apart = float((alone - packed).abs().max() / alone.std())
    if not apart < MOST_APART:
        raise BadInputError(
            f"samples.packing_strategy: {type(model).__name__} with attention "
            f"{model.config._attn_implementation} mixes the texts of a packed row (a text's "  # noqa: SLF001 - no public name
            f"logits change by {apart:.2g} of their spread); leave it out, or choose wrapped, "
            "with which texts see each other"
        )


def _rows(tuning: Tuning) -> Any:  # noqa: ANN401 - of the library datasets
    """Return the records as the trainer reads them.

    Raises:
        BadInputError: too few prompts are short enough.
    """
    datasets: Any = importlib.import_module("datasets")
    spec = tuning.spec
    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "json",
        data_files=str(tuning.records.path),
        split="train",
        cache_dir=str(tuning.job.scratch_dir() / "datasets"),
    )
    if tuning.objective.generates:
        return answerable_prompts(rows, tuning.tokenizer, spec, tuning.records)
    read = (spec.max_steps or 0) * spec.micro_batch_size * spec.gradient_accumulation_steps
    if spec.precompute_reference and 0 < read < len(rows):
        # TRL's reference reads every record that it is given: give it those of the run alone.
        return rows.shuffle(seed=spec.seed).select(range(read))
    return rows


def arguments(
    spec: TrainSpec, objective: Objective, job: Job, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of TRL's config; what is not named here is TRL's own default."""
    is_quantised = spec.lora is not None and spec.lora.base_dtype == "nf4"
    # Trained weights stay in fp32 for AdamW, frozen ones are in the dtype of the products.
    dtype = TORCH_DTYPES[spec.compute_dtype] if spec.lora else torch.float32
    loaded: dict[str, Any] = {"dtype": dtype, "device_map": str(device)}
    if is_quantised:
        loaded["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    if objective.scores:
        loaded["num_labels"] = 1
    ends = {"max_steps": spec.max_steps} if spec.max_steps else {"num_train_epochs": 1}
    own = {
        OWN_NAMES.get(name, name): getattr(spec, name)
        for name in objective.options
        if name not in OURS
    }
    if objective.is_rewarded:
        own["reward_weights"] = [each.weight for each in spec.reward_functions]
    if objective.has_teacher:
        own |= teacher_arguments(spec, device)
    if not objective.generates:
        own["max_length"] = spec.sequence_length
    if spec.samples.packing_strategy:
        own |= {"packing": True, "packing_strategy": spec.samples.packing_strategy}
    return {
        "output_dir": str(job.scratch_dir() / "trainer"),
        "model_init_kwargs": loaded,
        "per_device_train_batch_size": spec.micro_batch_size,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
        "learning_rate": spec.learning_rate,
        "seed": spec.seed,
        "bf16": spec.compute_dtype == "bf16",
        "fp16": spec.compute_dtype == "fp16",
        "gradient_checkpointing": spec.activation_recomputation == "full",
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type != "cpu",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",  # the callback decides
        "report_to": "none",
        "disable_tqdm": True,
        **ends,
        **own,
    }


HOW_PACKED: Mapping[PackingStrategy, str] = {
    "bfd": "what is longer is cut",
    "bfd_split": "what is longer goes on in another row",
    "wrapped": "texts follow each other and see those before them in the row",
}
# Names of a spec's fields in TRL.
OWN_NAMES = {
    "preference_loss": "loss_type",
    "precompute_reference": "precompute_ref_log_probs",
}
# Fields that our own code reads.
OURS = frozenset({
    "max_prompt_length", "teacher", "reward_functions", "reward_timeout_seconds",
    "reward_memory_gib",
})  # fmt: skip


def _steps_of_an_epoch(spec: TrainSpec, num_rows: int) -> int:
    if spec.objective in GENERATING:  # TRL leaves out the last prompts, which fill no step
        return max(1, num_rows // spec.prompts_per_step) * spec.num_iterations
    rows_a_step = spec.micro_batch_size * spec.gradient_accumulation_steps
    return max(1, -(-num_rows // rows_a_step))


def _keep_order(trainer: Any, epochs: int) -> None:  # noqa: ANN401 - TRL's trainer
    """Let a resumed training read its prompts in the order that an uninterrupted one has.

    TRL's sampler of prompts draws an order for each epoch, and a checkpoint has no state of it.
    """
    sampler_of = trainer._get_train_sampler  # noqa: SLF001 - no public name

    def resumed(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - TRL's sampler
        sampler = sampler_of(*args, **named)
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    trainer._get_train_sampler = resumed  # noqa: SLF001


def _remove_printing(trainer: Any) -> None:  # noqa: ANN401 - TRL's trainer
    """Leave the log to our own callback."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def _short_enough(rows: Any, objective: Objective, spec: TrainSpec) -> Any:  # noqa: ANN401 - datasets'
    """Return the rows without those that reach the maximum length."""
    columns = tuple(objective.sequences.values())
    longest = spec.sequence_length

    def fits(row: Mapping[str, Any]) -> bool:
        return all(sum(len(row[name]) for name in names) < longest for names in columns)

    return rows.filter(fits)


def _count_tokens(trainer: Any, course: Course) -> None:  # noqa: ANN401 - TRL's trainer
    """Count the tokens that each step reads, for trainers that log no count of them."""
    compute_loss = trainer.compute_loss

    def counting(model: Any, inputs: Mapping[str, Any], *rest: Any, **named: Any) -> Any:  # noqa: ANN401
        masks = [
            value
            for name, value in inputs.items()
            if name.endswith("attention_mask") and not name.startswith(("prompt_", "KL_"))
        ]
        course.read_tokens += sum(int(each.sum()) for each in masks)
        return compute_loss(model, inputs, *rest, **named)

    trainer.compute_loss = counting


# The result.


def _finish(tuning: Tuning) -> None:
    """Publish what was trained and report the run's figures."""
    job, spec, course = tuning.job, tuning.spec, tuning.course
    tokens = Work((TRAINING,), course.trained_tokens)
    model: Any = tuning.trainer.accelerator.unwrap_model(tuning.trainer.model)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    measured = {
        **course.figures(),
        **tuning.report.figures(),
        "trainable_parameters": float(trained),
    }
    if not spec.keeps_model:
        job.emitter.result(measured, _notes(tuning), tokens)
        return
    job.emitter.phase("Saving the model")
    if spec.lora is not None:
        lora = Lora.of(model, _original(tuning))
        if not tuning.objective.scores:
            _publish_adapter(tuning, lora, measured)
        model = lora.merge()
    whole: PreTrainedModel = ready(model, dtype=TORCH_DTYPES[spec.published_dtype])
    measured["parameters"] = float(sum(each.numel() for each in whole.parameters()))
    if spec.lora is None or spec.lora.is_merged:
        card = _card(tuning, measured)
        facts = {"objective": spec.objective, "final_loss": course.last_loss}
        publish_model(job, lambda folder: _write(tuning, whole, folder), card, facts)
    name = "model" if spec.lora is None or spec.lora.is_merged else "adapter"
    measured["disk_bytes"] = float(weight_file_bytes(job.output_dir(name)))
    job.emitter.result(measured, _notes(tuning), tokens)


def _original(tuning: Tuning) -> Any:  # noqa: ANN401 - None or a function
    """Return what loads the full weights of a base that was held in 4 bits."""
    lora = tuning.spec.lora
    if lora is None or lora.base_dtype == "compute":
        return None
    return lambda: load_folder(tuning.folder, tuning.spec.published_dtype, tuning.device)


def _write(tuning: Tuning, model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(str(folder))
    tuning.tokenizer.save_pretrained(str(folder))


def _publish_adapter(tuning: Tuning, lora: Lora, measured: dict[str, float]) -> None:
    job, spec = tuning.job, tuning.spec
    base = spec.model
    if spec.lora is None or not isinstance(base, FolderModel | ArtefactModel):
        raise BadInputError("an adapter needs a base with trained weights")
    digest = weights_digest(tuning.folder)
    facts = {
        **spec.lora.model_dump(),
        "base": base.model_dump(),
        "objective": spec.objective,
        "final_loss": tuning.course.last_loss,
    }
    card = _card(tuning, measured, "Adapter")
    publish_model(job, lambda folder: lora.save(folder, base, digest), card, facts, "adapter")
    measured["adapter_disk_bytes"] = float(weight_file_bytes(job.output_dir("adapter")))


def _notes(tuning: Tuning) -> dict[str, str]:
    objective, spec = tuning.objective, tuning.spec
    # A pair whose text is cut has no reward: TRL's reward trainer leaves it out.
    is_cut = spec.samples.too_long == "cut" and not objective.scores
    lengths = f"one a row; what is longer than {spec.sequence_length} tokens is " + (
        "cut" if is_cut else "left out"
    )
    if strategy := spec.samples.packing_strategy:
        rows = f"{tuning.report.num_rows:,} rows of up to {spec.sequence_length} tokens"
        lengths = f"packed by TRL's {strategy} into {rows}; {HOW_PACKED[strategy]}"
    if objective.generates:
        lengths = (
            f"answers to a prompt: {spec.answers_per_prompt}; prompts of more than "
            f"{spec.longest_prompt} tokens are left out"
        )
    notes = {
        "trainer": f"TRL {version('trl')}, {objective.trainer}",
        "peak_memory_bytes": tuning.course.meter.read().how,
        "step_seconds": "median over the run's steps without the first two",
        "data": f"{tuning.records.num_records:,} records (sha256 {tuning.records.digest[:12]})",
        "samples": lengths,
        "device": str(tuning.device),
        "threads": str(torch.get_num_threads()),
        **tuning.notes,
    }
    if tuning.records.remarks:
        notes["data_remarks"] = "; ".join(tuning.records.remarks)
    if tuning.teacher is not None:
        notes["teacher"] = how_taught(spec, tuning.teacher)
    if objective.is_rewarded:
        rewards = (
            f"{each.path or 'built in'}: {each.function}, weight {each.weight:g}"
            for each in spec.reward_functions
        )
        notes["rewards"] = "; ".join(rewards)
    if spec.lora is not None:
        lora = spec.lora
        notes["lora"] = f"peft: rank {lora.rank}, alpha {lora.alpha}, {lora.targets} layers"
    return notes


def _card(tuning: Tuning, measured: Mapping[str, float], what: str = "Model") -> str:
    spec = tuning.spec
    named = {name: getattr(spec, name) for name in ("model", "data", "teacher")}
    own = {name: each.model_dump_json() for name, each in named.items() if each is not None}
    settings = {**spec.model_dump(exclude=set(named)), **own}
    sections = {"Settings": settings, "Figures": measured, "How it was measured": _notes(tuning)}
    return card_text(f"{what} trained by Slipway with TRL", sections)
