"""One small model for all tests of the checks that compare an engine with a trainer."""

import pytest
import torch
from two_sides import Net, make_model


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Net:
    torch.set_num_threads(1)
    return Net(make_model(tmp_path_factory.mktemp("two-sides") / "model"))
