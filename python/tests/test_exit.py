"""The end of a program while another thread of it still waits in a call."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, socket, threading, time
from ferry import _native

class Last:
    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)

    def __del__(self, sleep=time.sleep):
        self.listener.accept()[0].recv(1)
        sleep(0.2)  # the thread asks for the GIL

last = Last()
os.environ["FERRY_PORT"] = str(last.listener.getsockname()[1])
threading.Thread(target=_native.environment_bootstrap, args=(1_000_000_000,), daemon=True).start()
last.listener.accept()[0].recv(1)
"""


def test_thread_that_leaves_a_call_while_python_shuts_down() -> None:
    """Rank 0 never answers: the call tries twice. The main thread ends while it tries for the second time, and the last
    object of the program lives until the call is over."""
    environment = {**os.environ, "FERRY_RANK": "1", "FERRY_NUM_RANKS": "2", "FERRY_HOST": "127.0.0.1"}
    environment["FERRY_SECRET"] = "of this test"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, timeout=60, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
