"""One reanalysing process: what it refreshes in a second and per core, and what the learner has with and without it.

    .venv/bin/python benchmarks/reanalyse.py [--pairs 3] [--seconds 15]

A learner, a replay service and an acting process run muzero-catch over unix:, in processes of this machine. In turn, there is no
`podrace reanalyse`, and there is one. All share the cores, so the CPU seconds of each are told, too. Writes
results/reanalyse.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acting import start
from common import machine, record, summary

PRESET = 'muzero-catch'
DEADLINE = 180.0  # seconds for all that is waited for
TICKS = os.sysconf('SC_CLK_TCK')


class Run:
  """The processes of a run."""

  def __init__(self, folder: Path) -> None:
    self.folder, self.run_dir = folder, folder / 'run'
    self.replay, self.parameters = f'unix:{folder}/replay', f'unix:{folder}/parameters'
    self.processes: dict[str, subprocess.Popen[bytes]] = {}
    at = ['--connect-replay', self.replay]
    self.start('replay', '--listen', self.replay)
    self.start(
      'train', PRESET, '--architecture', 'sebulba', '--lag', 'async', '--replay', 'service', *at,
      '--listen', self.parameters, '--run-dir', str(self.run_dir), '--total-steps', '100_000_000',
      '--log-every', '256',
    )  # fmt: skip
    self.start('act', PRESET, *at, '--params', self.parameters)

  def start(self, name: str, *args: str) -> None:
    self.processes[name] = start(self.folder / f'{name}.txt', name, *args)

  def start_reanalysing(self) -> None:
    at = ['--connect-replay', self.replay, '--params', self.parameters]
    self.start('reanalyse', PRESET, *at)
    self.wait(lambda: 'reanalysing' in self.output('reanalyse'))

  def output(self, name: str) -> str:
    return (self.folder / f'{name}.txt').read_text()

  def lines(self) -> list[dict[str, Any]]:
    path = self.run_dir / 'metrics.jsonl'
    told = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in told if line.endswith('\n')]

  def wait(self, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
      ended = {k: p.poll() for k, p in self.processes.items() if p.poll() is not None}
      if ended or time.monotonic() > end:
        raise SystemExit(
          f'{ended or "too slow"}: {self.output(next(iter(ended), "train"))[-2000:]}'
        )
      time.sleep(0.1)

  def stop(self, name: str, signum: int = signal.SIGTERM) -> None:
    process = self.processes.pop(name)
    process.send_signal(signum)
    process.wait(DEADLINE)

  def cpu(self) -> dict[str, float]:
    """CPU seconds of each process so far."""
    found = {}
    for name, process in self.processes.items():
      fields = Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()
      found[name] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


def measure(run: Run, seconds: float) -> dict[str, Any]:
  """The learner's rate over some seconds, the share that is reanalysed, and cores that each process had."""
  first, cpu, begun = run.lines()[-1], run.cpu(), time.monotonic()
  time.sleep(seconds)
  last, now, took = run.lines()[-1], run.cpu(), time.monotonic() - begun
  return dict(
    steps_per_s=(last['step'] - first['step']) / (last['wall_s'] - first['wall_s']),
    reanalysed=last['reanalysed'],
    target_age=last['target_age'],
    cores={k: round((now[k] - cpu[k]) / took, 3) for k in now},
    load_1min=machine()['load_1min'],
  )


def with_one(run: Run, seconds: float) -> dict[str, Any]:
  """`measure` with a reanalysing process, and what that said of itself when it ended."""
  run.start_reanalysing()
  found = measure(run, seconds)
  run.stop('reanalyse')
  told = re.findall(r'([\d,.]+) windows/s, ([\d,.]+) searches/s', run.output('reanalyse'))[-1]
  windows, searches = (float(x.replace(',', '')) for x in told)
  cores = found['cores']['reanalyse']
  return found | dict(
    windows_per_s=windows,
    searches_per_s=searches,
    windows_per_s_per_core=windows / cores,
    searches_per_s_per_core=searches / cores,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pairs', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=15.0)
  args = parser.parse_args()
  pairs: list[dict[str, Any]] = []
  with tempfile.TemporaryDirectory() as folder:
    run = Run(Path(folder))
    try:
      run.wait(lambda: (run.lines() or [{}])[-1].get('reanalysed') is not None)
      for _ in range(args.pairs):
        pairs.append({'without': measure(run, args.seconds), 'with': with_one(run, args.seconds)})
        print(json.dumps(pairs[-1]), flush=True)
    finally:
      for name in list(run.processes):
        run.stop(name, signal.SIGKILL)
  rates = {side: [p[side]['steps_per_s'] for p in pairs] for side in ('without', 'with')}
  of_one = {
    k: summary([p['with'][k] for p in pairs])
    for k in pairs[0]['with']
    if k.endswith(('_s', '_core'))
  }
  middle = {side: statistics.median(x) for side, x in rates.items()}
  record('reanalyse', dict(
    preset=PRESET,
    learner_steps_per_s={side: summary(x) for side, x in rates.items()},
    with_over_without=middle['with'] / middle['without'],
    reanalysing_process=of_one,
    pairs=pairs,
  ))  # fmt: skip


if __name__ == '__main__':
  main()
