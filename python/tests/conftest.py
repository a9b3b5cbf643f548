"""Every test with a ``device`` runs on CPU tensors and, where there are GPUs, on those of the ranks' GPUs."""

import pytest
from ranks import DEVICES, run_last_what_starts_cuda


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    run_last_what_starts_cuda(items)
