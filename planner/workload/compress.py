"""Compression of weights: read, quantise or prune layer by layer, write the result.

Rounding methods only stream the weights. Calibrated methods hold one layer at a time on the
device and the rest in host memory; several devices can split the calibration text.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.catalog.engines import factor_of, published_times
from planner.cost.communication import transfer_seconds
from planner.cost.memory import MemoryUse, StageMemory
from planner.cost.quantity import Ledger, Line
from planner.cost.roofline import compute_seconds, matmul_flops, memory_seconds
from planner.cost.training import inference_elements
from planner.cost.weights import (
    BITS_PER_BYTE,
    FP32_EFFICIENCY,
    RECIPES,
    SAMPLE_TOKENS,
    SOLVE_PRODUCTS,
    TUNING_BATCH_TOKENS,
    TUNING_STEP_SECONDS,
    Recipe,
    column_seconds,
    element_bytes,
    hessian_bytes,
    matrices,
    second_order_flops,
    tuning_seconds,
    weight_bytes_per_element,
    written_bytes,
)
from planner.specs.base import BadRequestError, Dtype, NotPossibleError, OperatorClass
from planner.specs.estimate import Performance
from planner.specs.workload import CompressWorkload
from planner.workload.inference_memory import usable_bytes
from planner.workload.outcome import Outcome
from planner.workload.setting import Rates, Setting, peak_of

GROUP = "compress"
# Entropy-coded ternary experts; attention is unchanged. Source: arXiv:2310.16795, section 4.
QMOE_BYTES_PER_ELEMENT = 0.8 / 8
# Saved activations of a tuned layer, as a multiple of those alive in a forward pass.
KEPT_TO_TUNE = 4
# 2-bit and 3-bit weights have the scales of 4-bit ones.
DTYPE_BY_BITS: dict[int, Dtype] = {2: "int4", 3: "int4", 4: "int4", 8: "int8", 16: "bf16"}
NARROW_BITS = (2, 3)


def target_dtype(workload: CompressWorkload) -> Dtype:
    """Return the target dtype of the linear weights.

    Raises:
        BadRequestError: no format has the requested number of bits.
    """
    if workload.bits is None:
        return RECIPES[workload.method].dtype
    if workload.bits not in DTYPE_BY_BITS:
        raise BadRequestError(
            f"bits is {workload.bits}: it must be 2, 3, 4, 8 or 16", "workload.bits"
        )
    return DTYPE_BY_BITS[workload.bits]


def _unchanged_weights(setting: Setting, workload: CompressWorkload) -> float:
    """Return the number of unchanged linear weights: all but experts for QMoE, else 0."""
    counts = setting.counts
    if workload.method != "qmoe":
        return 0.0
    if not setting.model.is_moe:
        name = "this one" if setting.model.id == "custom" else setting.model.id
        raise NotPossibleError(
            f"method qmoe needs a sparse mixture-of-experts model: {name} is dense",
            "workload.method",
        )
    return float(counts.layer_linear - counts.experts)


@dataclass(frozen=True)
class _MatrixTotals:
    """Sums over the matrices of all layers."""

    squared: float
    cubed: float
    updates: float
    columns: float
    widest: int
    largest: int


def _matrix_totals(shapes: Iterable[tuple[int, int, int]]) -> _MatrixTotals:
    squared = cubed = updates = columns = 0.0
    widest = largest = 0
    for inputs, outputs, count in shapes:
        squared += count * inputs**2
        cubed += count * inputs**3
        updates += count * outputs * inputs**2
        columns += count * inputs
        widest, largest = max(widest, inputs), max(largest, inputs * outputs)
    return _MatrixTotals(squared, cubed, updates, columns, widest, largest)


def compress(setting: Setting, workload: CompressWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of compressing the model: time, memory and disk."""
    return _Job(setting, workload, ledger).outcome()


