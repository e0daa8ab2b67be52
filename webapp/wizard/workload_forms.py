"""Workload forms, one per goal, with the data of a training."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from django import forms

from runners.datasets.conversations import DataError
from runners.datasets.records import suffix_of
from runners.datasets.text import unix_lines
from runners.jobspec.base import LONGEST_PROMPT, MOST_PROMPTS
from webapp.core.display import sentence
from webapp.datasets.models import Dataset
from webapp.plans.drafting import (
    CODED_METHODS,
    GROUPED_METHODS,
    PATTERN,
    PRUNING_METHODS,
    RECOVERED_METHODS,
    STRUCTURAL_METHODS,
)
from webapp.plans.training import MIX_ROWS
from webapp.wizard.forms import (
    DecimalNumber,
    Option,
    OptionalText,
    StepForm,
    WholeNumber,
    show_only_for,
)

# Form fields of a weighted data mixture, one row per source.


FEWEST_SOURCES = 2
FIELDS = ("source", "path", "weight")
REFERENCES = tuple(f"mix_reference_{row}" for row in MIX_ROWS)
NAMES = (
    *(f"mix_{name}_{row}" for row in MIX_ROWS for name in FIELDS),
    *("mix_weights", "mix_every", *REFERENCES),
)
WEIGHTS = [("fixed", "Fixed"), ("dynamic", "Follow each source's loss")]


class Row(NamedTuple):
    """The three form fields of one source."""

    source: forms.BoundField
    path: forms.BoundField
    weight: forms.BoundField


def checked_path(text: str) -> str:
    """Return a file's path without surrounding blanks.

    Raises:
        ValidationError: the path contains “..”, or the file type is not supported.
    """
    path = text.strip()
    if ".." in path.split("/") or "\x00" in path:
        raise forms.ValidationError("A file's path may not contain “..”.")
    try:
        if path:
            suffix_of(path)
    except DataError as error:
        raise forms.ValidationError(sentence(str(error))) from None
    return path


class MixtureForm(StepForm):
    """A form with rows of sources and weights, used if ``data_source`` is ``mixed``.

    The interval and the reference losses are used if the weights are dynamic.
    """

    mix_weights = forms.ChoiceField(label="The weights", choices=WEIGHTS, required=False)
    mix_every = WholeNumber(
        "Steps between two updates",
        *(1, 1_000_000),
        "The held-out loss on each source is measured before each update",
        required=False,
    )

    def offer_sources(self, listed: Sequence[tuple[str, str]]) -> None:
        """Add the rows; each offers the host's own text, a file on it, and the team's uploads."""
        own = [("", "None"), ("host", "The host's own text"), ("file", "A file on the host")]
        for row in MIX_ROWS:
            source = forms.ChoiceField(
                label=f"Source {row}", choices=[*own, *listed], required=False
            )
            path = forms.CharField(label=f"File of source {row}", required=False, max_length=1000)
            weight = DecimalNumber(f"Weight of source {row}", 0.001, 1000, required=False)
            for name, field in zip(FIELDS, (source, path, weight), strict=True):
                self.fields[f"mix_{name}_{row}"] = field
            label = f"Reference loss of source {row}"
            self.fields[f"mix_reference_{row}"] = DecimalNumber(label, 0, 20, required=False)

    @property
    def mixture(self) -> Iterator[Row]:
        """Yield the rows in order."""
        for row in MIX_ROWS:
            yield Row(*(self[f"mix_{name}_{row}"] for name in FIELDS))

    @property
    def references(self) -> Iterator[forms.BoundField]:
        """Yield the reference loss fields of the rows, for dynamic weights."""
        for name in REFERENCES:
            yield self[name]

    def check_mixture(self, values: dict[str, Any]) -> None:
        """Reject fewer than two sources, missing weights or paths, and duplicates."""
        seen = set()
        for row in MIX_ROWS:
            source, path, weight = (values.get(f"mix_{name}_{row}") for name in FIELDS)
            if not source:
                continue
            if source == "file":
                path = self._check_path(row, str(path or ""))
            if weight is None and f"mix_weight_{row}" not in self.errors:
                self.add_error(f"mix_weight_{row}", "Give the source a weight, for example 1.")
            if (key := (source, path if source == "file" else "")) in seen:
                self.add_error(
                    f"mix_source_{row}",
                    "This source is already listed. Remove one of the two rows.",
                )
            seen.add(key)
        if len(seen) < FEWEST_SOURCES:
            error_text = (
                f"{len(seen)} of these rows name a source. Choose at least {FEWEST_SOURCES}."
            )
            self.add_error("mix_source_1", error_text)
        is_dynamic = values.get("mix_weights") == "dynamic"
        if is_dynamic and values.get("mix_every") is None and "mix_every" not in self.errors:
            self.add_error(
                "mix_every", "Give the number of steps between two updates, for example 50."
            )

    def _check_path(self, row: int, text: str) -> str:
        name = f"mix_path_{row}"
        try:
            path = checked_path(text)
        except forms.ValidationError as error:
            self.add_error(name, error)
            return text
        if not path:
            self.add_error(name, "Name the file.")
        self.cleaned_data[name] = path
        return path


# The form fields of a training run's data.


SOURCES = [
    ("host", "The host's own text"),
    ("file", "A file on the host"),
    ("upload", "An uploaded file"),
    ("mixed", "Several sources by weight"),
]
READ_AS = [
    ("", "By its first record"),
    ("text", "Text"),
    ("chat", "Chats: “messages”"),
    ("sharegpt", "Chats of ShareGPT: “conversations”"),
    ("instruction", "Instructions: “instruction”, “output”"),
    ("classification", "Classes: “text”, “label”"),
    ("completion", "Prompts: “prompt”, “completion”"),
]


class DataForm(MixtureForm):
    """The fields of a training run's data; the step shows them in a section of their own."""

    data_names = (
        "data_source", "data_path", "data_format", "dataset", "rows", "too_long", *NAMES,
    )  # fmt: skip

    data_source = forms.ChoiceField(label="Training text", choices=SOURCES, required=False)
    data_path = forms.CharField(
        label="File on the host",
        required=False,
        max_length=1000,
        help_text="JSON lines, Parquet or .txt, below the host's model folder",
    )
    data_format = forms.ChoiceField(label="File format", choices=READ_AS, required=False)
    dataset = forms.ChoiceField(label="Uploaded file", required=False)
    rows = forms.ChoiceField(
        label="Short samples",
        choices=[
            ("packed", "Several per row, masked from each other"),
            ("padded", "One per row, padded"),
        ],
        required=False,
        help_text="The plan assumes full rows, and padded rows are not full",
    )
    too_long = forms.ChoiceField(
        label="Samples longer than a row",
        choices=[("cut", "Truncate"), ("leave_out", "Leave out")],
        required=False,
    )

    def __init__(self, *args: Any, datasets: Sequence[Dataset] = (), **kwargs: Any) -> None:
        """Add the team's uploaded files to the choices."""
        super().__init__(*args, **kwargs)
        self.datasets = datasets
        listed = [(each.pk, f"{each.name} · {each.num_records:,} records") for each in datasets]
        field = self.fields["dataset"]
        if isinstance(field, forms.ChoiceField):
            field.choices = [("", "Choose a file"), *listed]
        self.offer_sources(listed)

    @property
    def chosen(self) -> Dataset | None:
        """Return the chosen uploaded file, or None."""
        value = self["dataset"].value()
        return next((each for each in self.datasets if each.pk == value), None)

    def clean_data_path(self) -> str:
        """Return the path; reject “..” and unsupported file types."""
        return checked_path(str(self.cleaned_data.get("data_path") or ""))

    def clean(self) -> dict[str, Any]:
        """Require the file, upload or mixture that the chosen source needs."""
        values = super().clean() or self.cleaned_data
        needed = {"file": "data_path", "upload": "dataset"}.get(values.get("data_source") or "")
        if needed and not values.get(needed) and needed not in self.errors:
            sentences = {"data_path": "Name the file.", "dataset": "Choose a file, or upload one."}
            self.add_error(needed, sentences[needed])
        if values.get("data_source") == "mixed":
            self.check_mixture(values)
        return values


