import sys
from pathlib import Path

for folder in ("train", "launch"):
    sys.path.append(str(Path(__file__).parent.parent / folder))

from elastic_hosts import hosts  # noqa: E402, F401 (a fixture)
