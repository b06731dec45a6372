"""A service on two processes is that of one, within rounding."""

import signal

import numpy as np
import pytest

from tests.serve.kills import live
from tests.serve.servers import open_client, open_process


@pytest.mark.slow
async def test_two_ranks_train_sample_save_and_load_as_one(forks, tmp_path):
    found = []
    for ranks in (1, 2):
        with open_process(forks, tmp_path / str(ranks), ranks=ranks) as server:
            async with open_client(server.url) as client:
                found.append((await live(client)).seen)
            ended = server.end(signal.SIGTERM)
            assert (ended.returncodes, ended.leftover) == ((0,) * ranks, ()), server.log.read_text()
    one, two = found
    assert one.keys() == two.keys()
    for name in one.keys() - {"samples"}:
        assert np.allclose(np.ravel(one[name]), np.ravel(two[name]), rtol=1e-4, atol=1e-4), name
    assert one["samples"] == two["samples"]  # far from a tie, the same numbers draw the same
