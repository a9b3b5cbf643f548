"""The ranks of a group as processes, started as torchrun starts them."""

import contextlib
import secrets
import subprocess
import tempfile
from pathlib import Path

from hosts import poll_until


class RankProcesses:
    """One program as `num_ranks` processes, equally many on each host. They are killed when the block is left."""

    def __init__(self, hosts, num_ranks, arguments, environment):
        self.hosts = hosts
        self.num_ranks = num_ranks
        self.arguments = [str(argument) for argument in arguments]
        self.environment = environment
        self.processes = []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            # Files can be read while the ranks run, and unlike pipes never block a rank.
            self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ferry-ranks-")))
            stack.callback(self._kill)
            self._start()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._cleanup.close()

    def wait(self, timeout_s, until_failure=False):
        """Exit codes once all ranks have ended or the time is over; with `until_failure`, also once a rank has failed.
        None stands for a rank that is still running."""

        def is_over():
            codes = [process.poll() for process in self.processes]
            return None not in codes or (until_failure and any(codes))

        poll_until(timeout_s, is_over)
        return [process.poll() for process in self.processes]

    def kill(self, rank):
        self.processes[rank].kill()
        self.processes[rank].wait()

    def stdout(self, rank):
        return self._file("out", rank).read_text(errors="replace")

    def stderr(self, rank):
        return self._file("err", rank).read_text(errors="replace")

    def _file(self, name, rank):
        return self._directory / f"{name}.{rank}"

    def _start(self):
        ranks_per_host = self.num_ranks // self.hosts.num_hosts
        common = {
            "MASTER_ADDR": self.hosts.address(0),
            "MASTER_PORT": str(self.hosts.free_port()),
            "FERRY_SECRET": secrets.token_hex(32),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            **self.environment,
        }
        for rank in range(self.num_ranks):
            host_idx, local_rank = divmod(rank, ranks_per_host)
            with self._file("out", rank).open("wb") as out, self._file("err", rank).open("wb") as err:
                process = subprocess.Popen(
                    self.hosts.command(host_idx, self.arguments),
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            self.processes.append(process)

    def _kill(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
