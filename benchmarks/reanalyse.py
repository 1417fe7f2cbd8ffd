"""One reanalysing process: what it refreshes in a second and per core, and the learner with and without it.

A learner, a replay service and an acting process run muzero-catch over unix:, in processes of this machine. In turn,
there is no `podrace reanalyse`, and there is one. All share the cores, so the result has the cores of each, too. Writes
results/reanalyse.json.
"""

from __future__ import annotations

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

import common

PRESET = 'muzero-catch'
DEADLINE = 180.0  # seconds to wait for anything
TICKS = os.sysconf('SC_CLK_TCK')


class Run:
  """The processes of a run. Owner: `main`, which stops them."""

  def __init__(self, folder: Path) -> None:
    self.folder, self.run_dir = folder, folder / 'run'
    self.processes: dict[str, subprocess.Popen[bytes]] = {}
    replay, parameters = f'unix:{folder}/replay', f'unix:{folder}/parameters'
    self.at = ('--connect-replay', replay)
    self.params = ('--params', parameters)
    self.start('replay', '--listen', replay)
    self.start(
      'train', PRESET, '--architecture', 'sebulba', '--lag', 'async', '--replay', 'service', *self.at,
      '--listen', parameters, '--run-dir', self.run_dir, '--total-steps', '100_000_000', '--log-every', '256',
    )  # fmt: skip
    self.start('act', PRESET, *self.at, *self.params)
    self.wait(lambda: self.last_line().get('reanalysed') is not None)

  def start(self, name: str, *args: Any) -> None:
    (self.folder / f'{name}.txt').unlink(missing_ok=True)
    self.processes[name] = common.start_podrace(self.folder / f'{name}.txt', name, *args)

  def output(self, name: str) -> str:
    return (self.folder / f'{name}.txt').read_text()

  def last_line(self) -> dict[str, Any]:
    return (common.metrics(self.run_dir) or [{}])[-1]

  def wait(self, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
      ended = {k: p.poll() for k, p in self.processes.items() if p.poll() is not None}
      if ended or time.monotonic() > end:
        text = self.output(next(iter(ended), 'train'))[-2000:]
        raise SystemExit(f'{ended or "too slow"}: {text}')
      time.sleep(0.1)

  def cpu(self) -> dict[str, float]:
    """Returns the CPU seconds of each process so far."""
    seconds = {}
    for name, process in self.processes.items():
      fields = Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()
      seconds[name] = (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


def measure(run: Run, seconds: float) -> dict[str, Any]:
  """Returns the learner's rate, the share that is reanalysed, and the cores of each process."""
  first, cpu, begun = run.last_line(), run.cpu(), time.monotonic()
  time.sleep(seconds)
  last, now, took = run.last_line(), run.cpu(), time.monotonic() - begun
  return dict(
    steps_per_s=(last['step'] - first['step']) / (last['wall_s'] - first['wall_s']),
    reanalysed=last['reanalysed'], target_age=last['target_age'],
    cores={k: round((now[k] - cpu[k]) / took, 3) for k in now}, load_1min=common.machine()['load_1min'],
  )  # fmt: skip


def measure_with(run: Run, seconds: float) -> dict[str, Any]:
  """Measures with a reanalysing process, and adds the rates that it printed when it ended."""
  run.start('reanalyse', PRESET, *run.at, *run.params)
  run.wait(lambda: 'reanalysing' in run.output('reanalyse'))
  result = measure(run, seconds)
  common.stop(run.processes.pop('reanalyse'))
  rates = re.findall(r'([\d,.]+) windows/s, ([\d,.]+) searches/s', run.output('reanalyse'))[-1]
  for name, text in zip(('windows_per_s', 'searches_per_s'), rates, strict=True):
    result[name] = float(text.replace(',', ''))
    result[f'{name}_per_core'] = result[name] / result['cores']['reanalyse']
  return result


def main() -> None:
  args = common.arguments(__doc__, pairs=3, seconds=15.0)
  pairs: list[dict[str, Any]] = []
  with tempfile.TemporaryDirectory() as folder:
    run = Run(Path(folder))
    try:
      for _ in range(args.pairs):
        pairs.append({'without': measure(run, args.seconds), 'with': measure_with(run, args.seconds)})  # fmt: skip
        print(json.dumps(pairs[-1]), flush=True)
    finally:
      for process in run.processes.values():
        common.stop(process, signal.SIGKILL)
  rates = {side: [p[side]['steps_per_s'] for p in pairs] for side in ('without', 'with')}
  without, with_one = map(statistics.median, rates.values())
  keys = [k for k in pairs[0]['with'] if k.endswith(('_s', '_core'))]
  common.record('reanalyse', dict(
    preset=PRESET, learner_steps_per_s=common.summaries(rates), with_over_without=with_one / without,
    reanalysing_process=common.columns([p['with'] for p in pairs], *keys), pairs=pairs,
  ))  # fmt: skip


if __name__ == '__main__':
  main()