TRAIN_METHODS = [
    ("full", "Full: every weight"),
    ("lora", "LoRA: low-rank adapters"),
    ("qlora", "QLoRA: adapters over 4-bit weights"),
    ("lomo", "LOMO: every weight, no optimiser states, one gradient at a time"),
    ("adalomo", "AdaLomo: as LOMO, each weight at its own rate"),
    ("qft", "QFT: every weight, with weights, gradients and momentum in 8 bits"),
    ("classification", "Classification: an encoder learns text labels"),
    ("alphatuning", "AlphaTuning: scales alone, over 4-bit weights"),
]
ADAPTER_METHODS = ("lora", "qlora")
OPTIMIZERS = [
    ("adamw", "AdamW"),
    ("adamw_8bit", "AdamW, 8-bit states"),
    ("adafactor", "Adafactor"),
    ("lion", "Lion"),
    ("sgd", "SGD"),
    ("lomo", "LOMO: no states, one gradient at a time"),
    ("adalomo", "AdaLomo: LOMO, each weight at its own rate"),
]
PLACES = [
    ("none", "On the device"),
    ("cpu", "In the host's memory, for a GPU"),
    ("disk", "On the host's disk"),
]
COMPRESSIONS = [
    ("int8_weight_only", "8-bit whole numbers, weights only"),
    ("int8_dynamic", "8-bit whole numbers, activations as well"),
    ("fp8", "8-bit floats, weights only"),
    ("int4_weight_only", "4-bit whole numbers in groups, weights only"),
    ("nf4", "4-bit NormalFloat"),
    ("gguf", "GGUF for llama.cpp: Q4_K_M, or Q8_0 with 8 bits"),
    ("gptq", "GPTQ: error passed on, column by column"),
    ("norm_tweaking", "Norm tweaking: GPTQ, then norms re-fitted; for 2 and 3 bits"),
    ("quantease", "QuantEase: coordinate descent"),
    ("awq", "AWQ: large inputs scaled up before rounding"),
    ("finequant", "FineQuant: groups as coarse as each matrix allows"),
    ("fptq", "FPTQ: 8-bit activations as well"),
    ("sparsegpt", "SparseGPT: single weights to zero"),
    ("llm_pruner", "LLM-Pruner: whole heads and channels removed"),
    ("sheared_llama", "Sheared LLaMA: a smaller shape by learned masks, then trained further"),
    ("qmoe", "QMoE: ternary experts in an entropy code, for sparse models"),
]
FLEX = ("flex", "By blocks (FlexAttention), for GPUs")
ATTENTIONS = [
    ("auto", "Automatic"),
    ("flash", "Fused (SDPA)"),
    ("eager", "Eager (separate products)"),
    FLEX,
]
CODE_BITS = [(str(bits), f"{bits} bits") for bits in (4, 3, 2, 8)]
SPARSITIES = [
    ("50", "Half"),
    ("20", "A fifth"),
    ("30", "30 per cent"),
    ("60", "60 per cent"),
    (PATTERN, "Two of each four weights"),
]
BATCHINGS = [
    ("given", "In the order of the prompts"),
    ("sorted", "Sorted by length"),
    ("turbo", "By length, cut where it costs least"),
    ("packed", "Without padding, all prompts of a batch in one row"),
    ("continuous", "Continuous: the next prompt as soon as one is done"),
]
GUESSES = [("", "None"), ("lookup", "Prompt lookup, one prompt at a time")]
KV_CACHES = [
    ("plain", "Default"),
    ("fp8", "8 bits (fp8)"),
    ("int4", "4 bits"),
    ("int2", "2 bits"),
]


