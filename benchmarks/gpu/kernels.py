"""Kernels of an update: by the compiled program, and by a profile."""

from __future__ import annotations

import collections
import functools
import pathlib
import re
import statistics
import tempfile
from typing import Any

FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'opt-barrier', 'partition-id'}  # fmt: skip
KINDS = ('fusion', 'custom-call', 'while', 'sort', 'copy', 'conditional', 'call', 'dot', 'scatter')
NAME = re.compile(r'%?([\w.\-]+)')


def computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
  """Returns each computation of optimised HLO as (opcode, the rest of the line), and the name of the entry."""
  parts: dict[str, list[tuple[str, str]]] = {}
  inside, entry = None, ''
  for line in text.splitlines():
    if line.endswith('{') and not line.startswith(' ') and '->' in line:
      first = line.startswith('ENTRY ')
      inside = NAME.match(line.removeprefix('ENTRY ')).group(1)  # type: ignore[union-attr]
      parts[inside], entry = [], inside if first else entry
    elif line.startswith('}'):
      inside = None
    elif inside and ' = ' in line:
      rest = line.split(' = ', 1)[1]
      depth = end = 0
      for end, c in enumerate(rest):  # noqa: B007 (used below)
        depth += (c in '([{') - (c in ')]}')
        if c == ' ' and not depth:
          break
      opcode, _, more = rest[end + 1 :].partition('(')
      parts[inside].append((opcode.strip(), more))
  return parts, entry


def kernels_of(text: str) -> dict[str, Any]:
  """Counts what an update starts, by the compiled program.

  `by_program` are kernels and copies, `conditionals` branches, and `host_waits` the times that the host
  waits for a GPU: for the flag of a branch, or of another round of a loop of unknown length. The loop over
  updates is one of these; one round of it is counted. A branch counts as its longest side.
  """
  every, entry = computations(text)
  loops: list[dict[str, Any]] = []
  unknown = 0

  @functools.cache
  def cost(name: str) -> collections.Counter[str]:
    nonlocal unknown
    total: collections.Counter[str] = collections.Counter()

    def add(counts: collections.Counter[str], times: int = 1) -> None:
      total.update({k: times * n for k, n in counts.items()})

    for opcode, more in every.get(name, ()):
      called = {k: NAME.match(v).group(1) for k, v in re.findall(r'(\w+)=(%?[\w.\-]+)', more)}  # type: ignore[union-attr]
      if opcode == 'while':
        trips = re.search(r'known_trip_count[^0-9]*"?(\d+)', more)
        n, inside = int(trips.group(1)) if trips else 1, cost(called['body']).copy()
        if not trips:  # the condition is copied to the host
          inside.update(cost(called['condition']) + collections.Counter(kernels=1, waits=1))
        unknown += not trips
        loops.append(dict(rounds=n if trips else None, kernels=inside['kernels']))
        add(inside, n)
      elif opcode == 'call':
        add(cost(called['to_apply']))
      elif opcode == 'conditional':
        names = re.search(r'branch_computations=\{([^}]*)\}', more)
        branches = [x.strip().lstrip('%') for x in names.group(1).split(',')] if names else []
        branches += [v for k, v in called.items() if k.endswith('_computation')]
        add(max(map(cost, branches), key=lambda x: x['kernels'], default=collections.Counter()))
        add(collections.Counter(conditionals=1, waits=1))
      elif opcode not in FREE and not opcode.endswith('-done'):
        total['kernels'] += 1
    return total

  whole = cost(entry)
  opcodes = collections.Counter(opcode for each in every.values() for opcode, _ in each)
  top = sorted(loops, key=lambda x: -(x['rounds'] or 1) * x['kernels'])[:6]
  return dict(
    by_program=whole['kernels'], conditionals=whole['conditionals'], host_waits=whole['waits'],
    loops=top, loops_of_unknown_length=unknown,
    instructions={k: opcodes[k] for k in KINDS if k in opcodes},
  )  # fmt: skip


def events_of(data: Any) -> tuple[list[tuple[float, float, str]], dict[str, int]]:
  """Returns (start, duration, name) of the events on the GPU's streams, and the number of the host's calls of CUDA."""
  events: list[tuple[float, float, str]] = []
  calls: collections.Counter[str] = collections.Counter()
  for plane in data.planes:
    for line in plane.lines:
      if '/device:GPU' in plane.name and line.name.startswith('Stream'):
        events += [(e.start_ns, e.duration_ns, e.name) for e in line.events]
      elif plane.name.startswith('/host:'):
        calls.update(e.name for e in line.events if e.name.startswith('cu') and e.name[2:3].isupper())  # fmt: skip
  return sorted(events), dict(calls.most_common(10))


def on_device(data: Any, updates: int) -> dict[str, Any]:
  """Returns kernels, copies, how busy the GPU was, and the host's calls, by a profile of updates."""
  events, calls = events_of(data)
  if not events:
    return dict(error=f'no streams of a GPU in the profile; planes: {[p.name for p in data.planes]}')  # fmt: skip
  busy, until, gaps = 0.0, events[0][0], []
  by_name: dict[str, list[float]] = {}
  for start, duration, name in events:
    if start > until:
      gaps.append(start - until)
    busy += max(0.0, start + duration - max(until, start))
    until = max(until, start + duration)
    if not name.lower().startswith(('memcpy', 'memset')):
      by_name.setdefault(name, []).append(duration)
  span = until - events[0][0]
  top = sorted(by_name.items(), key=lambda x: -sum(x[1]))[:12]
  lengths = [x for each in by_name.values() for x in each] or [0.0]
  return dict(
    updates=updates, kernels=len(lengths) / updates, copies=(len(events) - len(lengths)) / updates,
    busy_share=busy / span, span_ms=span / updates / 1e6,
    kernel_us=dict(mean=statistics.mean(lengths) / 1e3, median=statistics.median(lengths) / 1e3),
    share_of_kernels_under_5us=sum(x < 5e3 for x in lengths) / len(lengths),
    gap_us=dict(median=statistics.median(gaps or [0.0]) / 1e3, sum_per_update=sum(gaps) / updates / 1e3),
    top=[dict(name=k[:90], per_update=len(v) / updates, us=sum(v) / updates / 1e3) for k, v in top],
    host_calls={k: round(n / updates, 2) for k, n in calls.items()},
  )  # fmt: skip


def inspect(run: Any) -> dict[str, Any]:
  """Returns the kernels of an update of a run of Anakin, by its program and by a profile, and its time without one."""
  import jax

  program = kernels_of(run.run.as_text())
  run.seconds(1)
  update_s = min(run.seconds(4) for _ in range(3)) / 4
  updates = max(2, min(400, round(0.15 / update_s)))
  update_s = min(run.seconds(updates) for _ in range(2)) / updates
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      traced_s = run.seconds(updates) / updates
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    device = on_device(jax.profiler.ProfileData.from_file(str(path)), updates)
  return dict(update_ms=update_s * 1e3, traced_update_ms=traced_s * 1e3, program=program, device=device)  # fmt: skip


def memory_of(run: Any) -> dict[str, float]:
  """Returns the MiB that the compiled program of a run needs, by XLA."""
  sizes = run.run.memory_analysis()
  names = dict(state='argument', temporary='temp', code='generated_code')
  return {k: round(getattr(sizes, f'{v}_size_in_bytes') / 2**20, 1) for k, v in names.items()}
