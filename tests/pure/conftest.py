"""Makes the importable modules of this folder (`shadow_executor`, `world`) visible to its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
