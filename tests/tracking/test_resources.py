import time

import torch

from rl4llm.tracking.resources import Resources


def test_freed_memory_still_shows_in_the_peak():
    resources = Resources()
    before = resources.metrics()
    block = torch.ones(50_000_000)  # 0.2 GB
    during = resources.metrics()
    del block
    after = resources.metrics()
    assert during["resources/rss_gb"] > before["resources/rss_gb"] + 0.15
    assert after["resources/rss_gb"] < during["resources/rss_gb"] - 0.15
    assert after["resources/peak_rss_gb"] >= during["resources/rss_gb"] - 0.01


def test_a_phases_peak_includes_memory_that_it_freed():
    resources = Resources()
    resources.peak_gb()
    before = resources.metrics()["resources/rss_gb"]
    del (block := [torch.ones(50_000_000)])[:]  # 0.2 GB
    assert not block
    assert resources.peak_gb() > before + 0.15
    assert resources.peak_gb() < before + 0.05
    assert resources.metrics()["resources/peak_rss_gb"] > before + 0.15


def test_where_no_mark_can_be_lowered_it_is_what_is_resident(monkeypatch, tmp_path):
    monkeypatch.setattr("rl4llm.tracking.resources.CLEAR", tmp_path / "absent" / "clear_refs")
    resources = Resources()
    assert abs(resources.peak_gb() - resources.metrics()["resources/rss_gb"]) < 0.05


def test_a_busy_process_uses_processor_time():
    resources = Resources()
    busy_until = time.process_time() + 0.1
    while time.process_time() < busy_until:
        torch.randn(100, 100) @ torch.randn(100, 100)
    assert resources.metrics()["resources/cpu_percent"] > 0
