"""A report of runs: one HTML file that needs no network. Importing this does not import jax."""

from __future__ import annotations

import base64
import datetime
import json
import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrace.errors import UnreadableFile, UsageError
from podrace.experiments import curves, runs
from podrace.experiments.plot import COLOURS
from podrace.experiments.report_groups import collect_groups, index_runs
from podrace.run import directory, metrics, run_end, sinks
from podrace.run.diagnostics import read_diagnostics
from podrace.run.setting_changes import read_changes
from podrace.settings.record import Change
from podrace.system.files import UTF8, write_whole
from podrace.system.files.reading import read_bytes, read_object
from podrace.system.files.schema import SUMMARY
from podrace.version import __version__

PAGE = Path(__file__).parent / 'page'
VIDEO_BYTES = 8 * 2**20  # most bytes of all videos of a run


def write_report(paths: Sequence[Path], out: Path) -> dict[str, Any]:
  """Write a report of runs, and return their number and the runs that were left out.

  Raises:
    UsageError: if there is nothing to show, or the file cannot be written.
  """
  reports, left_out, evaluations = [], [], {}
  logged = curves.read_runs(paths)
  for path in paths:
    run = runs.inspect_run(path)
    if run.state == run_end.BROKEN:
      left_out.append(f'{path}: {run.why}')
      continue
    if path in logged.copies:
      left_out.append(logged.wrong[path])
      continue
    try:
      report = collect_run(run)
      evaluations[path] = metrics.read(path / 'eval.jsonl', shown=True)
      reports.append(report)
    except UsageError as e:
      left_out.append(str(e))
  if not reports:
    raise UsageError(f'there is nothing to report: {"; ".join(left_out) or "no runs are there"}')
  _name_runs(reports)
  groups = collect_groups([r for r in logged.runs if r.path in evaluations], evaluations)
  for report, group in zip(reports, index_runs(groups, reports), strict=True):
    report['group'] = group
  created = datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z')
  data = {
    'runs': reports,
    'groups': groups,
    'left_out': left_out,
    'colours': COLOURS,
    'version': __version__,
    'made': created,
  }
  try:
    write_whole(out, render_page(data))
  except OSError as e:
    raise UsageError(f'--out {out} cannot be written: {e.strerror}') from e
  return {'out': str(out), 'runs': len(reports), 'left_out': left_out}


def render_page(data: dict[str, Any]) -> str:
  """Render the page. The data is escaped, so that no tag in it can end its element."""
  text = json.dumps(data, allow_nan=False)
  for sign in '<>&\u2028\u2029':
    text = text.replace(sign, f'\\u{ord(sign):04x}')
  parts = {'/*CSS*/': 'report.css', '/*JS*/': 'report.js'}
  html = (PAGE / 'report.html').read_text(encoding=UTF8)
  for mark, name in parts.items():
    html = html.replace(mark, (PAGE / name).read_text(encoding=UTF8))
  return html.replace('/*DATA*/', text)


def _name_runs(reports: list[dict[str, Any]]) -> None:
  """Name each run after its directory, with as much of the path as makes it unique."""
  for depth in range(1, 12):
    names = ['/'.join(Path(r['path']).absolute().parts[-depth:]) for r in reports]
    if len(set(names)) == len(names):
      break
  for run, name in zip(reports, names, strict=True):
    run['name'] = name


def collect_run(run: runs.Run) -> dict[str, Any]:
  """Collect all that the page shows of a run, as JSON.

  Raises:
    UsageError: if its metrics are damaged.
  """
  path = run.path
  lines = metrics.read(path / 'metrics.jsonl', shown=True)
  summary = read_object(path / 'summary.json', SUMMARY) or {}
  videos, left_out = _read_videos(path / 'videos')
  try:
    settings = sinks.flatten_config(directory.read_record(path) or {})
  except UsageError as e:
    raise UsageError(f'{path}: {e}') from e
  return {
    **run.as_json(),
    'wall_s': lines[-1].get('wall_s') if lines else None,
    'compile_s': summary.get('compile_s'),
    'machine': _describe_machine(summary.get('machine')),
    'faults': {
      'env_restarts': int(sum(line.get('env_restarts') or 0 for line in lines)),
      'dropped_steps': int(sum(line.get('dropped_steps') or 0 for line in lines)),
      'damaged': len(list((path / 'damaged').glob('*'))),
    },
    'diagnoses': read_diagnostics(path),
    'changes': [
      {'step': entry['step'], 'text': str(Change(name, *pair))}
      for entry in read_changes(path)
      for name, pair in entry['settings'].items()
    ],
    'config': {k: _json_value(x) for k, x in settings.items()},
    'videos': videos,
    'videos_left_out': left_out,
  }


def _json_value(x: Any) -> Any:
  """Return a setting as JSON for browsers, which cannot read non-finite numbers."""
  return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _describe_machine(machine: Any) -> str:
  """Describe the machine of a summary in words."""
  if not isinstance(machine, dict):
    return ''
  device, devices, cores, jax = (machine.get(k) for k in ('device', 'devices', 'cores', 'jax'))
  return f'{machine.get("processor", device)} x {devices}, {cores} cores, JAX {jax}'


def _read_videos(folder: Path) -> tuple[list[dict[str, str]], list[str]]:
  """Return the videos, MP4 before GIF, and videos that were left out. Links are not followed."""
  videos: list[dict[str, str]] = []
  left_out: list[str] = []
  if folder.is_symlink() or not folder.is_dir():
    return videos, left_out
  size = 0
  try:
    files = {p: p.lstat() for p in folder.iterdir() if p.suffix in ('.mp4', '.gif')}
  except OSError as e:
    return videos, [f'{folder.name}: {e.strerror}']
  files = {p: status for p, status in files.items() if stat.S_ISREG(status.st_mode)}
  names = {p.stem for p in files if p.suffix == '.mp4'}
  for path in sorted(files, key=lambda p: -files[p].st_mtime):
    if path.suffix == '.gif' and path.stem in names:
      continue
    if size + files[path].st_size > VIDEO_BYTES:
      left_out.append(
        f'{path.name}: {files[path].st_size / 2**20:.1f} MiB; a report has {VIDEO_BYTES >> 20} MiB '
        'of a run'
      )
      continue
    try:
      content = read_bytes(path, VIDEO_BYTES - size)
    except (UnreadableFile, FileNotFoundError) as e:
      left_out.append(str(e))
      continue
    size += len(content)
    kind = {'.mp4': 'video/mp4', '.gif': 'image/gif'}[path.suffix]
    data = f'data:{kind};base64,{base64.b64encode(content).decode()}'
    videos.append({'name': path.stem, 'kind': path.suffix[1:], 'data': data})
  return videos, left_out
