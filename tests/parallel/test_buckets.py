"""Replicas sum their gradients in buckets, during backward."""

import bucket_parts
import pytest
from bucket_parts import SIZES, WITHOUT

pytestmark = pytest.mark.xdist_group("ranks")


def test_buckets_are_summed_in_one_order_on_all_ranks(runner):
    for rank, (gradients, sizes, early) in enumerate(runner.pool.call(bucket_parts.sum_in_buckets, 2)):
        expected = [[2.0 * index + 11] * size for index, size in enumerate(SIZES)]
        expected[WITHOUT] = False
        assert gradients == expected
        # From the last parameter: 7 + 5; nothing for the one without a gradient; 30, more than a bucket; 3 + 4.
        assert sizes == [12, 30, 7] * 2
        # The first bucket begins with its last gradient. The second waits for a gradient that does not come.
        assert early == [1, 4], rank
