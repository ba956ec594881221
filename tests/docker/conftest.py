"""Puts this folder on the path, for the modules that `image` shares with the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
