"""Examples run as their users would run them."""

import os
import pathlib
import subprocess
import sys

import torch

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(example: str, device: str, *arguments: str, num_ranks: int = 4) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        num_ranks = min(num_ranks, torch.cuda.device_count())
    end = subprocess.run(
        [*command, str(num_ranks), str(EXAMPLES / example), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=environment,
    )
    assert end.returncode == 0, end.stderr
    return end.stdout


def run_itself(example: str, device: str, *arguments: str) -> str:
    """An example that starts its ranks."""
    end = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments, "--device", device],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert end.returncode == 0, end.stderr
    return end.stdout


def test_moe_layer(device: str) -> None:
    assert "largest difference" in run("04_moe_layer.py", device)


def test_overlapped_training(device: str) -> None:
    assert f"on {device}, overlapped differs by" in run("06_overlapped_training.py", device, num_ranks=2)


def test_micro_batches(device: str) -> None:
    found = run("07_micro_batches.py", device, "--tokens", "64", "--hidden", "64", "--repetitions", "1", num_ranks=2)
    assert f"a step on {device}" in found and "same gradients" in found


def test_decode_micro_batches(device: str) -> None:
    found = run("09_decode_micro_batches.py", device, *(["--device", "cuda"] if device == "cuda" else []), num_ranks=2)
    assert f"on {device}, each beside the other: same results" in found


def test_survive(device: str) -> None:
    found = run_itself("19_survive.py", device)
    assert "lost [1], joined []" in found and "lost [], joined [1]" in found


def test_decode_through_a_loss(device: str) -> None:
    found = run_itself("20_decode_through_a_loss.py", device)
    assert "PeerLost of rank" in found and "lost [1], joined []" in found
    assert "lost [], joined [1]" in found and "all results were right" in found
