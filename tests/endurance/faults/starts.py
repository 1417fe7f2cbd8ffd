"""Starts of `podrace train cartpole --seeds 4`, one after the other: how many end, and how long they take.

Several seeds in one program once could hang for ever after compilation: LAPACK's QR, batched over seeds, waited for
threads that it occupied itself. A start that has not ended after `--deadline` seconds counts as a hang.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / 'benchmarks'))
import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--starts', type=int, default=100)
  parser.add_argument('--deadline', type=float, default=180.0)
  args = parser.parse_args()
  seconds, hung, failed = [], 0, 0
  for i in range(args.starts):
    with tempfile.TemporaryDirectory() as folder:
      command = [sys.executable, '-m', 'podrace', 'train', 'cartpole', '--seeds', '4', '--total-steps', '20_000',
                 '--run-dir', folder]  # fmt: skip
      began = time.perf_counter()
      try:
        done = subprocess.run(command, capture_output=True, timeout=args.deadline)
        failed += done.returncode != 0
      except subprocess.TimeoutExpired:
        hung += 1
      seconds.append(time.perf_counter() - began)
      print(i + 1, f'{seconds[-1]:.1f} s', 'hung', hung, 'failed', failed, flush=True)
  common.record('starts', {
    'starts': args.starts, 'hung': hung, 'failed': failed, 'deadline_s': args.deadline,
    'seconds': {'median': statistics.median(seconds), 'max': max(seconds)},
  })  # fmt: skip


if __name__ == '__main__':
  main()
