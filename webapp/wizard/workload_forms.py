"""How much work it is: one form per goal; what they clean is what the draft stores."""

from typing import Any, ClassVar

from django import forms

from runners.jobspec.text_samples import LONGEST_PROMPT, MOST_PROMPTS
from webapp.plans.compressing import (
    CODED_METHODS,
    GROUPED_METHODS,
    PATTERN,
    PRUNING_METHODS,
    RECOVERED_METHODS,
    STRUCTURAL_METHODS,
)
from webapp.wizard.data_forms import DataForm
from webapp.wizard.fields import (
    DecimalNumber,
    Option,
    OptionalText,
    StepForm,
    WholeNumber,
    asked_for,
)

TRAIN_METHODS = [
    ("full", "Full: every weight"),
    ("lora", "LoRA: low-rank adapters"),
    ("qlora", "QLoRA: adapters over 4-bit weights"),
    ("lomo", "LOMO: every weight, no optimiser states, one gradient at a time"),
    ("adalomo", "AdaLomo: as LOMO, each weight at its own rate"),
    ("qft", "QFT: every weight, with weights, gradients and momentum in 8 bits"),
    ("classification", "Classification: an encoder learns the labels of texts"),
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
    ("sheared_llama", "Sheared LLaMA: a smaller shape by learnt masks, then trained on"),
    ("qmoe", "QMoE: ternary experts in an entropy code, for sparse models"),
]
FLEX = ("flex", "By blocks (FlexAttention), for GPUs")
ATTENTIONS = [
    ("auto", "As suits the device"),
    ("flash", "Fused (SDPA)"),
    ("eager", "Separate products"),
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
GUESSES = [("", "No guessing"), ("lookup", "Guess from the prompt's own words, one at a time")]
KV_CACHES = [
    ("plain", "As it is"),
    ("fp8", "8 bits (fp8)"),
    ("int4", "4 bits"),
    ("int2", "2 bits"),
]


class ServeForm(StepForm):
    """Requests as they come."""

    input_tokens = WholeNumber("Prompt length", 1, 1_000_000, "Tokens in a typical request")
    output_tokens = WholeNumber("Answer length", 1, 1_000_000, "Tokens in a typical answer")
    concurrency = WholeNumber("People at once", 1, 100_000, "Requests in flight together")
    prefix_share_percent = WholeNumber(
        "Shared beginning", 0, 99, "Per cent of the prompt that all requests share"
    )


class GenerateForm(StepForm):
    """One pile of prompts."""

    batch_size = WholeNumber("Batch size", 1, 100_000, "Sequences worked on together")
    input_tokens = WholeNumber("Prompt length", 1, 1_000_000, "Tokens")
    output_tokens = WholeNumber("Answer length", 1, 1_000_000, "Tokens")
    prompts_path = forms.CharField(
        label="Prompts file on the host",
        required=False,
        max_length=1000,
        help_text="A prompt a line, or JSON lines with “prompt”, below the host's model folder; "
        "empty takes one batch of the host's own text.",
    )
    batching = Option("Batches", BATCHINGS)
    kv_cache = Option("Keys and values", KV_CACHES, "How they are kept while a batch is answered")
    guessing = Option(
        "Guess ahead",
        GUESSES,
        "The text stays the same; the job shows how many guesses were right",
    )
    decode_step = Option(
        "Decode step",
        [("", "As it is"), ("compiled", "Compiled when the job starts")],
        "Minutes before the first batch, then quicker; needs g++ on the host",
    )

    def clean_prompts_path(self) -> str:
        """Refuse a path that climbs."""
        path = str(self.cleaned_data.get("prompts_path") or "").strip()
        if ".." in path.split("/") or "\x00" in path:
            raise forms.ValidationError("A file's path may not climb with “..”.")
        return path

    def clean(self) -> dict[str, Any]:
        """Refuse what does not run together."""
        values = super().clean() or self.cleaned_data
        is_narrow = values.get("kv_cache") not in {"", "plain"}
        if is_narrow and (values.get("guessing") or values.get("batching") == "continuous"):
            self.add_error("kv_cache", "Fewer bits run in batches only. Choose “As it is”.")
        return values


class PretrainForm(DataForm):
    """A training run: how long the text pieces are, how many at once, for how long."""

    finer_titles: ClassVar = {
        "Memory": ("activation_offload", "optimizer_offload", "checkpoint_writing"),
        "Kernels and numbers": ("attention", "products", "training_step", "rounding"),
        "Course of the run": ("lengths", "early_stop", "on_spike"),
        "What it shows and leaves": ("exported_weights", "text_samples", "sample_prompts"),
    }
    sequence_length = WholeNumber("Sequence length", 8, 1_000_000, "Tokens in one piece of text")
    global_batch_size = WholeNumber("Batch size", 1, 100_000, "Pieces of text in one step")
    optimizer = forms.ChoiceField(label="Optimiser", choices=OPTIMIZERS)
    time_budget_minutes = DecimalNumber(
        "Time budget", 0.1, 100_000, "Minutes; stops when they are over", required=False
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
        "Where they wait between the two passes; elsewhere, a step takes longer",
    )
    optimizer_offload = Option(
        "Optimiser state offload",
        PLACES,
        "Where AdamW's moments wait between two steps (ZeRO-Offload)",
    )
    lengths = Option(
        "Sequence length schedule",
        [
            ("fixed", "Constant"),
            ("grow", "Growing (GrowLength)"),
        ],
        "From an eighth of it, in four lengths of a quarter of the tokens each; give their number",
    )
    rounding = Option(
        "Quantisation-aware training",
        [("none", "Not at all"), ("8", "To 8 bits"), ("4", "To 4 bits, in groups of 32")],
        "The model then loses little when it is compressed so",
    )
    attention = Option(
        "Attention kernel",
        ATTENTIONS,
        "A fused one keeps no scores; on a CPU it is slower for short sequences",
    )
    products = Option(
        "Matrix products",
        [("auto", "In 16 bits or wider"), ("fp8", "In 8-bit floats (fp8)")],
        "For GPUs from Ada Lovelace on; emulated elsewhere, which is slower than 16 bits",
    )
    training_step = Option(
        "Training step",
        [("plain", "As it is"), ("compiled", "Compiled layers")],
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
        "Weights that it leaves",
        [("best", "Lowest held-out loss"), ("last", "The last step's")],
        "Judged eight times in a run; the best ones lie on the host's disk meanwhile",
    )
    checkpoint_writing = Option(
        "Checkpoints",
        [
            ("auto", "Beside steps on GPUs"),
            ("background", "Written beside the steps"),
            ("in_step", "Written in a step"),
        ],
        "Beside the steps they need host memory for one more copy of the states",
    )
    text_samples = Option(
        "Text samples",
        [
            ("none", "No"),
            ("20", "Every 20 steps"),
            ("100", "Every 100 steps"),
            ("500", "Every 500 steps"),
        ],
        "The weights of the moment continue prompts; the job's page shows what they wrote",
    )
    sample_prompts = OptionalText(
        "Prompts of the samples",
        f"One a line, {MOST_PROMPTS} at most; empty means the first words of held-out text",
    )
    on_spike = Option(
        "On a loss spike",
        [("stop", "Stop; the last checkpoint stays"), ("skip", "Pass over the step")],
    )

    def __init__(self, *args: Any, has_gpus: bool = True, **kwargs: Any) -> None:
        """Offer attention by blocks where the host has GPUs, or a draft has it already."""
        super().__init__(*args, **kwargs)
        field = self.fields["attention"]
        if isinstance(field, Option) and not has_gpus and self["attention"].value() != FLEX[0]:
            field.choices = [each for each in ATTENTIONS if each != FLEX]

    def clean_sample_prompts(self) -> str:
        """Refuse more prompts, or longer ones, than a training continues."""
        text = str(self.cleaned_data.get("sample_prompts") or "").replace("\r\n", "\n")
        lines = [each for each in text.split("\n") if each.strip()]
        if len(lines) > MOST_PROMPTS:
            raise forms.ValidationError(
                f"These are {len(lines)} prompts, one a line. Give {MOST_PROMPTS} at most."
            )
        longest = max(map(len, lines), default=0)
        if longest > LONGEST_PROMPT:
            raise forms.ValidationError(
                f"A prompt has {longest:,} characters. It may have {LONGEST_PROMPT} at most."
            )
        return "\n".join(lines)

    def clean(self) -> dict[str, Any]:
        """Refuse a run without an end."""
        values = super().clean() or self.cleaned_data
        ends = ("time_budget_minutes", "million_tokens")
        if not any(values.get(name) or name in self.errors for name in ends):
            self.add_error("time_budget_minutes", "Give a time budget or a number of tokens.")
        if values.get("lengths") == "grow" and not values.get("million_tokens"):
            self.add_error("million_tokens", "Lengths that grow need a number of tokens.")
        return values


class FinetuneForm(PretrainForm):
    """A training run that starts from trained weights."""

    method = forms.ChoiceField(label="Method", choices=TRAIN_METHODS)
    lora_rank = WholeNumber("Adapter rank", 1, 1024, "For LoRA and QLoRA")
    field_order = ["method", "lora_rank"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked_for(self.fields["lora_rank"], ADAPTER_METHODS)


class CompressForm(StepForm):
    """Smaller weights."""

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
        label="What goes",
        choices=SPARSITIES,
        required=False,
        help_text="For SparseGPT and LLM-Pruner; empty means half",
    )
    recovery_steps = WholeNumber(
        "Recovery steps",
        0,
        100_000,
        "A LoRA learns so long after the cut and is merged; empty means none",
        required=False,
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked_for(self.fields["bits"], ("gguf", *CODED_METHODS))
        asked_for(self.fields["group_size"], GROUPED_METHODS)
        asked_for(self.fields["sparsity"], PRUNING_METHODS)
        asked_for(self.fields["recovery_steps"], RECOVERED_METHODS)

    def clean(self) -> dict[str, Any]:
        """Refuse a pattern of single weights where whole channels go."""
        values = super().clean() or self.cleaned_data
        if values.get("method") in STRUCTURAL_METHODS and values.get("sparsity") == PATTERN:
            self.add_error("sparsity", "This method removes whole heads. Choose a share.")
        return values


WORKLOAD_FORMS: dict[str, type[StepForm]] = {
    "serve": ServeForm,
    "generate": GenerateForm,
    "finetune": FinetuneForm,
    "pretrain": PretrainForm,
    "compress": CompressForm,
}
TRAINING_FORMS = frozenset({"finetune", "pretrain"})
