"""Settings that change between two lives of a run: allowed or refused, and recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from shared_programs import shared_programs  # noqa: F401

from podrace.agents.impala import Impala
from podrace.errors import UnreadableFile, UsageError
from podrace.experiments.report import collect_run
from podrace.experiments.runs import inspect_run
from podrace.networks import ActorCritic
from podrace.run import loop
from podrace.run.directory import changes_of
from podrace.run.setting_changes import needs_override, note_changes, read_changes
from podrace.settings.config import Config
from podrace.settings.record import Change, to_json
from podrace.system.files import write_json

CONFIG = Config(
  agent=Impala(ActorCritic(hidden=(8,)), anneal_learning_rate=False),
  num_envs=8, unroll_length=8, total_steps=640, checkpoint_every=320, devices=1,
)  # fmt: skip


def go_on(run_dir: Path, override: bool = False, **changes: Any) -> dict[str, Any]:
  return loop.train(dataclasses.replace(CONFIG, **changes), run_dir, override=override, quiet=True)


def test_a_finished_run_goes_on_with_more_steps_as_if_it_had_had_them(tmp_path: Path) -> None:
  go_on(tmp_path / 'run')
  summary = go_on(tmp_path / 'run', total_steps=1280)
  whole = go_on(tmp_path / 'whole', total_steps=1280)
  assert (summary['step'], summary['params_sha256']) == (1280, whole['params_sha256'])
  (entry,) = read_changes(tmp_path / 'run')
  assert (entry['step'], entry['settings']) == (640, {'total_steps': [640, 1280]})
  (shown,) = collect_run(inspect_run(tmp_path / 'run'))['changes']
  assert shown == {'step': 640, 'text': 'total_steps: 640 -> 1280'}


def test_other_changes_are_refused_and_with_override_recorded(tmp_path: Path) -> None:
  run = tmp_path / 'run'
  go_on(run)
  for changes in (dict(total_steps=320), dict(keep=2), dict(total_steps=1280, keep=2)):
    with pytest.raises(UsageError, match='--override'):
      go_on(run, **changes)
  assert read_changes(run) == []
  go_on(run, override=True, total_steps=1280, keep=2)
  go_on(run, total_steps=1920, keep=2)
  assert [(e['step'], e['settings']) for e in read_changes(run)] == [
    (640, {'total_steps': [640, 1280], 'keep': [3, 2]}),
    (1280, {'total_steps': [1280, 1920]}),
  ]


@pytest.mark.parametrize(
  'change', [{'init_from': 'none'}, {'init_checkpoint': 'best'}, {'init_member': 1}]
)
def test_the_start_of_a_run_with_checkpoints_cannot_change(
  change: dict[str, Any], tmp_path: Path
) -> None:
  write_json(tmp_path / 'config.json', to_json(CONFIG))
  changed = dataclasses.replace(CONFIG, total_steps=1280, **change)
  (tmp_path / 'checkpoints/640.orbax-checkpoint-tmp').mkdir(parents=True)  # of a killed run
  assert {c.path for c in changes_of(changed, tmp_path)} == {'total_steps', *change}
  (tmp_path / 'checkpoints/640').mkdir()
  with pytest.raises(UsageError, match=next(iter(change))):
    changes_of(changed, tmp_path)


def test_a_start_that_ended_early_and_its_repetition_are_one_change(tmp_path: Path) -> None:
  for changes in ([('keep', 3, 2)], [('keep', 3, 2)], [('keep', 2, 3)], [('keep', 3, 2)]):
    note_changes(tmp_path, 640, [Change(*change) for change in changes])
  assert [e['settings']['keep'] for e in read_changes(tmp_path)] == [[3, 2], [2, 3], [3, 2]]


def test_a_run_that_resumes_before_a_change_has_it_from_there_on(tmp_path: Path) -> None:
  for step, keep in ((320, 4), (640, 5)):
    note_changes(tmp_path, step, [Change('keep', 3, keep)])
  note_changes(tmp_path, 480, [])
  assert [e['step'] for e in read_changes(tmp_path)] == [320, 480]


@pytest.mark.parametrize(
  ('change', 'is_needed'),
  [
    (Change('total_steps', 10, 20), False),
    (Change('total_steps', 20, 10), True),
    (Change('total_steps', None, 10), True),
    (Change('agent.total_steps', 10, 20), True),
    (Change('num_envs', 10, 20), True),
  ],
)
def test_only_more_steps_need_no_override(change: Change, is_needed: bool) -> None:
  assert needs_override(change) == is_needed


def test_a_refused_resume_leaves_the_summary(tmp_path: Path) -> None:
  run = tmp_path / 'run'
  go_on(run)
  before = (run / 'summary.json').read_bytes()
  (run / 'changes.json').write_text('{"changes": 7}')
  with pytest.raises(UsageError, match='changes'):
    go_on(run, total_steps=1280)
  assert (run / 'summary.json').read_bytes() == before


def test_a_refused_resume_records_no_change(tmp_path: Path) -> None:
  run = tmp_path / 'run'
  go_on(run)
  before = (run / 'config.json').read_bytes()
  (run / 'metrics.jsonl').write_text('no line\n' + (run / 'metrics.jsonl').read_text())
  with pytest.raises(UsageError, match='line 1'):
    go_on(run, override=True, total_steps=1280, keep=2)
  assert (run / 'config.json').read_bytes() == before
  assert read_changes(run) == []


@pytest.mark.parametrize('pair', ['3', '[3]', '[1, 2, 3]', 'null'])
def test_a_change_without_its_two_values_is_refused(pair: str, tmp_path: Path) -> None:
  entry = f'{{"step": 640, "date": "", "settings": {{"seed": {pair}}}}}'
  (tmp_path / 'changes.json').write_text(f'{{"changes": [{entry}]}}')
  with pytest.raises(UnreadableFile, match=r'changes\.json'):
    read_changes(tmp_path)
