"""Small programs that stand as jobs, and what tests ask of an attempt that runs one."""

from runners.supervision import child

SAY = "import json, os\ndef say(_kind, **body): os.write(int(os.environ['SLIPWAY_EVENT_FD']), (json.dumps({'kind': _kind, 'body': body}) + '\\n').encode())\n"
FOREVER = "import time\nwhile True: time.sleep(0.05)\n"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)\n"
# A grandchild that leaves session, group and parent, and does not listen to SIGTERM.
DAEMON = (
    "import os, signal, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    time.sleep(120); os._exit(0)\n"
    "os.wait()\n"
    "print('ready', flush=True)\n"
)


def stop(folder, reason="stopped_by_user", grace_seconds=0.3):
    child.write_json(folder.path / child.STOP, {"reason": reason, "grace_seconds": grace_seconds})


def is_ready(folder):
    return "ready" in (folder.path / "stdout.log").read_text()