class _Job:
    """One compression job, on one device or on several that split the calibration text."""

    def __init__(self, setting: Setting, workload: CompressWorkload, ledger: Ledger) -> None:
        self.setting, self.workload, self.ledger = setting, workload, ledger
        self.recipe: Recipe = RECIPES[workload.method]
        self.rates: Rates = setting.rates
        self.matrix_totals = _matrix_totals(matrices(setting.model))
        self.source = setting.counts.total * setting.plain_element_bytes
        self.own_memory = setting.device.kind == "cpu"  # device memory is host memory

    @property
    def tokens(self) -> int:
        """Return the tokens of calibration text."""
        if not self.recipe.is_calibrated:
            return 0
        return self.workload.calibration_tokens or self.recipe.calibration_tokens

    def outcome(self) -> Outcome:
        """Return the cost of the job, with a warning if no published time was fitted."""
        target = self._written()
        seconds = self._times(self.source + target)
        memory = self._memory(target)
        return Outcome(
            memory=memory,
            fits=memory.fits,
            seconds_by_class=seconds,
            phases={GROUP: seconds},
            performance=Performance(duration_seconds=sum(seconds.values())),
            warnings=self._warnings(),
        )

    def _warnings(self) -> tuple[str, ...]:
        if self.setting.is_measured or published_times(self.recipe.method_group):
            return ()
        untried = f"no published time of method {self.workload.method} took part in a fit"
        return (f"{untried}: its duration is arithmetic alone, hence the wide interval",)

    def _line(self, name: str, kind: OperatorClass, key: str = "") -> Line:
        """Return the ledger line of a term, with the factor fitted on published times."""
        line = self.setting.line(GROUP, name, kind, key)
        if self.setting.is_measured:
            return line
        return replace(line, factor=line.factor * factor_of(self.recipe.method_group))

    def _written(self) -> float:
        setting, counts = self.setting, self.setting.counts
        plain = (counts.total - counts.layer_linear) * setting.plain_element_bytes
        rest = _unchanged_weights(setting, self.workload)
        group = self.workload.group_size or setting.strategy.group_size
        dtype = target_dtype(self.workload)
        each = weight_bytes_per_element(dtype, group)
        if self.workload.bits in NARROW_BITS:
            each = each - element_bytes(dtype) + self.workload.bits / BITS_PER_BYTE
        return self.ledger.term(
            written_bytes,
            setting.line(GROUP, "Compressed checkpoint"),
            plain_bytes=plain + rest * setting.plain_element_bytes,
            parameters=(counts.layer_linear - rest) * self.recipe.kept_ratio,
            bytes_per_element=QMOE_BYTES_PER_ELEMENT if self.workload.method == "qmoe" else each,
        )

    def _times(self, moved: float) -> dict[str, float]:
        """Return the seconds by operator class; calibration is split over the devices."""
        setting, rates = self.setting, self.rates
        stream = self.ledger.term(
            memory_seconds,
            self._line("Reading and writing weights", "memory_bandwidth", "stream"),
            moved_bytes=moved + setting.counts.layer_linear * self.recipe.streamed_bytes,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            memory_efficiency=rates.stream_efficiency,
        )
        disk = self.ledger.term(
            transfer_seconds,
            setting.line(GROUP, "Disk", key="disk"),
            payload_bytes=moved,
            link_bytes_per_s=setting.disk_bytes_per_s,
        )
        if not self.recipe.is_calibrated:
            return {"compute": 0.0, "memory_bandwidth": stream, "overhead": disk}
        shared = setting.layout.data
        compute = self._forwards() + self._hessians()
        return {
            "compute": compute / shared,
            "memory_bandwidth": stream,
            "overhead": disk + (self._columns() + self._steps()) / shared,
        }

    def _forwards(self) -> float:
        """Return the seconds of the calibration passes and the tuning steps."""
        recipe, rates = self.recipe, self.rates
        counts = self.setting.counts
        routed = counts.layer_linear - counts.experts + counts.experts_active
        work = 0.0
        # Calibration runs all experts on all tokens; tuning only the routed ones.
        for name, parameters, tokens in (
            ("Passes over the text", counts.layer_linear, recipe.forwards * self.tokens),
            ("Tuning", routed, recipe.tuned_passes * recipe.tuned_tokens),
        ):
            if tokens:
                work = work + self.ledger.term(
                    matmul_flops,
                    self.setting.line(GROUP, name, key="forward_flops"),
                    parameters=parameters,
                    num_tokens=tokens,
                )
        return self.ledger.term(
            compute_seconds,
            self._line("Calibration and tuning", "compute", "calibration"),
            work_flops=work,
            peak_flops_per_s=rates.peak_flops_per_s,
            compute_efficiency=rates.compute_efficiency,
        )

    def _hessians(self) -> float:
        if not self.recipe.second_order:
            return 0.0
        work = self.ledger.term(
            second_order_flops,
            self.setting.line(GROUP, "Hessians and column updates"),
            num_tokens=self.tokens,
            squared_inputs=self.matrix_totals.squared,
            solve_products=SOLVE_PRODUCTS,
            cubed_inputs=self.matrix_totals.cubed,
            update_products=self.recipe.column_passes * self.matrix_totals.updates,
        )
        peak, _ = peak_of(self.setting.device, "fp32")
        plain = self.rates.compute_efficiency if self.own_memory else FP32_EFFICIENCY
        return self.ledger.term(
            compute_seconds,
            self._line("Second-order arithmetic in fp32", "compute", "second_order"),
            work_flops=work,
            peak_flops_per_s=peak,
            compute_efficiency=plain,
        )

    def _columns(self) -> float:
        if not self.recipe.second_order:
            return 0.0
        return self.ledger.term(
            column_seconds,
            self._line("Columns, one after the other", "overhead", "columns"),
            columns=self.matrix_totals.columns,
            passes=self.recipe.column_passes,
            column_s=self.recipe.column_seconds,
        )

    def _steps(self) -> float:
        if not self.recipe.layer_steps:
            return 0.0
        return self.ledger.term(
            tuning_seconds,
            self._line("Issuing the steps of all layers", "overhead", "steps"),
            num_layers=self.setting.model.num_hidden_layers,
            steps=self.recipe.layer_steps,
            step_s=TUNING_STEP_SECONDS,
        )

    def _memory(self, target: float) -> MemoryUse:
        """Return the memory of the job; layer-by-layer methods hold one layer on the device."""
        setting, recipe = self.setting, self.recipe
        layers = setting.model.num_hidden_layers
        layer = setting.counts.layer_linear / layers
        trained = setting.counts.total * recipe.trained_bytes
        by_layers = recipe.is_calibrated and not self.own_memory and not trained
        hidden_states = (
            2 * self.tokens * setting.model.hidden_size * setting.activation_element_bytes
        )
        tuned = recipe.tuned_bytes > 0
        on_device = hidden_states if tuned or not by_layers else 0.0
        hessians = 0.0
        if recipe.second_order:
            hessians = self.ledger.term(
                hessian_bytes,
                setting.line(GROUP, "Hessians of one layer"),
                squared_inputs=self.matrix_totals.squared / layers,
                widest=self.matrix_totals.widest,
                largest=self.matrix_totals.largest,
            )
        by_class = {
            "weights": layer * setting.plain_element_bytes if by_layers else self.source,
            "activations": on_device + self._working(tuned=tuned),
            "buffers": hessians
            or trained
            or layer * (recipe.tuned_bytes or setting.plain_element_bytes),
            "runtime_overhead": setting.engine.runtime_overhead_bytes * setting.factor("memory"),
        }
        return MemoryUse(
            stages=(StageMemory(by_class),),
            capacity_bytes=setting.device.memory_bytes,
            usable_bytes=usable_bytes(setting),
            host_bytes=self.source + hidden_states - on_device if by_layers else 0.0,
            disk_bytes=self.source + target,
            checkpoint_bytes=target,
        )

    def _working(self, *, tuned: bool) -> float:
        """Return the working set of one layer for one sample or one tuning batch."""
        if not self.recipe.is_calibrated:
            return 0.0
        elements = inference_elements(self.setting.model, 1)
        tokens = TUNING_BATCH_TOKENS if tuned else SAMPLE_TOKENS
        passes = KEPT_TO_TUNE if tuned else 1
        return tokens * elements * self.setting.activation_element_bytes * passes
