"""Every test with a ``device`` runs on CPU tensors and, where there are GPUs, on those of the ranks' GPUs."""

import pathlib
import sys

import pytest
import torch

# Ranks as forked processes and inputs of all of them: shared with the tests of ferry.
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests"))

# By NVML: what starts CUDA here would keep the forked ranks from using it.
DEVICES = ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param
