import sys
from pathlib import Path

for folder in ("train", "launch"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
