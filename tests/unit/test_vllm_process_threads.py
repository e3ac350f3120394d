"""A process whose main thread has ended still holds its memory."""

import subprocess
import sys
import time
from pathlib import Path

from nemo_rl_rlix.vllm.processes import end_processes, start_time

PROGRAM = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone (x86-64)
"""


def test_a_process_lives_until_its_last_thread_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 10
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        start = start_time(process.pid)
        assert start is not None
        assert not end_processes({process.pid: start}, 10)
        assert start_time(process.pid) is None
