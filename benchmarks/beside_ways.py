"""The rank processes of one way of benchmarks/beside.py: started when first needed, told one case at a time."""

import json
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Pipe, wait
from pathlib import Path

RANK = Path(__file__).resolve().parent / "python/beside_rank.py"
TITLES = {
    "ferry": "ferry",
    "deep_ep": "Ferry's deep_ep",
    "original": "DeepEP",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather, reduce-scatter",
}
_START_S = 180  # torch and CUDA load from cold disks, and DeepEP sets up NVSHMEM
_END_S = 3  # for ranks to end by themselves
_TAIL_LINES = 3
_MOST_FAILURES = 2  # of a way in one measure: a start takes seconds, and a hang the limit of a measurement


class Absent(Exception):
    """Why a way does not have what was asked for."""


class Failed(Exception):
    """Why a way could not measure."""


class Way:
    """All ranks of one way. Ranks that failed are replaced for the next case."""

    def __init__(self, name, options):
        self.name = name
        self.versions = None
        self._options = options
        self._ranks = []  # (process, pipe)
        self._failures = {}  # texts by measure
        self._unusable = None  # an Absent or Failed of the start, which will not change
        self._folder = tempfile.TemporaryDirectory(prefix="beside-")

    def measure(self, case):
        """The answers of all ranks. Raises Absent or Failed."""
        if self._unusable is not None:
            raise self._unusable
        failures = self._failures.setdefault(case["measure"], [])
        if len(failures) >= _MOST_FAILURES:
            raise Failed(failures[-1])
        try:
            if not self._ranks:
                self._start()
            for _, pipe in self._ranks:
                pipe.send(case)
            return self._answers(self._options.limit_s)
        except (Failed, BrokenPipeError) as error:
            text = str(error) if isinstance(error, Failed) else self._tail()
            self._stop()
            failures.append(text)
            raise Failed(text) from error

    def _start(self):
        environment = dict(os.environ)
        if self._options.device == "cuda":
            environment["CUDA_MODULE_LOADING"] = "EAGER"  # a kernel that loads late may wait for one that waits
        if self.name == "original":
            if self._options.original:
                paths = [str(self._options.original.resolve()), environment.get("PYTHONPATH", "")]
                environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
            if self._options.nccl_differs:
                environment["EP_SUPPRESS_NCCL_CHECK"] = "1"
        # A file store serves one process group only.
        handle, store = tempfile.mkstemp(dir=self._folder.name)
        os.close(handle)
        os.unlink(store)
        with open(self._log(), "w") as log:
            for rank in range(self._options.ranks):
                mine, theirs = Pipe()
                settings = {**self._settings(), "rank": rank, "store": store, "pipe": theirs.fileno()}
                process = subprocess.Popen(
                    [sys.executable, str(RANK), json.dumps(settings)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
                theirs.close()
                self._ranks.append((process, mine))
        try:
            self.versions = self._answers(_START_S)[0]["ready"]
        except (Absent, Failed) as error:
            self._unusable = error
            self._stop()
            raise

    def _settings(self):
        names = (
            *("ranks", "device", "hidden", "topk", "experts", "latency_tokens"),
            *("iterations", "warm_up", "order", "original_sms", "nccl_differs"),
        )
        return {"way": self.name, "ranks_per_node": 0, **{name: getattr(self._options, name) for name in names}}

    def _answers(self, limit_s):
        end_s = time.monotonic() + limit_s
        answers = {}
        while len(answers) < len(self._ranks):
            missing = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(missing), max(0, end_s - time.monotonic()))
            if not ready:
                raise Failed(f"no answer of rank {min(missing.values())} within {limit_s} s; {self._tail()}")
            for pipe in ready:
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise Failed(f"rank {missing[pipe]} ended; {self._tail()}") from None
                if "failed" in answer:
                    raise Failed(f"rank {missing[pipe]}: {answer['failed']}")
                answers[missing[pipe]] = answer
        for answer in answers.values():
            if "absent" in answer:
                raise Absent(answer["absent"])
        return [answers[rank] for rank in range(len(answers))]

    def _log(self):
        return os.path.join(self._folder.name, "output.txt")

    def _tail(self):
        """The last lines that the ranks printed."""
        lines = Path(self._log()).read_text(errors="replace").split("\n")
        return " / ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:]) or "no output"

    def _stop(self):
        """Kills the ranks: those of a failed way may wait for each other."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.wait()
        self._ranks = []

    def close(self):
        """Ends the ranks, which are idle or else killed, and removes what they have written."""
        for _, pipe in self._ranks:
            pipe.close()
        end_s = time.monotonic() + _END_S
        for process, _ in self._ranks:
            try:
                process.wait(timeout=max(0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ranks = []
        self._folder.cleanup()
