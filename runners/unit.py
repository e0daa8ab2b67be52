"""The systemd unit of the agent: unprivileged, unable to write but in its own folder.

``KillMode=process`` and ``OOMPolicy=continue`` keep jobs alive when the agent is stopped,
restarted or the kernel ends one of them. Devices stay visible: the GPUs are among them.
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
    """Return the unit: of the calling user's own manager, or of the system's for ``user``."""
    return TEMPLATE.format(
        user=f"User={user}\n" if user else "",
        python=_quoted(python),
        folder=_quoted(str(folder)),
        target="multi-user.target" if user else "default.target",
    )


def _quoted(text: str) -> str:
    """Return a path as systemd reads it: its percent signs and spaces mean themselves."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if any(character in plain for character in ' "\t') else plain
