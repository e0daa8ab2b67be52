"""The form of a serving workload, with the rotary scaling that stretches the model's context."""

from collections.abc import Mapping
from typing import Any

from django import forms
from pydantic import ValidationError

from runners.plans.document import RopeScaling, ScalingKind
from runners.plans.fields import Key, faults_in, shown_of
from runners.plans.rotary_scaling import REQUIRED
from webapp.wizard.forms import Choice, FormOfPart, form_field

KIND, FACTOR = REQUIRED
GROUP = "Longer context (rope_scaling)"
ONLY_YARN = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")


class ServingForm(FormOfPart):
    """Online requests; the scaling's fields stand there where an engine takes one.

    ``taken``: the kinds on offer, each with the fields that it has. A scaling that is stated is
    shown where none is taken, so that it can be left out. ``scaling`` of a valid form is what it
    says.
    """

    def __init__(
        self,
        *args: Any,
        scaling: RopeScaling | None = None,
        taken: Mapping[ScalingKind, tuple[str, ...]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.scaling = scaling
        stated = scaling.stated if scaling else {}
        self.initial = dict(self.initial) | stated
        kinds: list[Key] = [*(taken or {})]
        kinds += [kind for kind in (stated.get(KIND),) if kind and kind not in kinds]
        if kinds:
            self._offer(
                kinds, {*stated, *(name for own in (taken or {}).values() for name in own)}
            )

    def _offer(self, kinds: list[Key], names: set[str]) -> None:
        shown = shown_of(RopeScaling.model_fields[KIND])
        words = {kind: (shown.choices or {})[kind] for kind in kinds}
        none: dict[Key, str] = {None: "None: the model's own context"}
        self.fields[KIND] = Choice(shown.title, none | words, None, shown.help)
        for name in RopeScaling.model_fields:
            if name != FACTOR and (name == KIND or name not in names):
                continue
            field = form_field(RopeScaling, name)
            field.required = False
            asking = ["yarn"] if name in ONLY_YARN else [str(kind) for kind in kinds]
            field.widget.attrs["data-asked-for"] = f"{KIND}={','.join(asking)}"
            self.fields[name] = field

    def clean(self) -> dict[str, Any]:
        """Check the scaling as the document does; its fields count where its kind has them."""
        values = super().clean()
        if KIND not in self.fields or self.errors:
            return values
        kind = self.cleaned_data.get(KIND)
        if kind is None:
            self.scaling = None
            return values
        if self.cleaned_data.get(FACTOR) is None:
            self.add_error(
                FACTOR,
                "Give the factor by which the context grows, for example 4, or choose “None”.",
            )
            return values
        given = {
            name: self.cleaned_data.get(name)
            for name in RopeScaling.model_fields
            if kind == "yarn" or name not in ONLY_YARN
        }
        try:
            self.scaling = RopeScaling.model_validate(given)
        except ValidationError as error:
            for fault in faults_in(error):
                self.add_error(self.field_of_fault(fault.field), fault.sentence)
        return values

    def _group(self, bound: forms.BoundField) -> str | None:
        return GROUP if bound.name in RopeScaling.model_fields else super()._group(bound)

    def _is_touched(self, bound: forms.BoundField) -> bool:
        if bound.name not in RopeScaling.model_fields:
            return super()._is_touched(bound)
        return bool(bound.errors) or (bound.name == KIND and bool(bound.value()))
