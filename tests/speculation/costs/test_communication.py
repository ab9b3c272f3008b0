"""Sums over GPUs: published times come out, and slower links cost more."""

from __future__ import annotations

import pytest

from outpace.speculation.costs.communication import NVLINK, all_reduce_seconds

KB, MB = 1 << 10, 1 << 20


def test_small_sums_take_the_published_times_of_the_direct_kernel():
    assert all_reduce_seconds(2, 4096) == pytest.approx(8.8e-6)
    assert all_reduce_seconds(8, 32 * KB) == pytest.approx(11.8e-6)
    assert all_reduce_seconds(1, MB) == 0.0


@pytest.mark.parametrize(("megabytes", "published"), [(0.5, 23e-6), (1, 25e-6), (2, 43e-6), (3, 47e-6), (4, 53e-6)])
def test_large_sums_are_near_the_published_times_of_nccl(megabytes, published):
    """On 6 H100; the direct kernel of that size is not published, and slower from a megabyte on."""
    ring = all_reduce_seconds(6, megabytes * MB, is_nvlink=False)
    assert ring == pytest.approx(published, rel=0.2)
    assert all_reduce_seconds(6, megabytes * MB) <= ring


@pytest.mark.parametrize(("kilobytes", "published"), [(4, 19.4e-6), (32, 24.2e-6), (128, 51.8e-6), (384, 83.5e-6)])
def test_sums_over_pcie_are_near_the_published_ones(kilobytes, published):
    """On 4 V100 behind one PCIe 3.0 switch."""
    assert all_reduce_seconds(4, kilobytes * KB, 16e9, is_nvlink=False) == pytest.approx(published, rel=0.2)


def test_more_bytes_and_slower_links_take_longer():
    for gpus in (2, 3, 4, 8, 16):
        times = [all_reduce_seconds(gpus, size) for size in (32 * KB, 256 * KB, MB, 16 * MB)]
        assert times == sorted(times) and times[0] > 8e-6
        assert all_reduce_seconds(gpus, MB, NVLINK / 3) > all_reduce_seconds(gpus, MB)
        assert all_reduce_seconds(gpus, MB, 32e9, is_nvlink=False) > all_reduce_seconds(gpus, MB, NVLINK / 3)
