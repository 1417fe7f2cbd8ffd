"""Settings in files: what --save-config writes, --config reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import podrace
from podrace import cli
from podrace.commands import config_files, configure, train
from podrace.errors import UsageError
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import to_json
from podrace.system.options import Options


def load(path: Path, *arguments: str) -> Config:
  """The configuration of `podrace train --config PATH ARGUMENTS`."""
  saved = path.with_name(f'{len(list(path.parent.iterdir()))}.json')
  assert run('--config', str(path), *arguments, '--save-config', str(saved)) == 0
  config = config_files.read_run(saved, ())
  assert config is not None
  return config


def run(*arguments: str) -> int:
  with pytest.raises(SystemExit) as exit_:
    cli.main(['train', *arguments])
  return int(exit_.value.code or 0)


@pytest.mark.parametrize('name', PRESETS)
def test_every_preset_comes_back_from_toml(name: str, tmp_path: Path) -> None:
  config = PRESETS[name]()
  path = tmp_path / 'settings.toml'
  config_files.write(path, config)
  arguments = config_files.read_options(path)
  options = Options(arguments, train.COMMAND)
  base = configure.base_config(None, None, options)
  assert to_json(configure.parse(base, options.arguments)) == to_json(config)


@pytest.mark.parametrize('folder', ['nowhere', 'file'])
def test_a_file_that_cannot_be_written_is_refused(
  folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / 'file').touch()
  assert run('catch', '--save-config', str(tmp_path / folder / 'x.toml')) == 2
  error = capsys.readouterr().err
  assert folder in error and len(error.splitlines()) == 1


def test_options_come_after_the_file(tmp_path: Path) -> None:
  path = tmp_path / 'settings.toml'
  path.write_text(
    'preset = "cartpole"\nseed = 3\n[agent]\nlearning_rate = 1e-2\n[agent.network]\nhidden = [8, 8]\n'
  )
  config = load(path, '--seed', '4')
  (tmp_path / 'link.toml').symlink_to(path)
  assert load(tmp_path / 'link.toml', '--seed', '4') == config
  assert (config.seed, config.env) == (4, PRESETS['cartpole']().env)
  assert (config.agent.learning_rate, config.agent.network.hidden) == (1e-2, (8, 8))


@pytest.mark.parametrize('suffix', ['toml', 'json'])
def test_help_has_the_defaults_of_the_file(
  suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  path = tmp_path / f'settings.{suffix}'
  assert run('dqn-cartpole', '--seed', '77', '--save-config', str(path)) == 0
  assert run('--config', str(path), '--num-envs', '96', '--help') == 0
  text = ' '.join(capsys.readouterr().out.split())
  assert '(default gymnax:CartPole-v1)' in text and '(default 77)' in text
  assert '(default 96)' in text and '--agent.buffer.capacity int' in text


def test_settings_that_a_record_leaves_out_are_in_a_file(tmp_path: Path) -> None:
  config = PRESETS['r2d2-memory']()
  network = dataclasses.replace(config.agent.network, scaling='plain', shortcut=False)
  config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, network=network))
  for name in ('a.toml', 'a.json'):
    config_files.write(tmp_path / name, config)
    assert load(tmp_path / name) == config


def test_texts_stay_as_they_are(tmp_path: Path) -> None:
  path = tmp_path / '2024_01_05 \U0001f600\x7f.toml'
  words = ['--log', '2024_01_05', '--init-from=1e5', '--total-steps', '1e5']
  config = configure.parse(PRESETS['catch'](), words)
  assert (config.log, config.init_from, config.total_steps) == ('2024_01_05', '1e5', 100_000)
  config = dataclasses.replace(PRESETS['catch'](), init_from=str(path))
  config_files.write(path, config)
  assert load(path) == config


def test_the_settings_of_another_run(tmp_path: Path) -> None:
  config = podrace.configure('catch', total_steps=2048, agent={'learning_rate': 0.007}, devices=1)
  podrace.train(config, tmp_path / 'run', quiet=True)
  for path in (tmp_path / 'run', tmp_path / 'run' / 'config.json'):
    assert load(path, '--seed', '9') == dataclasses.replace(config, seed=9)


def test_a_network_of_ones_own_is_kept_as_json(tmp_path: Path) -> None:
  config = PRESETS['minatar-breakout']()
  record = to_json(config)
  assert config_files.write(tmp_path / 'a.json', config) is None
  assert json.loads((tmp_path / 'a.json').read_text()) == record


@pytest.mark.parametrize(
  ('text', 'named'),
  [
    ('seed = ', 'TOML'),
    ('config = "other.toml"', 'config'),
    ('save_config = "other.toml"', 'save_config'),
    ('sede = 3', '--seed'),
    ('lr = 1e-3', '--agent.learning-rate'),
    ('seed = "x"', '--seed'),
    ('[agent]\nname = "pppo"', 'ppo'),
    ('preset = "cartpol"', 'cartpole'),
    ('seed = 2024-01-01', '--seed'),
    (None, 'settings.toml'),
  ],
)
def test_a_wrong_file(
  text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  path = tmp_path / 'settings.toml'
  if text is not None:
    path.write_text(text)
  assert run('--config', str(path), '--run-dir', str(tmp_path / 'run')) == 2
  assert named in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()


def test_a_preset_and_a_file_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  path = tmp_path / 'settings.toml'
  path.write_text('preset = "catch"')
  assert run('cartpole', '--config', str(path)) == 2
  assert 'cartpole' in capsys.readouterr().err


def test_no_file_is_overwritten(tmp_path: Path) -> None:
  path = tmp_path / 'settings.toml'
  path.write_text('')
  with pytest.raises(UsageError, match=r'settings\.toml'):
    config_files.write(path, PRESETS['catch']())
  assert path.read_text() == ''
