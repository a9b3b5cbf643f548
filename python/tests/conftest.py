"""Every test with a ``device`` runs on CPU tensors and, where there are GPUs, on those of the ranks' GPUs."""

import pytest
from ranks import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param
