"""What a person does with runs that are there: runs, follow, rm."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Podrace, cache, podrace, until
from shorthand import Capture

from podrace import cli
from podrace.agents.population import Varied
from podrace.commands import follow
from podrace.commands.runs import age, size
from podrace.errors import RunError, Stopped, UsageError
from podrace.experiments import runs
from podrace.launch.supervisor.local import lock_logs
from podrace.run import directory, run_end
from podrace.settings.agents import agent_name
from podrace.system.locks import lock

CONFIG = {
  'version': 1, 'agent': {'name': 'ppo'}, 'env': 'podrace:catch', 'architecture': 'anakin',
  'total_steps': 1000, 'seed': 0,
}  # fmt: skip


def make(path: Path, *lines: dict[str, Any], **files: Any) -> Path:
  """A run directory as a run leaves it."""
  path.mkdir(parents=True)
  (path / 'config.json').write_text(json.dumps(CONFIG))
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (path / 'metrics.jsonl').write_text(text)
  for name, value in files.items():
    (path / f'{name}.json').write_text(json.dumps(value))
  return path


def line(step: int, episode_return: float | None = None, **more: Any) -> dict[str, Any]:
  return dict(
    step=step, wall_s=step / 100, steps_per_s=100.0, episode_return=episode_return, **more
  )


def called(capsys: Capture, *args: str) -> tuple[int, str, str]:
  """Exit code, stdout and stderr of a command."""
  with pytest.raises(SystemExit) as exit:
    cli.main(args)
  out, err = capsys.readouterr()
  return int(exit.value.code or 0), out, err


def test_a_finished_run_has_the_return_of_its_summary(tmp_path: Path) -> None:
  summary = dict(step=1000, episode_return=0.75, steps_per_s=321.0)
  path = make(tmp_path / 'a', line(500, 0.1), line(1000, 0.5), summary=summary)
  found = runs.inspect_run(path)
  assert (found.state, found.step, found.total_steps) == ('finished', 1000, 1000)
  assert (found.episode_return, found.steps_per_s) == (0.75, 321.0)
  assert found.size == sum(f.stat().st_size for f in path.iterdir())


def test_a_run_without_a_last_word_was_killed(tmp_path: Path) -> None:
  found = runs.inspect_run(make(tmp_path / 'a', line(300, 0.25), line(400)))
  assert (found.state, found.step) == ('killed', 400)
  assert found.episode_return == 0.25  # of the newest line that has one


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
  path = make(tmp_path / 'a', line(300, 0.25), end={'state': 'failed', 'why': 'earlier'})
  with lock(path):
    assert (runs.inspect_run(path).state, runs.inspect_run(path).why) == ('running', '')
  assert (runs.inspect_run(path).state, runs.inspect_run(path).why) == ('failed', 'earlier')


def test_a_run_whose_learner_is_to_start_again_is_running(tmp_path: Path) -> None:
  path = make(tmp_path / 'a', line(300, 0.25))
  with lock_logs(path / 'logs'), pytest.raises(UsageError, match='running'):
    runs.remove(path)
  runs.remove(path)
  assert not path.exists()


@pytest.mark.parametrize('text', ['', '{', '[]', '{"env": 3}', '{"agent": {}, "env": "a"}'])
def test_a_run_that_cannot_be_read_is_shown_as_broken(tmp_path: Path, text: str) -> None:
  path = make(tmp_path / 'a', line(300, 0.25))
  (path / 'config.json').write_text(text)
  found = runs.inspect_run(path)
  assert found.state == 'broken' and 'config.json' in found.why


def test_a_broken_last_line_is_left_out(tmp_path: Path) -> None:
  path = make(tmp_path / 'a', line(300, 0.25))
  with (path / 'metrics.jsonl').open('ab') as file:
    file.write(b'\x00\xff\n[]\n{"step": 400, "epi')
  assert runs.inspect_run(path).step == 300


def test_a_last_line_of_many_seeds_is_read(tmp_path: Path) -> None:
  path = make(tmp_path / 'a', line(200, 0.5), line(300, 0.25, extra=[0.25] * 20_000))
  assert runs.inspect_run(path).step == 300


def test_runs_are_found_at_any_depth_and_not_within_runs(tmp_path: Path) -> None:
  for name in ('a', 'deep/er/b', 'a/checkpoints/c'):
    make(tmp_path / name)
  assert runs.find(tmp_path) == [tmp_path / 'a', tmp_path / 'deep/er/b']
  assert runs.find(tmp_path / 'a') == [tmp_path / 'a']
  (tmp_path / 'link').symlink_to('a')
  assert runs.find(tmp_path / 'a', tmp_path / 'link', tmp_path) == [
    tmp_path / 'a',
    tmp_path / 'deep/er/b',
  ]
  with pytest.raises(UsageError, match='directory'):
    runs.find(tmp_path / 'nowhere')


def test_a_link_to_a_run_is_listed_unless_its_target_is(tmp_path: Path, capsys: Capture) -> None:
  run = make(tmp_path / 'elsewhere/run', line(1))
  links = tmp_path / 'links'
  links.mkdir()
  for name, target in (('run', run), ('back', links), ('up', tmp_path), ('gone', 'nowhere')):
    (links / name).symlink_to(target)
  assert runs.find(links) == [links / 'run']
  code, out, _ = called(capsys, 'runs', str(links), '--json')
  assert code == 0 and [r['path'] for r in json.loads(out)] == [str(links / 'run')]
  (tmp_path / 'a').symlink_to(run)  # of two names, the directory's own
  assert runs.find(tmp_path) == [run]
  assert called(capsys, 'rm', str(links / 'run'), '--yes')[0] == 2 and run.exists()


def test_how_a_life_ended_is_kept_until_the_next(tmp_path: Path) -> None:
  path = make(tmp_path / 'a', line(300))
  for error, expected in (
    (Stopped(signal.SIGTERM), ('stopped', 'SIGTERM')),
    (ValueError('Traceback\n  the disk is full\n\n'), ('failed', 'ValueError: the disk is full')),
    (ValueError(), ('failed', 'ValueError()')),
  ):
    with pytest.raises(type(error)), run_end.note_end(path):
      assert runs.inspect_run(path).state == 'killed'  # as if it ended here
      raise error
    found = runs.inspect_run(path)
    assert (found.state, found.why) == expected
  with pytest.raises(UsageError), run_end.note_end(path):
    raise UsageError('refused')
  assert (runs.inspect_run(path).state, runs.inspect_run(path).why) == ('failed', 'ValueError()')
  with pytest.raises(OSError), run_end.note_end(path, lambda: False):
    raise OSError("the directory is another run's")
  assert not (path / 'end.json').exists()
  with run_end.note_end(path):
    pass
  assert not (path / 'end.json').exists()


def test_the_reason_is_the_first_cause(tmp_path: Path) -> None:
  path = make(tmp_path / 'a', line(300))
  with pytest.raises(RunError), run_end.note_end(path):
    try:
      raise ZeroDivisionError('of my own')
    except ZeroDivisionError as e:
      raise RunError('Traceback ...\nthe run failed; the run is saved at step 300') from e
  assert runs.inspect_run(path).why == 'ZeroDivisionError: of my own'


def test_steps_are_those_of_whole_updates_and_of_the_newest_checkpoint(tmp_path: Path) -> None:
  path = make(tmp_path / 'a', line(300))
  (path / 'config.json').write_text(json.dumps(CONFIG | {'num_envs': 64, 'unroll_length': 5}))
  (path / 'checkpoints' / '640').mkdir(parents=True)
  assert (runs.inspect_run(path).step, runs.inspect_run(path).total_steps) == (640, 1280)


def test_the_table_and_json(tmp_path: Path, capsys: Capture) -> None:
  make(tmp_path / 'a', line(500, 1234.5))
  make(tmp_path / 'b', line(250, -0.5), end={'state': 'failed', 'why': 'x' * 100})
  code, out, _ = called(capsys, 'runs', str(tmp_path))
  head, *rows = out.splitlines()
  assert code == 0 and head.split()[:2] == ['run', 'agent'] and len(rows) == 2
  a, b = sorted(rows)
  assert '1,234.50' in a and '50%' in a and 'killed' in a
  assert '-0.50' in b and 'failed: xxx' in b and '...' in b and max(map(len, rows)) < 250
  code, out, _ = called(capsys, 'runs', str(tmp_path), '--json', '--state', 'failed')
  (only,) = json.loads(out)
  assert only['path'] == str(tmp_path / 'b') and only['why'] == 'x' * 100
  assert only['step'] == 250 and only['size'] > 0


def test_runs_that_ended_before_their_first_step_are_a_table_of_their_own(
  tmp_path: Path, capsys: Capture
) -> None:
  for name, lines in dict(a=[line(500, 1.0)], b=[], c=[line(250, 2.0)], d=[]).items():
    make(tmp_path / name, *lines)
  code, out, _ = called(capsys, 'runs', str(tmp_path))
  begun, ended = (part.splitlines() for part in out.split('\n\n'))
  assert code == 0
  assert [sorted(Path(row.split()[0]).name for row in rows) for rows in (begun[1:], ended[2:])] == [
    ['a', 'c'],
    ['b', 'd'],
  ]


def test_a_sweep_in_one_program_has_the_name_of_its_agent(tmp_path: Path, capsys: Capture) -> None:
  def swept(name: str, inner: str) -> None:
    path = make(tmp_path / name, line(500, 1.0))
    agent = {'name': agent_name(Varied(None, ('a',), (1.0,))), 'agent': {'class': inner}}
    (path / 'config.json').write_text(json.dumps({**CONFIG, 'agent': agent}))

  swept('a', 'podrace.agents.impala:Impala')
  swept('b', 'mine:Own')
  make(tmp_path / 'c', line(500, 1.0))
  _, out, _ = called(capsys, 'runs', str(tmp_path))
  a, b, c = sorted(out.splitlines()[1:])
  assert '1.00' not in a and '1.00' in c  # a sweep has no return of its own
  assert '  impala (sweep)  ' in a and '  mine:Own (sweep)  ' in b and '  ppo  ' in c
  found = json.loads(called(capsys, 'runs', str(tmp_path), '--json')[1])
  assert {(r['agent'], r['sweep']) for r in found} == {
    ('impala', True), ('mine:Own', True), ('ppo', False),
  }  # fmt: skip


def test_the_return_of_a_log_is_not_that_of_the_agent(tmp_path: Path, capsys: Capture) -> None:
  settings = {
    'alone': {'env': '', 'log': 'mixed'},
    'beside': {'log': 'mixed', 'log_share': '2/2'},
    'mix': {'log': 'mixed', 'log_share': '1/2'},
  }
  for name, config in settings.items():
    path = make(tmp_path / name, line(500, 1.0))
    (path / 'config.json').write_text(json.dumps(CONFIG | config))
  found = json.loads(called(capsys, 'runs', str(tmp_path), '--json')[1])
  assert {Path(r['path']).name: (r['env'], r['log'], r['episode_return']) for r in found} == {
    'alone': ('', 'mixed', None), 'beside': ('podrace:catch', 'mixed', None),
    'mix': ('podrace:catch', '', 1.0),
  }  # fmt: skip
  rows = called(capsys, 'runs', str(tmp_path))[1].splitlines()[1:]
  assert ['log mixed' in row for row in sorted(rows)] == [True, False, False]
  assert 'ppo in log mixed' in called(capsys, 'follow', str(tmp_path / 'alone'), '--once')[1]


def test_states_are_named(tmp_path: Path, capsys: Capture) -> None:
  make(tmp_path / 'a', line(500, 1.0))
  code, _, err = called(capsys, 'runs', str(tmp_path), '--state', 'foo')
  seven = 'running, finished, stopped, failed, killed, broken or unknown'
  assert code == 2 and '--state' in err and seven in err and "'foo'" in err
  assert called(capsys, 'runs', str(tmp_path), '--state', 'stopped')[:2] == (
    0, f'no stopped run under {tmp_path}\n',
  )  # fmt: skip
  assert called(capsys, 'runs', str(tmp_path), '--state', 'killed')[1].count('killed') == 1


def test_what_runs_refuses(
  tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  assert called(capsys, 'runs')[0] == 2
  assert called(capsys, 'runs', 'nowhere')[0] == 2
  assert called(capsys, 'runs', 'a', 'b')[0] == 2
  assert called(capsys, 'runs', str(tmp_path))[:2] == (0, f'no run under {tmp_path}\n')


def test_rm_deletes_all_or_none(tmp_path: Path, capsys: Capture) -> None:
  a, b = make(tmp_path / 'a', line(1)), make(tmp_path / 'b', line(1))
  outside = tmp_path / 'outside'
  outside.mkdir()
  (outside / 'kept').write_text('x')
  (a / 'link').symlink_to(outside)
  code, _, err = called(capsys, 'rm', str(a), str(tmp_path / 'c'), '--yes')
  assert code == 2 and 'directory' in err and a.exists()
  with lock(b):
    code, _, err = called(capsys, 'rm', str(a), str(b), '--yes')
  assert code == 2 and 'running' in err and a.exists() and b.exists()
  (tmp_path / 'to-b').symlink_to(b)
  assert called(capsys, 'rm', str(a), str(tmp_path / 'to-b'), '--yes')[0] == 2 and a.exists()
  code, out, _ = called(capsys, 'rm', str(a), str(b), f'{b}/../a', '--yes')
  assert code == 0 and 'freed' in out and not a.exists() and not b.exists()
  assert (outside / 'kept').exists()


def test_rm_deletes_the_working_directory(
  tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
  a = make(tmp_path / 'a', line(1))
  monkeypatch.chdir(a)
  for command in (['rm', '', '--yes'], ['runs', ''], ['plot', '']):  # as of an unset variable
    assert called(capsys, *command)[0] == 2 and a.exists()
  assert called(capsys, 'rm', '.', '--yes')[0] == 0 and not a.exists()


def test_rm_asks(tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
  a = make(tmp_path / 'a', line(1))
  for stdin in (sys.stdin, None):  # None: it is closed
    monkeypatch.setattr(sys, 'stdin', stdin)
    code, _, err = called(capsys, 'rm', str(a))
    assert code == 2 and '--yes' in err and a.exists()
  monkeypatch.setattr(sys.stdin, 'isatty', lambda: True, raising=False)
  monkeypatch.setattr('builtins.input', lambda prompt: 'n')
  assert called(capsys, 'rm', str(a))[:2][0] == 1 and a.exists()
  monkeypatch.setattr('builtins.input', lambda prompt: 'y')
  assert called(capsys, 'rm', str(a))[0] == 0 and not a.exists()


def test_a_removal_that_was_interrupted_can_be_made_again(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  a = make(tmp_path / 'a', line(1))
  (a / 'checkpoints' / '1').mkdir(parents=True)
  remove = shutil.rmtree

  def interrupt(path: Any, **more: Any) -> None:
    if Path(path) == a.resolve():
      raise KeyboardInterrupt
    remove(path, **more)

  with monkeypatch.context() as patch:
    patch.setattr(shutil, 'rmtree', interrupt)
    with pytest.raises(KeyboardInterrupt):
      runs.remove(a)
  assert [p.name for p in a.iterdir()] == ['config.json']
  runs.remove(a)
  assert not a.exists()


def test_a_link_to_a_run_is_not_removed_as_one(tmp_path: Path) -> None:
  a = make(tmp_path / 'a')
  (tmp_path / 'b').symlink_to(a)
  with pytest.raises(UsageError, match='symbolic link'):
    runs.remove(tmp_path / 'b')
  assert a.exists()


@pytest.mark.parametrize(
  ('seconds', 'text'), [(0, '0s'), (59, '59s'), (61, '1m'), (7200, '2h'), (200_000, '2d')]
)
def test_ages(seconds: float, text: str) -> None:
  assert age(seconds) == text


@pytest.mark.parametrize(
  ('number', 'text'), [(0, '0 B'), (999, '999 B'), (1500, '1.5 KB'), (123_456_789, '123 MB'), (2e15, '2000 TB')]
)  # fmt: skip
def test_sizes(number: float, text: str) -> None:
  assert size(number) == text


def test_sparklines() -> None:
  assert follow.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == '▁▂▃▄▅▆▇█'
  assert follow.sparkline([3.0, 3.0]) == '▁▁'
  assert follow.sparkline([math.nan, math.inf]) == ''
  long = follow.sparkline([float(i) for i in range(1000)])
  assert len(long) == follow.WIDTH and long[0] == '▁' and long[-1] == '█'


def test_follow_prints_each_line_once(tmp_path: Path, capsys: Capture) -> None:
  a = make(
    tmp_path / 'a', line(100, 0.5, loss=1.5), line(200, None), end={'state': 'failed', 'why': 'w'}
  )
  code, out, _ = called(capsys, 'follow', str(a), '--metrics', 'episode_return,loss')
  assert code == 0
  assert out.splitlines()[:2] == ['step 100  episode_return 0.5  loss 1.5', 'step 200']
  assert out.splitlines()[-1] == f'{a}: ppo in podrace:catch, failed (w), step 200 of 1,000'
  assert called(capsys, 'follow', str(tmp_path))[0] == 2
  shown = follow.render(
    runs.inspect_run(a), [line(100, 0.5), line(200, 1.5)], ['episode_return', 'none']
  )
  assert '20%' in shown and '▁█' in shown and 'none' not in shown


def test_follow_counts_the_time_left_from_the_first_line(tmp_path: Path) -> None:
  """The first line came after 50 s with compilation, the next 100 steps took 1 s."""
  lines = [line(100) | {'wall_s': 50.0}, line(200) | {'wall_s': 51.0}]
  seen = dataclasses.replace(runs.inspect_run(make(tmp_path / 'a', *lines)), state=run_end.RUNNING)
  assert follow.seconds_left(seen, lines) == 8.0
  assert follow.seconds_left(seen, lines[:1]) is follow.seconds_left(seen, []) is None
  assert '0:00:08 left' in follow.render(seen, lines, [])
  assert ' left' not in follow.render(seen, lines[:1], [])


@pytest.mark.parametrize('columns', [40, 80, 200])
def test_follow_wraps_no_curve(tmp_path: Path, columns: int) -> None:
  lines = [line(4 * i, i - 31_234.5, loss=float(i)) for i in range(250)]
  a = make(tmp_path / 'a', *lines)
  names = ['episode_return', 'steps_per_s', 'loss']
  seen = dataclasses.replace(runs.inspect_run(a), state=run_end.RUNNING)
  _, *rows = follow.render(seen, lines, names, columns).splitlines()
  assert max(map(len, rows)) <= columns and rows[-3].endswith('  -30,986')
  assert max(map(len, rows)) == min(columns, 14 + 2 + follow.WIDTH + 2 + len('-30,986'))


def test_a_real_run_is_followed_to_its_end(tmp_path: Path, cache: Path) -> None:
  run = tmp_path / 'run'
  train = Podrace(
    ('train', 'catch', '--total-steps', '400_000_000', '--log-every', '100_000', '--run-dir', str(run)),
    tmp_path / 'train.txt', 1, cache,
  )  # fmt: skip
  try:
    until(lambda: run.exists() and runs.inspect_run(run).step > 0)
    assert runs.inspect_run(run).state == 'running'
    with pytest.raises(UsageError, match='running'):
      runs.remove(run)
    follower = Podrace(('follow', str(run), '--every', '0.05'), tmp_path / 'follow.txt', 1, cache)
    until(lambda: 'step ' in follower.output)
    train.signal(signal.SIGTERM)
    assert train.wait() == 143
    assert follower.wait() == 0
  finally:
    train.kill()
  assert (runs.inspect_run(run).state, runs.inspect_run(run).why) == ('stopped', 'SIGTERM')
  assert 'stopped (SIGTERM)' in follower.output.splitlines()[-1]
  until_lines = [x for x in follower.output.splitlines() if x.startswith('step ')]
  assert len(until_lines) == len(set(until_lines)) > 0
  shutil.rmtree(run)


def test_a_thousand_runs_are_listed_without_jax(tmp_path: Path) -> None:
  for i in range(1000):
    make(tmp_path / f'{i}', line(10 * i, 1.0))
  code = (
    'import sys\nfrom podrace import cli\n'
    f'try:\n  cli.main(["runs", {str(tmp_path)!r}])\n'
    'except SystemExit as e:\n  assert not e.code\n'
    'heavy = {"jax", "flax", "numpy", "matplotlib", "optax"} & set(sys.modules)\n'
    'assert not heavy, heavy'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False, env=dict(os.environ)
  )
  assert done.returncode == 0, done.stderr
  assert len(done.stdout.splitlines()) == 1001


def test_a_foreign_record_without_an_environment_has_planned_steps() -> None:
  record = {'command': 'discover', 'env': ' ', 'widths': [], 'agents': 1, 'agent_updates': 1}
  assert runs.planned_steps({**record, 'total_steps': 7, 'num_envs': 2, 'unroll_length': 2}) == 8
