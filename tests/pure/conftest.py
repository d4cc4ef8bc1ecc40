"""Makes the importable modules of this folder visible to its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
