"""The examples run as their users would run them."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def run(example: str, device: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DEEP_EP_DEVICE": "cpu"} if device == "cpu" else {}
    end = subprocess.run(
        [*command, str(EXAMPLES / example), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | hidden,
    )
    assert end.returncode == 0, end.stderr
    return end.stdout


def test_migrating_under_torchrun(device: str) -> None:
    assert run("05_migrating_from_deep_ep.py", device).count("both generations as expected") == 4


def test_deep_ep_beside_ferry(device: str) -> None:
    found = run("21_deep_ep_beside_ferry.py", device, "--device", device)
    assert found.count(f"on {device}") == 4 and found.count("the same bits in both modes") == 4
