"""Names that people give: each has something to see, and nothing that does not show."""

import re
import unicodedata

from django.core.exceptions import ValidationError

from webapp.core.problems import InvalidProblem

# Characters that reverse the text after them, so that a name shows as another one (UAX #9).
BIDIRECTIONAL = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
# Default_Ignorable_Code_Point of Unicode 16 without those of JOINING, and a blank of Braille.
IGNORABLE = (
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u200b\u2060-\u2065\u206a-\u206f\u2800\u3164\ufeff\uffa0"
    "\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e001f"
    "\U000e0080-\U000e00ff\U000e01f0-\U000e0fff"
)
# They shape the visible characters beside them: emoji sequences, Persian, Mongolian, ideographs.
JOINING = "\u180b-\u180f\u200c\u200d\ufe00-\ufe0f\U000e0020-\U000e007f\U000e0100-\U000e01ef"
HIDDEN = re.compile(f"[{BIDIRECTIONAL}{IGNORABLE}]")
UNSEEN = re.compile(f"[\\s{JOINING}]*")
REMEDY = "Leave out control, bidirectional and invisible characters."
BLANK = "The name is blank. Give it a character that shows, or leave the field out."


def _hidden(name: str) -> str:
    """Return the first character of a name that does not show, "" if there is none."""
    kinds = {"Cc", "Cs", "Zl", "Zp"}
    odd = (one for one in name if unicodedata.category(one) in kinds or HIDDEN.match(one))
    return next(odd, "")


def name_fault(name: str) -> str:
    """Return what is wrong with a name without blanks at its ends, "" if nothing is."""
    if hidden := _hidden(name):
        return (
            f"The name {ascii(name)[:80]} holds the character U+{ord(hidden):04X}, which does not "
            f"show. {REMEDY}"
        )
    return BLANK if UNSEEN.fullmatch(name) else ""


def checked_name(name: str, field: str) -> str:
    """Return a name without blanks at its ends; an empty one is left to its field's own rules.

    Raises:
        InvalidProblem: it is blank, or holds a character that does not show.
    """
    stripped = name.strip()
    message = name_fault(stripped) if name else ""
    if not message:
        return stripped
    raise InvalidProblem(
        "invalid",
        f"The field {field} is not valid: {message}",
        errors=[{"field": field, "message": message}],
    )


def shown_name(name: str) -> None:
    """Check a name, as a validator of a form's field.

    Raises:
        ValidationError: as ``checked_name``.
    """
    if message := name_fault(name.strip()):
        raise ValidationError(message)
