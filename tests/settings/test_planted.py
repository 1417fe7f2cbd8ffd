"""Commands in a directory in which a stranger has planted links, FIFOs and hard links: they write nothing elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from children import Process
from shared_programs import shared_programs  # noqa: F401
from shorthand import Capture
from test_files import (
  Plant,
  check_untouched,
  dangling,
  device_link,
  fifo,
  folder,
  folder_link,
  hard_link,
  link,
  outside,
)
from test_runs import called
from test_sweep import several_seeds

import podrace
from podrace import tables
from podrace.distributed.net import keys
from podrace.distributed.replay.server import ReplayServer
from podrace.errors import RunError, UsageError
from podrace.launch import Supervisor
from podrace.launch.engines import slurm
from podrace.launch.program import Node, Program
from podrace.launch.supervisor import guard
from podrace.launch.supervisor.addresses import Announcements
from podrace.run import loop, sinks
from podrace.run.checkpoint import Checkpoints
from podrace.settings.config import Config
from podrace.system.files import NotOwn
from podrace.tables import CheckpointError

__all__ = ['outside', 'several_seeds']  # fixtures
OF_FOLDERS = (folder_link, dangling, link, fifo)  # in the place of a directory
OF_LOGS = (link, dangling, folder_link, device_link, fifo, hard_link)  # of a file that is added to
OF_FILES = (link, dangling, hard_link)  # that are replaced
SETTINGS: dict[str, Any] = dict(num_envs=4, unroll_length=4, total_steps=64, log_every=16)


def config(**others: Any) -> Config:
  return podrace.configure('catch', devices=1, **{**SETTINGS, **others})


def names(plants: Iterable[Plant]) -> Any:
  return pytest.mark.parametrize('plant', plants)


@pytest.fixture(scope='module')
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
  path = tmp_path_factory.mktemp('finished') / 'run'
  loop.train(config(), path, quiet=True)
  return path


@pytest.fixture
def theirs(finished: Path, tmp_path: Path) -> Path:
  """A copy of a finished run."""
  return Path(shutil.copytree(finished, tmp_path / 'run'))


def plant_all(plant: Plant, directory: Path, outside: Path, *paths: str) -> None:
  for name in paths:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    plant(path, outside)


# --- train and discover -----------------------------------------------------------------------------


@names(OF_FILES)
def test_a_run_replaces_files(plant: Plant, tmp_path: Path, outside: Path) -> None:
  """Of its records, their drafts, lines, evaluations and TensorBoard."""
  written = ['metrics.jsonl', 'eval.jsonl', 'summary.json', 'end.json']
  if plant is not dangling:
    (outside / 'file').write_text('')  # it is read as well
  drafts = [f'{x}.new' for x in ('config.json', 'to-evaluate/64.safetensors', *written)]
  folder = tmp_path / 'run'
  plant_all(
    plant, folder, outside, *drafts, 'to-evaluate/64.safetensors', 'metrics.jsonl', 'eval.jsonl'
  )
  plant_all(dangling, folder, outside, 'end.json', 'summary.json')
  found = loop.train(
    config(eval_every=64, eval_episodes=2), folder, quiet=True, sinks=('tensorboard',)
  )
  assert found['step'] == 64
  left = {p.name for p in folder.rglob('*') if p.is_symlink()}
  assert left <= {'end.json.new'}, 'which a run that finishes does not write'
  assert [p.name for p in outside.iterdir()] == ['file']
  assert (outside / 'file').read_text() == ('mine' if plant is dangling else '')
  assert len((folder / 'metrics.jsonl').read_text().splitlines()) == 4
  assert json.loads((folder / 'eval.jsonl').read_text())['step'] == 64
  (events,) = (folder / 'tensorboard').iterdir()
  assert len(events.name.rpartition('.')[2]) == 16, 'a name that cannot be guessed'


@names([folder_link, fifo])
@pytest.mark.parametrize(
  'name', ['checkpoints', 'to-evaluate', 'videos', 'tensorboard', 'replay', 'wandb', 'logs']
)
def test_a_run_refuses_a_folder(name: str, plant: Plant, tmp_path: Path, outside: Path) -> None:
  plant_all(plant, tmp_path / 'run', outside, name)
  with pytest.raises(UsageError, match=f'{name} there is a'):
    loop.train(config(), tmp_path / 'run', quiet=True)
  assert [p.name for p in (tmp_path / 'run').iterdir()] == [name]
  check_untouched(outside)


@pytest.mark.parametrize('name', ['checkpoints', 'to-evaluate', 'tensorboard'])
def test_a_run_refuses_a_folder_that_is_no_folder(name: str, tmp_path: Path, outside: Path) -> None:
  plant_all(dangling, tmp_path / 'run', outside, name)
  with pytest.raises((UsageError, RunError), match=f'{name} is a symbolic link'):
    loop.train(config(eval_every=64), tmp_path / 'run', quiet=True, sinks=('tensorboard',))
  check_untouched(outside)


@pytest.mark.parametrize(
  ('name', 'plant'),
  [('lock', x) for x in (link, dangling, folder_link, device_link, fifo)]
  + [('checkpoints/64/params', x) for x in (folder_link, device_link, fifo)],
)
def test_a_run_refuses_what_leads_elsewhere(
  name: str, plant: Plant, theirs: Path, outside: Path
) -> None:
  """At any depth; and FIFOs and devices, at which it would wait."""
  path = theirs / name
  if path.is_dir():
    shutil.rmtree(path)
  path.unlink(missing_ok=True)
  plant(path, outside)
  with pytest.raises(UsageError, match=name):
    loop.train(config(), theirs, quiet=True)
  check_untouched(outside)


def test_drafts_of_checkpoints_are_removed_and_not_followed(theirs: Path, outside: Path) -> None:
  """Also those of extra directories, and damaged ones that have been set aside before."""
  draft = 'checkpoints/80.orbax-checkpoint-tmp'
  plant_all(link, theirs, outside, draft, 'replay/7', 'replay/.80.partial', 'damaged/64')
  checkpoints = Checkpoints(theirs / 'checkpoints')
  assert checkpoints.half_written == [Path(draft).name]
  assert not os.path.lexists(theirs / draft) and not list((theirs / 'replay').iterdir())
  assert checkpoints.set_aside(64) == theirs / 'damaged' / '64-2'
  checkpoints.close()
  check_untouched(outside)


@pytest.mark.slow
def test_discover_refuses_as_train_does(tmp_path: Path, outside: Path, several_seeds: None) -> None:
  from podrace.settings.discovery_presets import PRESETS as RULES

  (tmp_path / 'run').mkdir()
  folder_link(tmp_path / 'run' / 'checkpoints', outside)
  with pytest.raises(UsageError, match='checkpoints'):
    loop.discover(next(iter(RULES.values()))(), tmp_path / 'run', quiet=True)
  check_untouched(outside)


def test_settings_of_weights_and_biases_are_refused(tmp_path: Path) -> None:
  """They may name a server, which would get the user's key."""
  pytest.importorskip('wandb')
  path = tmp_path / 'run' / 'wandb' / 'settings'
  path.parent.mkdir(parents=True)
  path.write_text('[default]\nbase_url = http://127.0.0.1:9/\n', encoding='utf-8')
  with pytest.raises(UsageError, match='wandb/settings'):
    loop.train(config(), tmp_path / 'run', quiet=True, sinks=('wandb',))
  assert [p.name for p in (tmp_path / 'run').iterdir()] == ['wandb']


