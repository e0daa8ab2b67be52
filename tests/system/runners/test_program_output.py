"""Real programs under a real supervisor: their lines, and what a flood costs."""

import shutil
import subprocess
import sys
import time

import pytest

from runners.launchers.attempts import AttemptFolder
from runners.shared.log_text import lines_of
from runners.supervision import output
from tests.runners.program_logs import HOSTILE
from tests.runners.test_log_text import shown
from tests.runners.tools import bodies, ids_of

A1, _ = ids_of(__name__)
TQDM = (
    "import time\nfrom tqdm import tqdm\n"
    "for _ in tqdm(range(3), desc='outer'):\n"
    "    for _ in tqdm(range(9), desc='inner', leave=False): time.sleep(0.05)\n"
)
RICH = (
    "import time\nfrom rich.console import Console\nfrom rich.progress import track\n"
    "console = Console(force_terminal=True, width=60)\n"
    "for _ in track(range(20), 'Training', console=console): time.sleep(0.1)\n"
    "console.print('saved to [link=file:///job/model]model[/link]')\n"
)
DOTS = (
    "import sys, time\n"
    "for n in range(30): print('.', end='', flush=True); time.sleep(0.1)\n"
    "print('BAD_INPUT: no tokenizer', file=sys.stderr, flush=True); print(' done'); sys.exit(3)\n"
)
RAISES = "größe = {'ключ': {}}\nprint(größe['ключ']['🚢'] + größe['日本'])\n"
RANKS = "import os\nif os.environ['RANK'] == '1': raise RuntimeError('rank 1 gives up')\n"
# The supervisor's own peak, which its child reads at its end.
PEAK = (
    "\nwords = open(f'/proc/{os.getppid()}/status').read().split()\n"
    "print('\\npeak KiB', words[words.index('VmHWM:') + 1])\n"
)
FLOODS = {
    "one line of 100 MB": "import os, sys\nfor _ in range(1600): sys.stdout.buffer.write(b'x' * 65536)\n",
    "a million states": (
        "import os, sys\n"
        "for n in range(10**6): sys.stdout.write(f'\\r{n:8} |{\"█\" * 9}|')\n"
        "sys.stdout.flush()\n"
    ),
    "200,000 lines a second": (
        "import os, sys, time\n"
        "for _ in range(10):\n"
        "    sys.stdout.write(''.join(f'line {n} of many\\n' for n in range(20000)))\n"
        "    sys.stdout.flush(); time.sleep(0.1)\n"
    ),
    "carriage returns alone": "import os, sys\nfor _ in range(800): sys.stdout.write('\\r' * 65536)\n",
    "sequences without end": "import os, sys\nfor _ in range(400): sys.stdout.write('\\x1b]8;;' * 9000)\n",
}  # fmt: skip


def same_lines(folder: AttemptFolder) -> list[str]:
    """Return the last lines of the exit record, which its events and its files have too."""
    last = folder.exit_record().last_lines
    for stream in ("stdout", "stderr"):
        texts = [body["text"] for body in bodies(folder, "log") if body["stream"] == stream]
        written = lines_of((folder.path / f"{stream}.log").read_bytes())
        assert shown(texts) == written, stream
        assert set(written[-10:]) <= set(last), stream
    return list(last)


def test_programs_have_the_same_lines_in_events_files_and_exit_record(attempts, tmp_path):
    source, clone = tmp_path / "source", tmp_path / "clone"
    git = shutil.which("git")
    subprocess.run([git, "init", "--quiet", source], check=True)
    for argv, code, words in [
        ([], TQDM, "outer: 100%"),
        ([], RICH, "saved to model"),
        ([], DOTS, "BAD_INPUT: no tokenizer"),
        ([], RAISES, "KeyError: '🚢'"),
        ([git, "clone", "--progress", f"file://{source}", str(clone)], "", "Cloning into"),
        ([sys.executable, "-m", "pip", "download", "--no-index", "no-such"], "", "ERROR: No "),
    ]:
        changes = {"argv": argv} if argv else {"code": code}
        name = f"says-{len(attempts.made)}-{A1}"
        lines = same_lines(attempts.run(name, env={"PATH": "/usr/bin:/bin"}, **changes))
        assert any(words in line for line in lines), (words, lines)
        assert all(line.isprintable() for line in lines), (words, lines)
    dots = attempts.made[2].exit_record()
    assert dots.reason == "bad_input"
    assert "." * 30 + " done" in dots.last_lines


def test_torchrun_names_the_rank_that_failed(attempts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    folder = attempts.run(argv=[*argv, str(script)], env={"PATH": "/usr/bin:/bin"})
    assert "rank 1 gives up" in "\n".join(same_lines(folder))
    assert folder.exit_record().rank == 1


def test_hostile_bytes_reach_neither_events_nor_the_exit_record(attempts):
    data = b"".join(log if log.endswith(b"\n") else log + b"\n" for log, _ in HOSTILE.values())
    folder = attempts.run(code=f"import sys\nsys.stdout.buffer.write({data!r})")
    assert same_lines(folder) == lines_of(data)[-output.LAST_LINES :]
    assert (folder.path / "stdout.log").read_bytes() == data


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_neither_stops_the_program_nor_grows_its_supervisor(name, attempts):
    began = time.monotonic()
    folder = attempts.run(code=FLOODS[name] + PEAK)
    seconds = time.monotonic() - began
    ended = folder.exit_record()
    assert ended.exit_code == 0
    assert seconds < 60
    assert int(ended.last_lines[-1].removeprefix("peak KiB ")) < 48 * 1024
    sent = sum(len(body["text"]) for body in bodies(folder, "log"))
    assert sent <= (seconds + 2) * 2 * output.EVENT_BYTES_PER_SECOND
    if name == "one line of 100 MB":
        assert ended.last_lines[0].startswith(output.CUT_BEGINNING.decode())
        assert ended.dropped_log_bytes > 95 * 10**6
        assert any(body["text"].endswith(output.CUT_HERE) for body in bodies(folder, "log"))
    if name == "a million states":
        assert ended.dropped_log_bytes == 0
        assert ended.last_lines[0] == f"  999999 |{'█' * 9}|"
    kept = sum(path.stat().st_size for path in folder.path.glob("stdout*.log"))
    assert kept <= 12.2 * 2**20
