"""Tasks on worker processes: the run ends properly whichever process dies."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from concurrent.futures import CancelledError, Executor, Future
from unittest.mock import Mock

import pytest
from encode_support import start_encode
from support import wait_for

from pcrshard.encoding.worker_processes import run_tasks
from pcrshard.errors import EncodeError


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_run():
    """When the kernel kills a worker process, the error says how to go on."""
    with pytest.raises(EncodeError, match=r"a worker process died.*fewer workers.*--resume"):
        list(run_tasks(die, int, [0, 1], workers=2))


class LostCluster(Executor):
    """It cancels its first task when it loses its scheduler, and forgets the second."""

    def __init__(self):
        self.submitted = []

    def submit(self, *_):
        self.submitted.append(Future())
        if len(self.submitted) == 2:
            self.submitted[0].cancel()
            self.submitted[0].set_running_or_notify_cancel()
        return self.submitted[-1]


def test_a_lost_cluster_ends_the_run():
    """When a cluster is lost, the run ends, though some of its tasks never do."""
    on_stop = Mock()
    with pytest.raises(CancelledError):
        list(run_tasks(die, int, [0, 1], executor=LostCluster(), on_stop=on_stop))
    on_stop.assert_called_once()


def test_workers_die_with_their_parent(larger_folder, tmp_path):
    """A killed run leaves no worker processes behind."""
    with start_encode(larger_folder, tmp_path, "--workers", "2") as process:
        wait_for(lambda: any(tmp_path.glob("*.tar")))
        process.kill()
        process.wait()
        wait_for(lambda: not living(process.pid), seconds=3)
        assert living(process.pid) == []


def living(group):
    """The processes of a group that are no zombies."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(stat.parent.name)
    return found


def test_a_script_without_a_main_guard_is_told_so(synthetic_folder, tmp_path):
    """The trap of spawned workers is named, with what to do; worker processes import the script."""
    # So that workers are not forked:
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    call = f"pcrshard.encode({str(synthetic_folder)!r}, {str(tmp_path / 'out')!r}, workers=2)"
    script = tmp_path / "script.py"
    for guard in ("", "if __name__ == '__main__': "):
        script.write_text(f"import threading, pcrshard\n{thread}\n{guard}{call}\n")
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300
        )
        told = 'call encode only under `if __name__ == "__main__":`' in done.stderr
        assert (done.returncode == 0, told) == (bool(guard), not guard), done.stderr
        shutil.rmtree(tmp_path / "out")


def test_one_worker_is_this_process():
    """No process is started where there is nothing to share out, and none is too few."""
    assert list(run_tasks(lambda _: os.getpid(), int, [7], workers=4)) == [(7, os.getpid())]
    with pytest.raises(EncodeError, match="at least one worker, got 0"):
        list(run_tasks(abs, int, [0], workers=0))