@pytest.mark.parametrize('text', [b'../../outside', b'\xff', b'', b'a b'])
def test_an_id_of_weights_and_biases_is_no_path(text: bytes, tmp_path: Path) -> None:
  pytest.importorskip('wandb')
  (tmp_path / 'wandb-id').write_bytes(text)
  with pytest.raises(UsageError, match='wandb-id'):
    sinks.WandB(tmp_path)
  assert not (tmp_path / 'wandb').exists()


@names([folder_link, fifo])
def test_the_folder_of_weights_and_biases_has_its_own_link_only(
  plant: Plant, tmp_path: Path, outside: Path
) -> None:
  for name in ('wandb/run-1/files', 'wandb/run-1/latest-run', 'checkpoints/latest-run'):
    plant_all(plant, tmp_path / 'run', outside, name)
    with pytest.raises(UsageError, match=f'{name} there is a'):
      loop.train(config(), tmp_path / 'run', quiet=True)
    (tmp_path / 'run' / name).unlink()
  folder_link(tmp_path / 'run' / 'wandb' / 'latest-run', outside)
  assert loop.train(config(), tmp_path / 'run', quiet=True)['step'] == 64
  check_untouched(outside)


# --- commands that read a run -------------------------------------------------------------------------


def test_evaluating_writes_nothing_and_waits_for_nothing(
  theirs: Path, outside: Path, capsys: Capture
) -> None:
  before = sorted(theirs.rglob('*'))
  assert called(capsys, 'eval', str(theirs), '--episodes', '2', '--greedy')[0] == 0
  assert sorted(theirs.rglob('*')) == before
  fifo(theirs / 'checkpoints' / '64' / 'pipe', outside)
  code, _, err = called(capsys, 'eval', str(theirs), '--episodes', '2')
  assert code == 2 and '64/pipe' in err


