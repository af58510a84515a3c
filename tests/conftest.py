"""GPU tests run where there is a GPU, slow ones when asked for."""

import pytest
import torch


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # workers share the cores already
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    chosen = config.option.markexpr
    dropped = []
    for item in items:
        without_gpu = "gpu" in item.keywords and not torch.cuda.is_available()
        unasked = "slow" in item.keywords and "slow" not in chosen
        if without_gpu or unasked:
            dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