class ServeForm(StepForm):
    """Serving workload: online requests."""

    input_tokens = WholeNumber("Prompt length", 1, 1_000_000, "Tokens in a typical request")
    output_tokens = WholeNumber("Answer length", 1, 1_000_000, "Tokens in a typical answer")
    max_request_tokens = WholeNumber(
        "Longest request",
        1,
        10_000_000,
        "Prompt and answer in total; empty means four times the typical request",
        required=False,
    )
    concurrency = WholeNumber("Concurrent requests", 1, 100_000, "Concurrent requests")
    prefix_share_percent = WholeNumber(
        "Shared prefix", 0, 99, "Per cent of the prompt that all requests share"
    )

    def clean(self) -> dict[str, Any]:
        """Reject a longest request that is shorter than the typical one."""
        values = super().clean() or self.cleaned_data
        typical = (values.get("input_tokens") or 0) + (values.get("output_tokens") or 0)
        longest = values.get("max_request_tokens")
        if longest is not None and longest < typical:
            self.add_error(
                "max_request_tokens",
                f"Longest request is {longest:,} tokens, and a typical one has {typical:,}. "
                f"Increase “Longest request” to at least {typical}, or leave it empty.",
            )
        return values


class GenerateForm(StepForm):
    """Offline generation workload: batches of prompts."""

    batch_size = WholeNumber("Batch size", 1, 100_000, "Sequences processed in one pass")
    input_tokens = WholeNumber("Prompt length", 1, 1_000_000, "Tokens")
    output_tokens = WholeNumber("Answer length", 1, 1_000_000, "Tokens")
    prompts_path = forms.CharField(
        label="Prompts file on the host",
        required=False,
        max_length=1000,
        help_text=(
            "A prompt a line, or JSON lines with “prompt”, below the host's model folder; empty "
            "means one batch of the host's own text."
        ),
    )
    batching = Option("Batches", BATCHINGS)
    kv_cache = Option(
        "Keys and values", KV_CACHES, "Format of the KV cache while a batch is processed"
    )
    guessing = Option(
        "Speculative decoding",
        GUESSES,
        "The output stays the same; the job shows the draft acceptance rate",
    )
    decode_step = Option(
        "Decode step",
        [("", "Default"), ("compiled", "Compiled when the job starts")],
        "Minutes before the first batch, then quicker; needs g++ on the host",
    )

    def clean_prompts_path(self) -> str:
        """Reject a path with “..”."""
        path = str(self.cleaned_data.get("prompts_path") or "").strip()
        if ".." in path.split("/") or "\x00" in path:
            raise forms.ValidationError("A file's path may not contain “..”.")
        return path

    def clean(self) -> dict[str, Any]:
        """Reject options that cannot be combined."""
        values = super().clean() or self.cleaned_data
        is_narrow = values.get("kv_cache") not in {"", "plain"}
        if is_narrow and (values.get("guessing") or values.get("batching") == "continuous"):
            self.add_error("kv_cache", "Fewer bits run in batches only. Choose “Default”.")
        return values


