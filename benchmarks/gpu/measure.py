"""Measure podrace on one GPU within a given time, the most valuable items first.

    python benchmarks/gpu/measure.py [GROUP ...] [--budget SECONDS] [--ahead SECONDS] [--tiny]
    python benchmarks/gpu/measure.py --merge FOLDER

First the smoke tests run and programs are compiled, several at once (`--ahead`). Then the groups are measured one after
the other, each in a process and a time limit of its own. results.json is written after each item, in $OUT and in
--state, from which a second call continues. An item that fails, hangs or crashes leaves the other items alone.

`--merge` puts results.json of FOLDER into benchmarks/results/gpu.json, with the card of each result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from child import measure_group
from groups import OTHERS, groups
from report import about, brief, merge, now
from session import PATH, ROOT, TINY


class Measuring:
  """One call: its time, its results, and where they go."""

  def __init__(self, budget: float, state: pathlib.Path, out: pathlib.Path) -> None:
    self.began, self.budget, self.state, self.out = time.monotonic(), budget, state, out
    for folder in (state, out):
      folder.mkdir(parents=True, exist_ok=True)
    path = state / 'results.json'
    known = json.loads(path.read_text()) if path.exists() else {}
    self.results: dict[str, Any] = known.get('results', {})
    self.timeline: list[Any] = known.get('timeline', [])
    self.compiled = {k: v for x in self.timeline for k, v in x.get('ahead', {}).items()}
    self.about = about()
    self.environ = dict(
      os.environ,
      PYTHONPATH=os.pathsep.join([*PATH, os.environ.get('PYTHONPATH', '')]),
      PYTHONUNBUFFERED='1',
      GPU_STATE=str(state),
      BENCHMARK_COMMIT=self.about['commit'],
      JAX_COMPILATION_CACHE_DIR=str(state / 'programs'),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
      JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
      XLA_PYTHON_CLIENT_PREALLOCATE='false',  # several processes share the card
      TF_CPP_MIN_LOG_LEVEL='1',
    )

  @property
  def left(self) -> float:
    return self.budget - (time.monotonic() - self.began)

  def save(self) -> None:
    document = dict(self.about, timeline=self.timeline, results=self.results)
    for folder in {self.state, self.out}:
      (folder / 'results.json.new').write_text(json.dumps(document, indent=1) + '\n')
      (folder / 'results.json.new').replace(folder / 'results.json')

  def log(self, text: str) -> None:
    print(f'[{time.monotonic() - self.began:5.0f} s] {text}', flush=True)

  def log_item(self, item: str) -> None:
    self.log(f'{item}: {json.dumps(brief(self.results[item]), default=str)}')

  def launch(
    self, name: str, only: tuple[str, ...], limit: float, ahead: bool = False, trace: bool = True
  ) -> tuple[subprocess.Popen[bytes], pathlib.Path]:
    """Starts a process that measures items of a group; returns it and the file of its lines."""
    flags = f'{os.environ.get("XLA_FLAGS", "")} {groups()[name].flags}'.strip()
    environ = self.environ | ({'XLA_FLAGS': flags} if flags else {})
    path = pathlib.Path(tempfile.mkstemp(prefix='lines-', dir=self.state)[1])
    command = [sys.executable, __file__, *only, '--child', name, '--lines', str(path)]
    command += ['--budget', str(limit)]
    command += ['--tiny'] * TINY + ['--as-ahead'] * ahead + ['--no-trace'] * (not trace)
    log = (self.out / 'log.txt').open('a')
    print(f'--- {name} {only} {"ahead" if ahead else ""}', file=log, flush=True)
    process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log, stderr=log, process_group=0)  # fmt: skip
    return process, path

  def end(self, process: Any, path: pathlib.Path) -> tuple[int | None, dict[str, Any]]:
    """Ends a process; returns its exit code, None if it still ran, and the figures of its items."""
    code = process.poll()
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    results: dict[str, Any] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
      if line.endswith('\n'):
        results |= json.loads(line)
    return code, results

  def compile_ahead(self, names: list[str], seconds: float) -> None:
    """Runs the smoke tests, and compiles programs, all at once."""
    began, running, compiled = time.monotonic(), {}, {}
    waiting = [
      (n, i) for n in names if groups()[n].ahead for i in groups()[n].items if i not in self.results
    ]
    tasks = len(waiting)
    if 'smoke' in names and 'smoke' not in self.results:
      running['smoke'] = (*self.launch('smoke', (), seconds), seconds + 60)
    at_once = 2 if TINY else max(2, (os.cpu_count() or 4) - 2)
    while running or waiting:
      late = time.monotonic() > began + seconds
      while waiting and len(running) < at_once and not late:
        name, item = waiting.pop(0)
        running[item] = (*self.launch(name, (item,), seconds, ahead=True), seconds)
      waiting = [] if late else waiting
      for item, (process, path, limit) in list(running.items()):
        took = time.monotonic() - began
        if process.poll() is None and took < limit and self.left > 5:
          continue
        code, results = self.end(process, path)
        result = results.get(item, {})
        if item == 'smoke':
          self.results[item] = result or dict(error=f'exit code {code}, or not in {limit:.0f} s')
          self.log_item(item)
        else:
          kept = {k: v for k, v in result.items() if k in ('compile_s', 'error')}
          compiled[item] = dict(until_s=round(took, 1), exit=code, **kept)
        del running[item]
        self.save()
      time.sleep(0.2)
    self.compiled |= compiled
    took = round(time.monotonic() - began, 1)
    self.timeline.append(dict(ahead=compiled, at_once=at_once, took_s=took))
    good = sum(x['exit'] == 0 for x in compiled.values())
    self.log(f'compiled {good} of {tasks}, {at_once} at once')
    self.save()

  def measure(self, name: str, trace: bool = True) -> None:
    """Measures the items of a group that have no result; Pong goes on."""
    group = groups()[name]
    missing = tuple(
      i for i in group.items if name == 'pong' or 'error' in self.results.get(i, {'error': ''})
    )
    limit = min(group.limit * (15 if TINY else 1), self.left - 4)  # a CPU may be busy
    if missing and limit < 12:
      self.log(f'{name}: no time left')
    if not missing or limit < 12:
      return
    began = time.monotonic()
    process, path = self.launch(name, missing, limit, trace=trace)
    while process.poll() is None and time.monotonic() < began + limit:
      time.sleep(0.1)
    code, results = self.end(process, path)
    for item in missing:
      if result := results.get(item):
        ahead = self.compiled.get(item, {})
        if ahead.get('compile_s') and 'compile_s' in result:  # the programs came from the cache
          result = result | dict(compile_s=ahead['compile_s'], load_s=result['compile_s'])
        self.results[item] = result | dict(flags=group.flags, date=now())
      elif item not in self.results:
        error = 'not within its time' if code is None else f'exit code {code}'
        self.results[item] = dict(error=error)
      self.log_item(item)
    self.timeline.append({name: round(time.monotonic() - began, 1)})
    self.save()
    lost = [i for i in missing if i not in results]
    if lost and code not in (None, 0) and trace:  # a crash, perhaps of the profiler
      for item in lost:
        self.results.pop(item, None)
      self.measure(name, trace=False)


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  first = f'of {list(groups())}; none: all but {", ".join(OTHERS)}, in this order'
  out = os.environ.get('OUT') or '/tmp/podrace-gpu-out'
  parser.add_argument('groups', nargs='*', help=first)
  parser.add_argument('--budget', type=float, default=540.0, help='seconds for all')
  parser.add_argument('--ahead', type=float, default=150.0, help='of these, for the smoke tests and compiling; 0: neither')  # fmt: skip
  parser.add_argument('--tiny', action='store_true', help='tiny sizes, on a CPU')
  parser.add_argument('--state', type=pathlib.Path, default=pathlib.Path('/tmp/podrace-gpu'))
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path(out))
  parser.add_argument('--merge', type=pathlib.Path, metavar='FOLDER')
  for name in ('--child', '--lines'):
    parser.add_argument(name, help=argparse.SUPPRESS)
  for name in ('--as-ahead', '--no-trace'):
    parser.add_argument(name, action='store_true', help=argparse.SUPPRESS)
  return parser.parse_args()


def main() -> None:
  args = arguments()
  if args.merge:
    merge(args.merge)
    return
  if args.child:
    lines = pathlib.Path(args.lines)
    measure_group(args.child, args.groups, args.as_ahead, not args.no_trace, lines, args.budget)
    return
  names = args.groups or [name for name in groups() if name not in OTHERS]
  if wrong := set(names) - set(groups()):
    sys.exit(f'no groups: {", ".join(wrong)}; there are {", ".join(groups())}')
  every = Measuring(args.budget, args.state, args.out)
  every.log(json.dumps({k: every.about[k] for k in ('gpu', 'commit', 'versions')}))
  every.save()
  if args.ahead:
    every.compile_ahead(names, min(args.ahead, every.left))
  for name in names:
    if name != 'smoke' or not args.ahead:
      try:
        every.measure(name)
      except Exception as e:  # the other groups go on
        every.log(f'{name}: {type(e).__name__}: {e}')
        every.save()
  items = [i for n in names for i in groups()[n].items]
  failed = [i for i in items if 'error' in every.results.get(i, {'error': 1})]
  every.log(f'done; without a result: {failed}')


if __name__ == '__main__':
  main()
