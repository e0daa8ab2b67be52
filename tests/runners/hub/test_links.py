"""How fast files came to a host, what that says of the next ones, and the bandwidth it allows."""

import errno
import heapq
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from planner.specs.units import MIB
from runners.hub import links
from runners.hub.download import download
from runners.hub.errors import DownloadStoppedError
from runners.hub.links import Bandwidth, LinkRate, measured_rates, note_transfer, of_host
from runners.hub.selection import needed_files
from runners.hub.settings import HubSettings
from runners.shared.config import HostConfigError

MB = 10**6


def noted(host_dir: Path, rates: list[float], address: str = "https://huggingface.co") -> LinkRate:
    for rate in rates:
        note_transfer(HubSettings(endpoint=address, host_dir=host_dir), 100 * MB, 100 * MB / rate)
    return measured_rates(host_dir)["hub"]


def test_the_newest_transfers_of_a_source_say_a_median_and_their_middle(tmp_path):
    few = noted(tmp_path, [40e6, 60e6, 20e6])
    assert [few.median, few.low, few.high] == pytest.approx([40e6, 20e6, 60e6], rel=1e-3)
    assert few.words(24e9) == (
        "about 10 min (7 to 20 min) at the 40 MB/s of this host's last 3 transfers from "
        "huggingface.co"
    )
    many = noted(tmp_path, [each * 1e6 for each in range(10, 31)])  # the eldest is forgotten
    assert many.num_transfers == links.KEPT
    assert [many.median, many.low, many.high] == pytest.approx([20.5e6, 12e6, 29e6], rel=1e-3)

    moved = noted(tmp_path, [5e6], "https://mirror.lan")  # another source says nothing of this
    assert (moved.num_transfers, moved.address) == (1, "mirror.lan")
    assert moved.words(1e9).endswith("this host's last transfer from mirror.lan")


def test_what_says_nothing_of_the_link_is_not_kept_and_a_damaged_file_is_none(tmp_path):
    settings = HubSettings(host_dir=tmp_path)
    for num_bytes, seconds in ((links.LEAST_BYTES - 1, 1.0), (100 * MB, 0.0)):
        note_transfer(settings, num_bytes, seconds)
    note_transfer(replace(settings, host_dir=None), 100 * MB, 1.0)
    note_transfer(replace(settings, host_dir=tmp_path / "none"), 100 * MB, 1.0)
    assert measured_rates(tmp_path) == {}
    for text in ("{", "[]", '{"hub": {"address": "a", "transfers": [[1, 0]]}}', '{"hub": 1}'):
        (tmp_path / links.LINKS_FILE).write_text(text)
        assert measured_rates(tmp_path) == {}, text
    noted(tmp_path, [1e6])


def test_a_download_notes_its_rate_also_if_it_is_stopped(
    hub, settings, looked_up, tmp_path, monkeypatch
):
    monkeypatch.setattr(links, "LEAST_BYTES", 2**20)
    hub.bytes_per_second = 8e6
    listing = looked_up()
    files = needed_files(listing, "safetensors")
    noting = replace(settings, host_dir=tmp_path)
    with pytest.raises(DownloadStoppedError):
        download(listing, files, noting, should_stop=lambda: hub.large_sent > 2 * 2**20)
    download(listing, files, noting)
    rate = measured_rates(tmp_path)["hub"]
    assert rate.num_transfers in {1, 2}  # the rest may be too short
    assert f"127.0.0.1:{hub.port}" == rate.address
    stored = json.loads((tmp_path / links.LINKS_FILE).read_text())["hub"]["transfers"]
    assert all(links.LEAST_BYTES <= size <= 3 * 2**20 + 5 for size, _ in stored)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(links.time, "time", lambda: now[0])
    return now


def test_all_processes_of_a_host_share_what_it_allows(tmp_path, clock):
    (tmp_path / "config.json").write_text(json.dumps({"max_transfer_bytes_per_second": MB}))
    settings = of_host(HubSettings(), tmp_path)
    ones, others = Bandwidth(settings), Bandwidth(settings)  # as two processes have them
    taken = [list(each.delays(size)) for each, size in ((ones, MB), (others, 2 * MB), (ones, MB))]
    assert taken == [[1.0], [2.0, 3.0], [4.0]]
    clock[0] += 10.0
    assert list(others.delays(MB // 2)) == [0.5]  # time that nobody used is lost
    clock[0] -= 5000.0  # somebody set the clock back
    assert list(ones.delays(MB)) == [1.0]
    with ThreadPoolExecutor(4) as pool:
        delays = sorted(pool.map(lambda _: next(Bandwidth(settings).delays(MB)), range(8)))
    assert delays == [float(each) for each in range(2, 10)]
    assert list(Bandwidth(replace(settings, max_bytes_per_second=0.0)).delays(MB)) == []


def test_large_parts_at_a_low_limit_keep_it_and_let_others_pass_between(tmp_path, clock):
    settings = HubSettings(host_dir=tmp_path, max_bytes_per_second=64 * 1024)
    sizes = [8 * MIB] * 6 + [64 * 1024]
    waiters = [Bandwidth(settings).delays(size) for size in sizes]
    due, ended = [(clock[0], number) for number in range(len(sizes))], {}
    while due:
        clock[0], number = heapq.heappop(due)
        seconds = next(waiters[number], None)
        if seconds is None:
            ended[number] = clock[0] - 1000.0
        else:
            heapq.heappush(due, (clock[0] + seconds, number))
    assert ended[6] == pytest.approx(7.0)
    assert max(ended.values()) == pytest.approx(sum(sizes) / (64 * 1024))


def test_a_limit_that_cannot_be_shared_holds_for_the_process_and_is_logged_once(
    tmp_path, clock, monkeypatch, caplog
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    no_lock = OSError(errno.ENOLCK, "No locks available")
    for host_dir, patched in (
        (tmp_path / "none", {}),
        (tmp_path, {"os.pwrite": full}),
        (tmp_path, {"fcntl.flock": lambda *_: (_ for _ in ()).throw(no_lock)}),
    ):
        caplog.clear()
        with monkeypatch.context() as patch:
            for name, function in patched.items():
                patch.setattr(name, function)
            limit = Bandwidth(HubSettings(host_dir=host_dir, max_bytes_per_second=float(MB)))
            assert list(limit.delays(2 * MB)) == [1.0, 2.0], host_dir
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        assert str(host_dir / links.LIMIT_FILE) in caplog.text


def test_no_stated_rate_is_higher_than_what_the_host_allows(tmp_path):
    noted(tmp_path, [40e6, 60e6])
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"max_transfer_bytes_per_second": 10 * MB}))
    assert measured_rates(tmp_path)["hub"].words(3e9) == (
        "about 5 min at the 10 MB/s that this host allows"
    )
    config.write_text(json.dumps({"max_transfer_bytes_per_second": 100}))
    with pytest.raises(HostConfigError, match="max_transfer_bytes_per_second"):
        of_host(HubSettings(), tmp_path)
