"""The form of a new tuning, made from its options."""

from typing import ClassVar

from runners.plans.tuning import TuningOptions
from webapp.wizard.forms import FormOfPart


class TuningForm(FormOfPart):
    """What a tuning may try and spend; its host is the plan's."""

    unshown: ClassVar = frozenset({"host"})

    @property
    def options(self) -> TuningOptions:
        """Return what a valid form asks for, else what it showed first."""
        return self.part if isinstance(self.part, TuningOptions) else TuningOptions()
