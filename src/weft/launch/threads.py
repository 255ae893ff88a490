"""Wait policy of OpenMP threads; set before torch loads, because the runtime reads it once."""

from __future__ import annotations

import os


def wait_briefly() -> None:
    """Has waiting threads spin for some ten microseconds and then sleep, unless OMP_WAIT_POLICY is set.

    Spinning without end, libgomp's default, is fastest on an idle machine and eight times slower beside one busy
    process. Sleeping at once costs a sixth of the speed on an idle machine. This policy is within 2% of the first and
    10 to 40% of the second (14M parameters, bf16, 4 cores).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
