"""Errors of requests, each with the field, the value, the limit and the remedy.

Every error has a stable ``code`` for programs, a ``message`` for people and the ``field``
concerned, and is serialised as one JSON object at the command line and over HTTP.
"""

from dataclasses import dataclass, field


@dataclass(eq=False)
class PlannerError(Exception):
    """The base class of all planner errors."""

    message: str
    field: str | None = None
    code: str = "planner_error"

    def __str__(self) -> str:
        return self.message

    def to_json(self) -> dict[str, str | None]:
        """Return the error as the object that the command line and the HTTP API print."""
        return {"code": self.code, "message": self.message, "field": self.field}


@dataclass(eq=False)
class BadRequestError(PlannerError):
    """A field is missing, unknown, of the wrong type or out of its range."""

    code: str = "bad_request"

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class UnknownNameError(PlannerError):
    """A catalog lacks the name; ``nearest`` lists the closest existing names."""

    code: str = "unknown_name"
    nearest: tuple[str, ...] = field(default=())

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class UnknownDeviceError(UnknownNameError):
    """The device catalog has no such id or alias."""

    code: str = "unknown_device"

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class UnknownModelError(UnknownNameError):
    """The model catalog has no such Hugging Face id."""

    code: str = "unknown_model"

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class UnknownInstanceError(UnknownNameError):
    """The catalog of cloud offers has no such id."""

    code: str = "unknown_instance"

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class UnknownTechniqueError(UnknownNameError):
    """The technique registry has no such key."""

    code: str = "unknown_technique"

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class BadConfigError(PlannerError):
    """A Hugging Face ``config.json`` lacks a field or describes a family that is not covered."""

    code: str = "bad_config"

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class NotPossibleError(PlannerError):
    """The strategy contradicts the model, the cluster or itself, so that it has no cost."""

    code: str = "not_possible"

    __str__ = PlannerError.__str__


@dataclass(eq=False)
class NotCoveredError(PlannerError):
    """The request is valid, but the planner has no formula for it."""

    code: str = "not_covered"

    __str__ = PlannerError.__str__
