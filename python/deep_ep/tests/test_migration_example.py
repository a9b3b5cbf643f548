"""The example runs as its users would run it."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def test_migrating_under_torchrun(device: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DEEP_EP_DEVICE": "cpu"} if device == "cpu" else {}
    end = subprocess.run(
        [*command, str(EXAMPLES / "05_migrating_from_deep_ep.py")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | hidden,
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("both generations as expected") == 4
