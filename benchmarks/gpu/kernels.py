"""Kernels of an update: by the compiled program, and by a profile."""

from __future__ import annotations

import functools
import pathlib
import re
import statistics
import tempfile
from typing import Any

FREE = {
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'after-all',
  'opt-barrier',
  'partition-id',
}
NAME = re.compile(r'%?([\w.\-]+)')


def computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
  """Of optimised HLO: each computation's (opcode, what follows it); and the name of the first."""
  found: dict[str, list[tuple[str, str]]] = {}
  inside, entry = None, ''
  for line in text.splitlines():
    if line.endswith('{') and not line.startswith(' ') and '->' in line:
      first = line.startswith('ENTRY ')
      inside = NAME.match(line.removeprefix('ENTRY ')).group(1)  # type: ignore[union-attr]
      found[inside], entry = [], inside if first else entry
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
      found[inside].append((opcode.strip(), more))
  return found, entry


def kernels_of(text: str) -> dict[str, Any]:
  """How many instructions that are kernels or copies an update starts, by the compiled program.

  The loop over updates has no length that the compiler knows; one round of it is counted.
  """
  every, entry = computations(text)
  loops: list[dict[str, Any]] = []
  unknown = 0

  @functools.cache
  def cost(name: str) -> float:
    nonlocal unknown
    total = 0.0
    for opcode, more in every.get(name, ()):
      called = {k: NAME.match(v).group(1) for k, v in re.findall(r'(\w+)=(%?[\w.\-]+)', more)}  # type: ignore[union-attr]
      if opcode == 'while':
        trips = re.search(r'known_trip_count[^0-9]*"?(\d+)', more)
        inside = cost(called['body']) + (
          0 if trips else cost(called['condition']) + 1
        )  # and its answer copied to the host
        unknown += not trips
        n = int(trips.group(1)) if trips else 1
        loops.append(dict(rounds=n if trips else None, kernels=inside))
        total += n * inside
      elif opcode == 'call':
        total += cost(called['to_apply'])
      elif opcode == 'conditional':
        names = re.search(r'branch_computations=\{([^}]*)\}', more)
        branches = [x.strip().lstrip('%') for x in names.group(1).split(',')] if names else []
        branches += [v for k, v in called.items() if k.endswith('_computation')]
        total += max(map(cost, branches), default=0)
      elif opcode not in FREE and not opcode.endswith('-done'):
        total += 1
    return total

  whole = cost(entry)
  opcodes: dict[str, int] = {}
  for instructions in every.values():
    for opcode, _ in instructions:
      opcodes[opcode] = opcodes.get(opcode, 0) + 1
  kinds = (
    'fusion',
    'custom-call',
    'while',
    'sort',
    'copy',
    'conditional',
    'call',
    'dot',
    'scatter',
  )
  top = sorted(loops, key=lambda x: -(x['rounds'] or 1) * x['kernels'])[:6]
  return dict(
    by_program=whole,
    loops=top,
    loops_of_unknown_length=unknown,
    instructions={k: opcodes[k] for k in kinds if k in opcodes},
  )


def on_device(data: Any, updates: int) -> dict[str, Any]:
  """What ran on the GPU, by a profile of so many updates: kernels, copies, how busy it was, and the host's calls."""
  events: list[tuple[float, float, str, str]] = []
  calls: dict[str, list[float]] = {}
  planes = []
  for plane in data.planes:
    planes.append(plane.name)
    for line in plane.lines:
      if '/device:GPU' in plane.name and line.name.startswith('Stream'):
        events += [(e.start_ns, e.duration_ns, e.name, line.name) for e in line.events]
      elif plane.name.startswith('/host:'):
        for e in line.events:
          if e.name.startswith('cu') and e.name[2:3].isupper():
            calls.setdefault(e.name, []).append(e.duration_ns)
  if not events:
    return dict(error=f'no streams of a GPU in the profile; planes: {planes}')
  events.sort()
  copies = [e for e in events if e[2].lower().startswith(('memcpy', 'memset'))]
  kernels = [e for e in events if not e[2].lower().startswith(('memcpy', 'memset'))]
  busy, until, gaps = 0.0, events[0][0], []
  for start, duration, _, _ in events:
    if start > until:
      gaps.append(start - until)
    busy += max(0.0, start + duration - max(until, start))
    until = max(until, start + duration)
  span = until - events[0][0]
  by_name: dict[str, list[float]] = {}
  for _, duration, name, _ in kernels:
    by_name.setdefault(name, []).append(duration)
  top = sorted(by_name.items(), key=lambda x: -sum(x[1]))[:12]
  lengths = sorted(e[1] for e in kernels) or [0.0]
  return dict(
    updates=updates,
    kernels=len(kernels) / updates,
    copies=len(copies) / updates,
    busy_share=busy / span,
    span_ms=span / updates / 1e6,
    kernel_us=dict(mean=statistics.mean(lengths) / 1e3, median=statistics.median(lengths) / 1e3),
    share_of_kernels_under_5us=sum(x < 5e3 for x in lengths) / len(lengths),
    gap_us=dict(
      median=statistics.median(gaps) / 1e3 if gaps else 0.0, sum_per_update=sum(gaps) / updates / 1e3
    ),
    top=[dict(name=k[:90], per_update=len(v) / updates, us=sum(v) / updates / 1e3) for k, v in top],
    host_calls={k: round(len(v) / updates, 2) for k, v in sorted(calls.items(), key=lambda x: -len(x[1]))[:10]},
  )  # fmt: skip


def looked_into(run: Any) -> dict[str, Any]:
  """Kernels of an update of a run of Anakin, by its program and by a profile; `seconds` without one."""
  import jax

  found = kernels_of(run.run.as_text())
  updates = 4
  run.seconds(1)
  update_s = min(run.seconds(updates) for _ in range(3)) / updates
  updates = max(2, min(400, round(0.15 / update_s)))
  update_s = min(run.seconds(updates) for _ in range(2)) / updates
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      traced_s = run.seconds(updates) / updates
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    device = on_device(jax.profiler.ProfileData.from_file(str(path)), updates)
  return dict(
    update_ms=update_s * 1e3, traced_update_ms=traced_s * 1e3, program=found, device=device
  )


def memory_of(run: Any) -> dict[str, float]:
  """MiB that the compiled program of a run needs, as XLA says."""
  said = run.run.memory_analysis()
  names = dict(
    state='argument_size_in_bytes',
    temporary='temp_size_in_bytes',
    code='generated_code_size_in_bytes',
  )
  return {k: round(getattr(said, v) / 2**20, 1) for k, v in names.items()}
