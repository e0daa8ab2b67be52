"""The agent's systemd unit: unprivileged, with write access only to the host's folder.

``KillMode=process`` and ``OOMPolicy=continue`` keep jobs running when the agent stops or
restarts, or the OOM killer ends one of them. Devices stay visible because jobs need the GPUs.
"""

import sys
from pathlib import Path

TEMPLATE = """\
[Unit]
Description=Slipway host agent
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
{user}ExecStart={python} -m runners work --dir {folder}
Restart=always
RestartSec=1
TimeoutStopSec=20
KillMode=process
OOMPolicy=continue
Delegate=yes
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={folder}
PrivateTmp=yes
RestrictSUIDSGID=yes
LockPersonality=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes

[Install]
WantedBy={target}
"""


def render(folder: Path, *, python: str = sys.executable, user: str | None = None) -> str:
    """Return a unit for the calling user's manager, or for the system's manager and ``user``."""
    return TEMPLATE.format(
        user=f"User={user}\n" if user else "",
        python=_quoted(python),
        folder=_quoted(str(folder)),
        target="multi-user.target" if user else "default.target",
    )


def _quoted(text: str) -> str:
    """Return a path escaped for systemd: quotes, backslashes, percent signs and spaces."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if any(character in plain for character in ' "\t') else plain
