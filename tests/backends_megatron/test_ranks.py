"""The runner itself: a rank that fails, or gives no answer, is reported."""

from __future__ import annotations

import jobs
import pytest
import ranks


def test_failures_and_silence_are_reported():
    pool = ranks.Pool()
    try:
        with pytest.raises(ranks.RankFailed, match="rank 0"):
            pool.run(1, jobs.vocab_parallel, "warm")
        assert pool.run(1, jobs.vocab_parallel, 1.0)[0]["untouched"]
        with pytest.raises(TimeoutError, match=r"rank 0 of 1 gave no answer in 0\.3 s"):
            pool.run(1, jobs.silent, timeout=0.3)
    finally:
        pool.close()
