"""A stable identifier of this machine that does not reveal its machine-id."""

import hashlib
import hmac
import re
from pathlib import Path

MACHINE_ID = Path("/etc/machine-id")
APPLICATION = b"slipway host"
_FORM = re.compile(r"[0-9a-f]{32}")


def machine_id(path: Path = MACHINE_ID) -> str | None:
    """Return a digest that identifies this machine across reboots, or None.

    It is the same for all users of a machine. Containers often have no machine-id, or their
    image's.

    Source: machine-id(5): hash it with a name of the application, never send it as it is.
    """
    try:
        text = path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    if not _FORM.fullmatch(text) or not int(text, 16):
        return None
    return hmac.new(bytes.fromhex(text), APPLICATION, hashlib.sha256).hexdigest()
