"""Examples run as their users would run them."""

import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_moe_layer_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    end = subprocess.run(
        [*command, str(EXAMPLES / "04_moe_layer.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert end.returncode == 0, end.stderr
    assert "losses on 4 ranks" in end.stdout