class PretrainForm(DataForm):
    """Training workload: sequence length, batch size, duration, and training options."""

    finer_titles: ClassVar = {
        "Memory": ("activation_offload", "optimizer_offload", "checkpoint_writing"),
        "Kernels and numbers": ("attention", "products", "training_step", "rounding"),
        "Run control": ("lengths", "early_stop", "on_spike"),
        "Outputs": ("exported_weights", "text_samples", "sample_prompts"),
    }
    sequence_length = WholeNumber("Sequence length", 8, 1_000_000, "Tokens per sequence")
    global_batch_size = WholeNumber("Batch size", 1, 100_000, "Sequences per step")
    optimizer = forms.ChoiceField(label="Optimiser", choices=OPTIMIZERS)
    time_budget_minutes = DecimalNumber(
        "Time budget",
        0.1,
        100_000,
        "Minutes; training stops when they are used up",
        required=False,
    )
    million_tokens = DecimalNumber(
        "Or a number of tokens",
        0.001,
        1e9,
        "Millions; empty means the time budget",
        required=False,
    )
    activation_offload = Option(
        "Activation offload",
        PLACES,
        "Where activations are stored between the forward and the backward pass; offload makes a "
        "step slower",
    )
    optimizer_offload = Option(
        "Optimiser state offload",
        PLACES,
        "Where AdamW's moments are stored between two steps (ZeRO-Offload)",
    )
    lengths = Option(
        "Sequence length schedule",
        [
            ("fixed", "Constant"),
            ("grow", "Growing (GrowLength)"),
        ],
        "Starts at an eighth of the sequence length; four lengths with a quarter of the tokens "
        "each. Needs a number of tokens",
    )
    rounding = Option(
        "Quantisation-aware training",
        [("none", "None"), ("8", "To 8 bits"), ("4", "To 4 bits, in groups of 32")],
        "Reduces the quality loss of a later compression to that width",
    )
    attention = Option(
        "Attention kernel",
        ATTENTIONS,
        "The fused kernel does not store scores; on a CPU it is slower for short sequences",
    )
    products = Option(
        "Matrix products",
        [("auto", "In 16 bits or wider"), ("fp8", "In 8-bit floats (fp8)")],
        "For GPUs from Ada Lovelace on; emulated elsewhere, which is slower than 16 bits",
    )
    training_step = Option(
        "Training step",
        [("plain", "Default"), ("compiled", "Compiled layers")],
        "Compiling takes up to a few minutes at the start, and needs g++ on the host",
    )
    early_stop = Option(
        "Stop early",
        [
            ("never", "No"),
            ("2", "After two without gain"),
            ("3", "After three without gain"),
        ],
        "A run has eight validations",
    )
    exported_weights = Option(
        "Exported weights",
        [("best", "Lowest held-out loss"), ("last", "Last step")],
        "Evaluated eight times in a run; the best weights are kept on the host's disk",
    )
    checkpoint_writing = Option(
        "Checkpoints",
        [
            ("auto", "In the background on GPUs"),
            ("background", "Written in the background"),
            ("in_step", "Synchronous"),
        ],
        "Background writing needs host memory for one more copy of the states",
    )
    text_samples = Option(
        "Text samples",
        [
            ("none", "No"),
            ("20", "Every 20 steps"),
            ("100", "Every 100 steps"),
            ("500", "Every 500 steps"),
        ],
        "The current weights continue prompts; the job's page shows what they wrote",
    )
    sample_prompts = OptionalText(
        "Prompts of the samples",
        f"One a line, {MOST_PROMPTS} at most; empty means the first words of held-out text",
    )
    on_spike = Option(
        "On a loss spike",
        [("stop", "Stop; the last checkpoint stays"), ("skip", "Skip the step")],
    )

    def __init__(self, *args: Any, has_gpus: bool = True, **kwargs: Any) -> None:
        """Offer FlexAttention if the host has GPUs or the draft uses it already."""
        super().__init__(*args, **kwargs)
        field = self.fields["attention"]
        if isinstance(field, Option) and not has_gpus and self["attention"].value() != FLEX[0]:
            field.choices = [each for each in ATTENTIONS if each != FLEX]

    def clean_sample_prompts(self) -> str:
        """Reject too many or too long sample prompts."""
        text = unix_lines(str(self.cleaned_data.get("sample_prompts") or ""))
        lines = [each for each in text.split("\n") if each.strip()]
        if len(lines) > MOST_PROMPTS:
            raise forms.ValidationError(
                f"There are {len(lines)} prompts, one a line. Give {MOST_PROMPTS} at most."
            )
        longest = max(map(len, lines), default=0)
        if longest > LONGEST_PROMPT:
            raise forms.ValidationError(
                f"A prompt has {longest:,} characters. It may have {LONGEST_PROMPT} at most."
            )
        return "\n".join(lines)

    def clean(self) -> dict[str, Any]:
        """Reject a run without a time budget or a number of tokens."""
        values = super().clean() or self.cleaned_data
        ends = ("time_budget_minutes", "million_tokens")
        if not any(values.get(name) or name in self.errors for name in ends):
            self.add_error("time_budget_minutes", "Give a time budget or a number of tokens.")
        if values.get("lengths") == "grow" and not values.get("million_tokens"):
            self.add_error("million_tokens", "Lengths that grow need a number of tokens.")
        return values


