"""A rank process of the programs that stop, kill and delay ranks."""

import contextlib
import queue
import subprocess
import tempfile
import threading
import time


class RankProcess:
    """A running rank; its events arrive in the order in which it printed them.

    read_event: makes an event of a line.
    """

    def __init__(self, command, environment, descriptors, read_event):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=environment,
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._read_event = read_event
        self._events = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._events.put(self._read_event(line.rstrip("\n")))
        self._events.put(None)

    def next_event(self, until):
        """Next event, or None if the process has ended or the time is over."""
        try:
            return self._events.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None

    def order(self, text):
        with contextlib.suppress(BrokenPipeError):  # the exit code shows that the process has ended
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def end(self, limit_s):
        """Exit code (negative: the signal), or None if the process had to be killed."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self):
        self.process.kill()
        self.process.wait()

    def standard_error(self):
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self):
        if self.process.poll() is None:
            self.kill()
        self._reader.join()
        self.process.stdout.close()
        self._errors.close()