@pytest.mark.slow
@names([*OF_FILES, fifo])
def test_videos_replace_files(plant: Plant, theirs: Path, outside: Path) -> None:
  plant_all(
    plant,
    theirs / 'videos',
    outside,
    *(f'64-best-episodes1.{x}' for x in ('mp4', 'gif', 'mp4.new')),
  )
  from podrace.run.video import film

  found = film.watch(theirs, settings=film.FilmSettings(episodes=1))
  assert Path(found['best']['mp4']).read_bytes()[4:8] == b'ftyp'
  assert not any(p.is_symlink() for p in (theirs / 'videos').iterdir())
  check_untouched(outside)


@names(OF_FOLDERS)
def test_videos_need_a_folder(plant: Plant, theirs: Path, outside: Path, capsys: Capture) -> None:
  plant(theirs / 'videos', outside)
  code, _, err = called(capsys, 'watch', str(theirs), '--episodes', '1')
  assert code == 2 and 'videos' in err
  check_untouched(outside)


@names([link, dangling, folder_link, fifo])
def test_a_policy_needs_a_new_directory(
  plant: Plant, theirs: Path, outside: Path, capsys: Capture
) -> None:
  policy = theirs / 'policy'
  plant(policy, outside)
  code, _, err = called(capsys, 'export', str(theirs), str(policy))
  assert code == 2 and str(policy) in err
  policy.unlink()
  plant_all(plant, theirs, outside, '.policy.draft')
  assert called(capsys, 'export', str(theirs), str(policy))[0] == 0
  assert podrace.load_policy(policy).about['step'] == 64
  check_untouched(outside)


