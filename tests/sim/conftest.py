"""For tests whose ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def ranks_share_a_process() -> Iterator[None]:
    """One thread for each rank's arithmetic: the ranks are threads themselves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
