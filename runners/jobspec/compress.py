"""Compression options: the method and its settings."""

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

# Options of Sheared LLaMA pruning: target shape and training steps.


Dimension = Literal["layers", "hidden", "heads", "channels"]
HIDDEN_MULTIPLE, CHANNEL_MULTIPLE = 16, 32  # widths that suit kernels and quantisation groups


class Shape(NamedTuple):
    """The shape of a dense model; ``key_value_heads`` includes their query heads."""

    layers: int
    hidden_size: int
    key_value_heads: int
    intermediate_size: int

    def size(self, dimension: str) -> int:
        """Return the size of a mask dimension."""
        return self[("layers", "hidden", "heads", "channels").index(dimension)]

    def without(self, share: float) -> "Shape":
        """Return the shape with about ``share`` of the weights removed, evenly by dimension.

        Depth, hidden size and inner widths are each scaled by ``(1 - share) ** (1/3)``.
        """
        ratio = (1.0 - share) ** (1 / 3)
        return Shape(
            max(1, round(self.layers * ratio)),
            _rounded(self.hidden_size, ratio, HIDDEN_MULTIPLE),
            max(1, round(self.key_value_heads * ratio)),
            _rounded(self.intermediate_size, ratio, CHANNEL_MULTIPLE),
        )


class Shear(BaseModel):
    """Target sizes, which override the even shape of ``sparsity``, and training steps.

    Masks and weights are trained together first; then the pruned model is trained further, with
    domains sampled by how far their loss is above the original's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    key_value_heads: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    mask_steps: PositiveInt = Field(default=80, le=1_000_000)
    recovery_steps: PositiveInt = Field(default=160, le=1_000_000)
    learning_rate: float = Field(default=5e-4, gt=0.0, le=0.1)

    def target(self, full: Shape, share: float) -> Shape:
        """Return the shape to prune to."""
        even = full.without(share)
        return Shape(
            self.layers or even.layers,
            self.hidden_size or even.hidden_size,
            self.key_value_heads or even.key_value_heads,
            self.intermediate_size or even.intermediate_size,
        )


def _rounded(size: int, ratio: float, multiple: int) -> int:
    multiple = min(multiple, size)
    return max(multiple, round(size * ratio / multiple) * multiple)


# Compression options: the method and its settings.


WeightDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
QUANTISED_DTYPES: tuple[WeightDtype, ...] = ("int8", "fp8", "int4")
NF4_BLOCK = 64  # weights per scale, fixed by bitsandbytes
NF4_BITS = 4
CompressMethod = Literal[
    "bf16", "int8", "int8_dynamic", "fp8", "nf4", "rtn", "gptq", "quantease", "awq",
    "smoothquant", "fptq", "norm_tweaking", "finequant", "magnitude", "wanda", "sparsegpt",
    "llm_pruner", "sheared_llama", "qmoe", "gguf",
]  # fmt: skip
# Q4_K_M and Q5_K_M are llama.cpp's mixtures.
GgufType = Literal["F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0"]
# torchao and bitsandbytes, the whole model at once
LIBRARY_DTYPES: dict[str, WeightDtype] = {
    "bf16": "bf16",
    "int8": "int8",
    "int8_dynamic": "int8",
    "fp8": "fp8",
    "nf4": "int4",
}
STRUCTURAL_METHODS = ("llm_pruner", "sheared_llama")  # need the gradients of the whole model
TERNARY_METHODS = ("qmoe",)  # experts alone
PRUNING_METHODS = ("magnitude", "wanda", "sparsegpt")
SELF_SIZED_METHODS = ("finequant",)  # group size per matrix, at least the given one
ROW_METHODS = ("smoothquant",)  # one scale per row, independent of the group size
FOLDING_METHODS = ("awq", "smoothquant", "fptq")  # scales are folded into the preceding norms
INT8_INPUT_METHODS = (
    "smoothquant",
    "fptq",
    "int8_dynamic",
)  # each token's activations round to 8 bits
ROW_BITS = 8
PATTERN_BLOCK = 4  # of 2:4: two of four adjacent weights of a row are kept


class CompressOptions(BaseModel):
    """The settings of a compression, without model and seed.

    ``bits`` and ``group_size`` apply to methods that quantise, ``sparsity`` and ``pattern`` to
    pruning. QuantEase keeps ``outlier_share`` of the weights in 16 bits; SmoothQuant moves the
    share ``smoothing`` of the activations' range into the weights; norm tweaking makes
    ``tweak_passes`` passes over the text; FineQuant halves a matrix's groups while that reduces
    its error by ``least_gain``.
    """

    method: CompressMethod = "int8"
    bits: Literal[2, 3, 4, 8] = 4
    group_size: PositiveInt = NF4_BLOCK  # fixed for nf4: another size is noted and ignored
    is_act_ordered: bool = False  # GPTQ: columns of large inputs first
    damping: float = Field(default=0.01, gt=0.0, le=1.0)  # of the Hessian's mean diagonal
    outlier_share: float = Field(default=0.0, ge=0.0, le=0.1)
    smoothing: float = Field(default=0.5, ge=0.0, le=1.0)
    tweak_passes: PositiveInt = Field(default=4, le=100)
    tweak_learning_rate: float = Field(default=1e-3, gt=0.0, le=0.1)
    least_gain: float = Field(default=0.15, gt=0.0, lt=1.0)
    gguf_type: GgufType = "Q8_0"
    shear: Shear = Shear()
    sparsity: float = Field(default=0.5, gt=0.0, lt=1.0)
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    recovery_steps: NonNegativeInt = Field(
        default=0, le=100_000
    )  # of a LoRA that is merged afterwards
    calibration_tokens: PositiveInt = Field(default=16_384, le=10_000_000)
    evaluation_tokens: PositiveInt = 8192

    @property
    def is_layerwise(self) -> bool:
        """Return whether the built-in engine compresses the model layer by layer."""
        others = (self.is_structural, self.is_exported, self.is_ternary)
        return self.method not in LIBRARY_DTYPES and not any(others)

    @property
    def is_exported(self) -> bool:
        """Return whether the result is one GGUF file."""
        return self.method == "gguf"

    @property
    def is_ternary(self) -> bool:
        """Return whether experts become ternary weights in an entropy code."""
        return self.method in TERNARY_METHODS

    @property
    def is_structural(self) -> bool:
        """Return whether whole heads and channels are removed, which yields a smaller model."""
        return self.method in STRUCTURAL_METHODS

    @property
    def has_codes(self) -> bool:
        """Return whether weights become integer codes with scales."""
        return self.is_layerwise and self.method not in PRUNING_METHODS

    @property
    def has_groups(self) -> bool:
        """Return whether groups of ``group_size`` weights share a scale."""
        return self.has_codes and self.method not in ROW_METHODS

    @property
    def row_divisor(self) -> int:
        """Return the required divisor of a matrix's row length."""
        if self.has_groups:
            return 1 if self.method in SELF_SIZED_METHODS else self.group_size
        return PATTERN_BLOCK if self.pattern == "2:4" else 1

    @property
    def is_packed(self) -> bool:
        """Return whether the weights are stored as codes."""
        return self.has_codes and not self.outlier_share

    @property
    def code_bits(self) -> int:
        """Return the bits per code."""
        return ROW_BITS if self.method in ROW_METHODS else self.bits

    @property
    def rounds_inputs(self) -> bool:
        """Return whether activations are also rounded to 8 bits per token."""
        return self.method in INT8_INPUT_METHODS

    @property
    def weight_dtype(self) -> WeightDtype:
        """Return the weight dtype for loading the result."""
        if self.is_ternary:
            return "int4"
        if self.is_packed:
            return "int8" if self.code_bits > NF4_BITS else "int4"
        return LIBRARY_DTYPES.get(self.method, "bf16")

    @property
    def held_dtype(self) -> WeightDtype:
        """Return the weight dtype in memory: packed codes are unpacked when loaded."""
        return "bf16" if self.is_layerwise or self.is_ternary else self.weight_dtype

    @property
    def predictable_phases(self) -> tuple[tuple[str, WeightDtype], ...]:
        """Return prefixes and dtypes of the measured phases that the planner can predict.

        It cannot predict models with fewer heads, or with activations rounded by the reader.
        """
        original: tuple[str, WeightDtype] = ("original_", "bf16")
        if self.is_structural or self.rounds_inputs:
            return (original,)
        return (original, ("", self.held_dtype))

    @property
    def title(self) -> str:
        """Return a short method name for a model's title."""
        if self.is_structural:
            return f"{self.method} {self.sparsity:.0%}"
        if self.is_ternary:
            return "QMoE, ternary experts"
        if self.is_exported:
            return f"GGUF {self.gguf_type}"
        inputs = ", 8 bit activations" if self.rounds_inputs else ""
        if not self.is_layerwise:
            return f"{self.weight_dtype}{inputs}"
        if self.has_codes:
            return f"{self.method} {self.code_bits} bit{inputs}"
        share = "2:4" if self.pattern == "2:4" else f"{self.sparsity:.0%}"
        return f"{self.method} {share}"

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that the method reads, for a model card."""
        if self.method in LIBRARY_DTYPES:
            return {}
        if self.is_exported:
            return {"gguf_type": self.gguf_type}
        values: dict[str, object] = {"calibration_tokens": self.calibration_tokens}
        if self.is_ternary:
            return {"calibration_tokens": str(self.calibration_tokens)}
        if self.has_codes:
            values |= {"bits": self.code_bits}
            values |= {"group_size": self.group_size} if self.has_groups else {}
        elif self.is_structural:
            values |= {"sparsity": self.sparsity, "recovery_steps": self.recovery_steps}
            if self.method == "sheared_llama":
                values = {"sparsity": self.sparsity, **self.shear.model_dump(exclude_none=True)}
        else:
            values |= {"pattern": self.pattern}
            values |= {"sparsity": self.sparsity} if self.pattern == "unstructured" else {}
        values |= {shown: getattr(self, name) for shown, name in READ_BY.get(self.method, ())}
        if self.outlier_share:
            values |= {"outlier_share": self.outlier_share}
        return {name: str(value) for name, value in values.items()}


# method -> its specific settings, by their names on a model card
READ_BY = {
    "gptq": (("act_order", "is_act_ordered"), ("damping", "damping")),
    "smoothquant": (("smoothing", "smoothing"),),
    "norm_tweaking": (
        ("damping", "damping"),
        ("tweak_passes", "tweak_passes"),
        ("tweak_learning_rate", "tweak_learning_rate"),
    ),
    "finequant": (("least_gain", "least_gain"),),
}
