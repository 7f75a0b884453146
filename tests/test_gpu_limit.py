"""What torch may take of a GPU while models are open there, with a made-up GPU."""

import pytest
import torch

from vismoe.pools.gpu_limit import lift, limit

TOTAL = 1000
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def shares(monkeypatch):
    shares: dict[torch.device, float] = {}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, TOTAL))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.update({device: share}))
    return shares


def test_the_limit_is_what_was_there_before_and_the_budgets_of_open_models(shares):
    limit("a", FIRST, held_bytes=50, budget_bytes=300)
    assert shares == {FIRST: 0.35}
    limit("b", FIRST, held_bytes=120, budget_bytes=200)  # 70 of them are the first one's
    limit("c", SECOND, held_bytes=0, budget_bytes=5000)
    assert shares == {FIRST: 0.55, SECOND: 1.0}
    limit("a", FIRST, held_bytes=50, budget_bytes=310)  # another plan of the same model
    assert shares[FIRST] == 0.56
    lift("a")
    assert shares[FIRST] == 0.32
    lift("a"), lift("b"), lift("c")
    assert shares == {FIRST: 1.0, SECOND: 1.0}
