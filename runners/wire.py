"""Base types of every document between site, host and job: limits and addresses."""

import hashlib
import ipaddress
import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 32  # nesting of lists and objects
MAX_KEY_CHARACTERS = 300
MAX_FIELDS = 200  # of one object, known or not
MAX_EXCERPT_CHARACTERS = 500
LATEST_MS = 4_102_444_800_000  # 2100-01-01, as milliseconds since the Unix epoch

TimestampMs = Annotated[int, Field(ge=0, le=LATEST_MS)]
# Printable ASCII: PostgreSQL rejects NUL, even in queries.
Identifier = Annotated[str, StringConstraints(max_length=64, pattern="^[ -~]*$")]
Share = Annotated[float, Field(ge=0, le=1000)]  # 1 is all; clock drift may yield slightly more
Watts = Annotated[float, Field(ge=0, le=1e6)]
Celsius = Annotated[float, Field(ge=-300, le=10_000)]
Seconds = Annotated[float, Field(ge=0, le=1e10)]  # three centuries
Amount = Annotated[float, Field(ge=0, le=1e18)]
Figure = Annotated[float, Field(ge=-1e100, le=1e100)]  # of any unit
Rate = Annotated[float, Field(ge=0, le=1e21)]  # bytes or operations in a second


def of_texts(value: object) -> object:
    """Validate that an object's values are texts; return other types for pydantic to reject.

    Reports one error, even if thousands of entries are wrong.

    Raises:
        ValueError: names the first entry that is not a text.
    """
    for key, entry in value.items() if isinstance(value, dict) else ():
        if not isinstance(entry, str):
            msg = f"the entry {str(key)[:MAX_KEY_CHARACTERS]} is no text"
            raise ValueError(msg)  # noqa: TRY004 -- pydantic takes no TypeError for a fault
    return value


# Texts for display are truncated, not rejected.
Name = Annotated[str, BeforeValidator(lambda text: cut(text, 255))]
Sentence = Annotated[str, BeforeValidator(lambda text: cut(text, 2000))]
Names = Annotated[dict[Name, Name], BeforeValidator(of_texts)]


class Message(BaseModel):
    """Base of all messages: frozen, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: object) -> object:
        """Reject an object with thousands of unknown fields with a single error."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            msg = f"it has {len(value):,} fields, of {MAX_FIELDS} at most"
            raise ValueError(msg)
        return value


def key_id(key: str) -> str:
    """Return a command key's public id, which does not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def cut(text: object, max_characters: int) -> object:
    """Truncate a text; return other types unchanged for pydantic to reject."""
    return text[:max_characters] if isinstance(text, str) else text


def read_json(data: bytes | str) -> Any:  # noqa: ANN401 (JSON)
    """Return a JSON text as plain Python values that any database can store.

    Raises:
        ValueError: it is not JSON, is nested too deep, or has an integer beyond 64 bits.
    """
    return plain(parse_json(data))


def parse_json(data: bytes | str) -> Any:  # noqa: ANN401 (JSON)
    """Return a JSON text as Python values, not yet checked by ``plain``.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(_too_deep("the body")) from None


def plain(value: Any, where: str = "", depth: int = 0) -> Any:  # noqa: ANN401 (JSON)
    """Return a JSON value with NUL and lone surrogates replaced by U+FFFD.

    Raises:
        ValueError: it is nested too deep, or has an integer beyond 64 bits or a key too long.
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict | list | tuple):
        if depth >= MAX_DEPTH:
            raise ValueError(_too_deep(where))
        if isinstance(value, dict):
            return {
                _key(key, where): plain(entry, f"{where}.{key}" if where else key, depth + 1)
                for key, entry in value.items()
            }
        return [plain(entry, f"{where}.{at}", depth + 1) for at, entry in enumerate(value)]
    if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
        msg = f"{where[:MAX_KEY_CHARACTERS] or 'the body'} is an integer beyond 64 bits"
        raise ValueError(msg)
    return value


def excerpt(value: object) -> str:
    """Return the beginning of a rejected message, safe to store and display."""
    try:
        text = repr(value)
    except RecursionError:
        text = _too_deep("it")
    return _text(text[:MAX_EXCERPT_CHARACTERS])


def _too_deep(where: str) -> str:
    return f"{where[:MAX_KEY_CHARACTERS]} is nested deeper than {MAX_DEPTH} levels"


def _text(value: str) -> str:
    if value.isascii():
        return value.replace("\x00", "\ufffd") if "\x00" in value else value
    whole = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return whole.replace("\x00", "\ufffd")


def _key(key: str, where: str) -> str:
    if len(key) > MAX_KEY_CHARACTERS:
        at = f" of {where[:MAX_KEY_CHARACTERS]}" if where else ""
        msg = f"a key{at} has {len(key)} characters, of {MAX_KEY_CHARACTERS} at most"
        raise ValueError(msg)
    return _text(key)


# Types of numeric IP addresses and ports.


def _plain_address(text: str) -> str:
    return str(ipaddress.ip_address(text))


IpAddress = Annotated[str, AfterValidator(_plain_address)]
Port = Annotated[int, Field(ge=1024, le=65535)]