class FinetuneForm(PretrainForm):
    """Fine-tuning workload: a training run that starts from trained weights."""

    method = forms.ChoiceField(label="Method", choices=TRAIN_METHODS)
    lora_rank = WholeNumber("Adapter rank", 1, 1024, "For LoRA and QLoRA")
    field_order = ["method", "lora_rank"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        show_only_for(self.fields["lora_rank"], ADAPTER_METHODS)


class CompressForm(StepForm):
    """Compression workload: quantisation and pruning methods."""

    method = forms.ChoiceField(label="Method", choices=COMPRESSIONS)
    bits = forms.TypedChoiceField(
        label="Bits",
        choices=CODE_BITS,
        coerce=int,
        required=False,
        empty_value=None,
        help_text="For GGUF and the methods from GPTQ to FPTQ; empty means 4",
    )
    group_size = WholeNumber("Group size", 8, 4096, "Weights that share one scale")
    sparsity = forms.ChoiceField(
        label="Weights to remove",
        choices=SPARSITIES,
        required=False,
        help_text="For SparseGPT and LLM-Pruner; empty means half",
    )
    recovery_steps = WholeNumber(
        "Recovery steps",
        0,
        100_000,
        "Steps of LoRA training after pruning, then merged; empty means none",
        required=False,
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        show_only_for(self.fields["bits"], ("gguf", *CODED_METHODS))
        show_only_for(self.fields["group_size"], GROUPED_METHODS)
        show_only_for(self.fields["sparsity"], PRUNING_METHODS)
        show_only_for(self.fields["recovery_steps"], RECOVERED_METHODS)

    def clean(self) -> dict[str, Any]:
        """Reject an N:M sparsity pattern for methods that remove whole channels."""
        values = super().clean() or self.cleaned_data
        if values.get("method") in STRUCTURAL_METHODS and values.get("sparsity") == PATTERN:
            self.add_error(
                "sparsity",
                "Structured pruning does not support 2:4 sparsity. Choose a sparsity ratio.",
            )
        return values


WORKLOAD_FORMS: dict[str, type[StepForm]] = {
    "serve": ServeForm,
    "generate": GenerateForm,
    "finetune": FinetuneForm,
    "pretrain": PretrainForm,
    "compress": CompressForm,
}
TRAINING_FORMS = frozenset({"finetune", "pretrain"})
