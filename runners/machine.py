"""Which machine this is, said so that its own identifier never leaves it."""

import hashlib
import hmac
import re
from pathlib import Path

MACHINE_ID = Path("/etc/machine-id")
APPLICATION = b"slipway host"
_FORM = re.compile(r"[0-9a-f]{32}")


def machine_id(path: Path = MACHINE_ID) -> str | None:
    """Return what identifies this machine through reboots, or None where nothing does.

    Agents of several users of one machine say the same. Containers often have no identifier, or
    their image's.

    Source: machine-id(5): hash it with a name of the application, never send it as it is.
    """
    try:
        text = path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    if not _FORM.fullmatch(text) or not int(text, 16):
        return None
    return hmac.new(bytes.fromhex(text), APPLICATION, hashlib.sha256).hexdigest()
