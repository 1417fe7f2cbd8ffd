"""The state of one call of measure.py, which its modules share."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = [str(ROOT), str(ROOT / 'benchmarks'), str(ROOT / 'benchmarks' / 'gpu')]
sys.path[:0] = PATH
TINY = '--tiny' in sys.argv  # sizes that take seconds on a CPU
SECONDS, REPEATS = (0.02, 1) if TINY else (0.4, 3)
NOTES: dict[str, Any] = {}  # of the item that is measured: `ahead`, and a function that reports