@names([*OF_FILES, fifo])
def test_pictures_and_reports_replace_files(
  plant: Plant, theirs: Path, outside: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  """By their default names, which nobody has given, in the directory of somebody else."""
  monkeypatch.chdir(theirs)
  plant_all(
    plant, theirs, outside, 'curves.png', 'curves.png.new', 'report.html', 'report.html.new'
  )
  assert called(capsys, 'plot', '.')[0] == 0
  assert called(capsys, 'report', '.')[0] == 0
  assert (theirs / 'curves.png').read_bytes()[1:4] == b'PNG'
  assert '</html>' in (theirs / 'report.html').read_text(encoding='utf-8')
  check_untouched(outside)


# --- sweeps -------------------------------------------------------------------------------------------

VARY = ['catch', '--vary', 'agent.learning-rate=1e-3,1e-2', '--devices', '1']
SMALL = [f'--{k.replace("_", "-")}={v}' for k, v in SETTINGS.items()]


@names(OF_LOGS)
def test_the_output_of_a_trial_is_added_to_no_file_of_others(
  plant: Plant, tmp_path: Path, outside: Path, capsys: Capture
) -> None:
  plant_all(plant, tmp_path / 'sweep', outside, '0000/output.txt')
  args = ['sweep', *VARY, *SMALL, '--processes', '--dir', str(tmp_path / 'sweep')]
  code, _, err = called(capsys, *args)
  assert code == 2 and 'output.txt' in err
  check_untouched(outside)


@names(OF_FOLDERS)
@pytest.mark.parametrize('name', ['0000', 'run', 'study.log'])
def test_the_folders_of_a_sweep(
  name: str, plant: Plant, tmp_path: Path, outside: Path, capsys: Capture
) -> None:
  if name == 'run' and plant not in (folder_link, fifo):
    return  # as any run directory
  plant_all(plant, tmp_path / 'sweep', outside, name)
  more = {'0000': ['--processes'], 'run': [], 'study.log': ['--method', 'tpe', '--trials', '2']}
  args = ['sweep', *VARY, *SMALL, *more[name], '--dir', str(tmp_path / 'sweep')]
  code, _, err = called(capsys, *args)
  assert code == 2 and name in err
  check_untouched(outside)


@pytest.mark.slow
@names([link, dangling])
def test_a_sweep_replaces_files_and_waits_for_no_stale_lock(
  plant: Plant, tmp_path: Path, outside: Path, capsys: Capture
) -> None:
  """Optuna's lock was a link; one to nothing was waited for without end."""
  written = ['results.json', 'sweep.json.new', 'results.json.new', 'sweep.png', 'sweep.png.new']
  plant_all(plant, tmp_path / 'sweep', outside, *written, 'study.log.lock')
  more = ['--method', 'tpe', '--trials', '1', '--dir', str(tmp_path / 'sweep')]
  code, out, err = called(capsys, 'sweep', *VARY, *SMALL, *more)
  assert code == 0, err
  assert json.loads(out.splitlines()[-1])['best']['state'] == 'finished'
  assert (tmp_path / 'sweep' / 'sweep.png').read_bytes()[1:4] == b'PNG'
  check_untouched(outside)


EVIL = '0.001 --eval-every 32 --eval-env python:os.system,command=true'
LOGS: dict[
  str, tuple[dict[str, Any], str]
] = {  # of a study: what a line of a trial has, and what is named
  'options': ({'param_value_internal': EVIL}, 'has agent.learning-rate .0.001 --eval-every'),
  'range': ({'param_value_internal': 0.5}, 'has agent.learning-rate 0.5, expected a number from'),
  'truth': ({'param_value_internal': True}, 'has agent.learning-rate True, expected a number from'),
  'name': ({'param_name': 'eval-env'}, 'has eval-env, which the sweep does not vary'),
  'line': ({'op_code': 99}, 'is not the log of this sweep'),
  'score': ({'op_code': 7, 'step': 3, 'intermediate_value': 'x'}, "has the score 'x'"),
}


@pytest.mark.parametrize('name', LOGS)
def test_the_log_of_a_study_adds_no_options(name: str, tmp_path: Path, capsys: Capture) -> None:
  """The settings of its trials become arguments of processes, and of the command for the best."""
  import optuna
  from optuna.storages.journal import JournalFileBackend, JournalStorage

  folder = tmp_path / 'sweep'
  folder.mkdir()
  storage = JournalStorage(JournalFileBackend(str(folder / 'study.log')))
  study = optuna.create_study(storage=storage, study_name='sweep', direction='maximize')
  study.ask().suggest_float('agent.learning-rate', 1e-4, 1e-2, log=True)
  changed, message = LOGS[name]
  *lines, last = (folder / 'study.log').read_text(encoding='utf-8').splitlines()
  lines.append(json.dumps(json.loads(last) | changed))
  (folder / 'study.log').write_text('\n'.join(lines) + '\n', encoding='utf-8')
  words = ['catch', '--vary', 'agent.learning-rate=log:1e-4..1e-2', *SMALL, '--devices', '1']
  more = ['--method', 'tpe', '--trials', '2', '--dir', str(folder)]
  code, _, err = called(capsys, 'sweep', *words, *more)
  assert code == 2, err
  assert re.search(message, err) and 'study.log' in err
  assert not (folder / '0000').exists()


# --- programs of several processes ----------------------------------------------------------------------

ONE = Program((Node('main', (sys.executable, '-c', 'print(1)'), main=True),))


def launch(directory: Path) -> int:
  return Supervisor(ONE, directory, lambda name, line: None).run()


@names([*OF_LOGS, folder])
@pytest.mark.parametrize('name', ['logs/main.log', 'logs/lock', 'logs/slurm-7.txt'])
def test_a_log_is_added_to_no_file_of_others(
  name: str, plant: Plant, tmp_path: Path, outside: Path
) -> None:
  """SLURM would add to its own file by itself, so no link is left there."""
  directory = tmp_path / 'run'
  plant_all(plant, directory, outside, name)
  if plant in (hard_link, folder):
    if name == 'logs/main.log':  # it is told, and not written
      assert launch(directory) == 0
    elif (name, plant) == ('logs/lock', folder):
      with pytest.raises(UsageError, match='cannot be written to'):
        launch(directory)
  else:
    with pytest.raises(UsageError, match=Path(name).name):
      launch(directory)
  check_untouched(outside)


@names(OF_FOLDERS)
@pytest.mark.parametrize('name', ['logs', 'replay', 'announced', 'keys'])
def test_a_program_refuses_folders_that_lead_elsewhere(
  name: str, plant: Plant, tmp_path: Path, outside: Path
) -> None:
  """Also those of its nodes, which are started with their path."""
  directory = tmp_path / 'run'
  plant_all(plant, directory, outside, name)
  if plant in (folder_link, fifo) or name == 'logs':
    with pytest.raises(UsageError, match=name):
      launch(directory)
  if name == 'announced':
    with pytest.raises(UsageError, match='announced'):
      Announcements(ONE, directory / name, directory / 'keys', directory).open()
  if name == 'keys':  # of a stranger, who would know them
    slurm.prepare(ONE, directory)
    assert keys.readable(directory / name / 'client.key').lstat().st_mode & 0o777 == 0o600
    assert not (directory / name).is_symlink()
  check_untouched(outside)


@names([link, dangling, folder_link, fifo])
def test_the_lock_of_a_replica_on_another_machine(
  plant: Plant, tmp_path: Path, outside: Path
) -> None:
  plant_all(plant, tmp_path / 'logs', outside, 'main.lock')
  with (
    pytest.raises(UsageError, match=r'main\.lock'),
    guard.wait_for_lock(tmp_path / 'logs' / 'main.lock'),
  ):
    pass
  (tmp_path / 'linked').symlink_to(outside)
  with (
    pytest.raises(UsageError, match='linked'),
    guard.wait_for_lock(tmp_path / 'linked' / 'main.lock'),
  ):
    pass
  check_untouched(outside)


def test_launch_by_command(tmp_path: Path, outside: Path) -> None:
  """The sample of the report: a learner's log that stands for the start file of a shell."""
  plant_all(link, tmp_path / 'run', outside, 'logs/learner.log')
  args = ['launch', 'catch', '--as', 'impala', '--actors', '1', '--run-dir', str(tmp_path / 'run')]
  with Process(tmp_path / 'said', '-m', 'podrace.cli', *args) as process:
    assert process.wait() == 2
    assert 'learner.log' in process.output
  check_untouched(outside)


# --- the replay service, keys, templates ----------------------------------------------------------------


@names(OF_FOLDERS)
@pytest.mark.parametrize('name', ['lock', '00000001', '.00000001.partial-7'])
def test_the_directory_of_a_replay_service(
  name: str, plant: Plant, tmp_path: Path, outside: Path
) -> None:
  plant_all(plant, tmp_path / 'kept', outside, name)
  if plant in (folder_link, fifo) or name == 'lock':
    with pytest.raises((CheckpointError, UsageError), match=name):
      ReplayServer('tcp://127.0.0.1:*', dir=tmp_path / 'kept')
  elif name != '00000001':
    with ReplayServer('tcp://127.0.0.1:*', dir=tmp_path / 'kept'):
      pass
    assert not os.path.lexists(tmp_path / 'kept' / name)
  check_untouched(outside)


@names([link, dangling, folder_link, fifo])
def test_a_checkpoint_of_tables(plant: Plant, tmp_path: Path, outside: Path) -> None:
  plant(tmp_path / 'saved', outside)
  with pytest.raises(CheckpointError, match='is there already'):
    tables.save(tables.ChunkStore(), tmp_path / 'saved')
  plant_all(plant, tmp_path, outside, f'.new.partial-{os.getpid()}')
  tables.save(tables.ChunkStore(), tmp_path / 'new')
  assert (tmp_path / 'new' / 'manifest.json').is_file()
  check_untouched(outside)


@names(OF_LOGS)
def test_the_list_of_clients_is_a_file(plant: Plant, tmp_path: Path, outside: Path) -> None:
  keys.new_keys(tmp_path / 'keys')
  text = (tmp_path / 'keys' / keys.ALLOWED).read_text(encoding='utf-8')
  if plant is hard_link:
    os.link(tmp_path / 'keys' / keys.ALLOWED, outside / 'fifo')
  else:
    plant_all(plant, tmp_path / 'keys', outside, keys.ALLOWED)
  with pytest.raises(NotOwn):
    keys.allow(tmp_path / 'keys', 'f' * 64, 'somebody')
  if plant is hard_link:
    assert (outside / 'fifo').read_text(encoding='utf-8') == text
  check_untouched(outside)


@names([link, dangling, folder_link, fifo, folder])
def test_a_template_replaces_nothing(
  plant: Plant, tmp_path: Path, outside: Path, capsys: Capture
) -> None:
  plant_all(plant, tmp_path / 'here', outside, 'test_of_mine.py')
  code, _, err = called(capsys, 'init', 'agent', 'OfMine', '--dir', str(tmp_path / 'here'))
  assert code == 2 and 'test_of_mine.py' in err
  assert [p.name for p in (tmp_path / 'here').iterdir()] == ['test_of_mine.py']
  check_untouched(outside)
