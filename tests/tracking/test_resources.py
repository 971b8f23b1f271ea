import time

import torch

from rl4llm.tracking.resources import Resources


def test_memory_that_was_taken_shows_in_use_and_after_it_was_given_back_in_the_peak():
    resources = Resources()
    before = resources.metrics()
    block = torch.ones(50_000_000)  # 0.2 GB
    during = resources.metrics()
    del block
    after = resources.metrics()
    assert during["resources/rss_gb"] > before["resources/rss_gb"] + 0.15
    assert after["resources/rss_gb"] < during["resources/rss_gb"] - 0.15
    assert after["resources/peak_rss_gb"] >= during["resources/rss_gb"] - 0.01


def test_a_busy_process_uses_processor_time():
    resources = Resources()
    busy_until = time.process_time() + 0.1
    while time.process_time() < busy_until:
        torch.randn(100, 100) @ torch.randn(100, 100)
    assert resources.metrics()["resources/cpu_percent"] > 0
