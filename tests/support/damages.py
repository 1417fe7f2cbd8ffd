"""Kinds of damage of a run directory, by name. A new kind is a line here; every test of readers then has it."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
  'version': 1, 'agent': {'name': 'ppo', 'network': {'hidden': [64]}}, 'env': 'podrace:catch', 'architecture': 'anakin',
  'total_steps': 1000, 'num_envs': 10, 'unroll_length': 10, 'seed': 0,
}  # fmt: skip
DISCOVER = {**CONFIG, 'command': 'discover', 'widths': [], 'agents': 2, 'agent_updates': 1}
SUMMARY: dict[str, Any] = {
  'step': 1000,
  'episode_return': 0.5,
  'steps_per_s': 100.0,
  'compile_s': 1.0,
}
END: dict[str, Any] = {'state': 'failed', 'why': 'the disk is full'}
FILES = ('config.json', 'summary.json', 'end.json', 'metrics.jsonl', 'eval.jsonl', 'lock')
ESCAPES = '\x1b]0;owned\x07\x1b[31m\x9b31m\r\x08\x7f\u202e\u2066\u200b\ufeff\u034f[red]x[/red][link=http://x]y[/link]'
PAGE = '</script><img src=x onerror=alert(1)>\u2028"\'><svg onload=alert(1)>'

Damage = Callable[[Path], object]


def line(step: int, **more: Any) -> dict[str, Any]:
  return {
    'step': step, 'wall_s': step / 100, 'steps_per_s': 100.0, 'episode_return': step / 1000, 'episode_length': 9.0,
    'episodes': 10, 'gradient_steps': 4, 'loss': 0.5, **more,
  }  # fmt: skip


def make(path: Path) -> Path:
  """A run directory as a run that failed, went on and finished could leave it."""
  path.mkdir(parents=True)
  lines = ''.join(json.dumps(line(step)) + '\n' for step in range(100, 1001, 100))
  seed = zlib.crc32(os.fsencode(path.name))  # each is a run of its own
  (path / 'config.json').write_text(json.dumps(CONFIG | {'seed': seed}))
  (path / 'summary.json').write_text(json.dumps(SUMMARY))
  (path / 'metrics.jsonl').write_text(lines)
  (path / 'checkpoints').mkdir()
  (path / 'lock').touch()
  return path


def _replaced(name: str, content: bytes) -> Damage:
  return lambda path: (path / name).write_bytes(content)


def _members(name: str, whole: dict[str, Any], **members: Any) -> Damage:
  def damage(path: Path) -> None:
    (path / name).write_text(json.dumps({**whole, **members}))
    if name == 'end.json':
      (path / 'summary.json').unlink()

  return damage


def _lines(*lines: Any) -> Damage:
  text = '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in lines) + '\n'
  return lambda path: (path / 'metrics.jsonl').write_text(text)


def _node(name: str, make: Callable[[Path], object]) -> Damage:
  def damage(path: Path) -> None:
    file = path / name
    if file.is_dir():
      file.rmdir()
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    make(file)

  return damage


def _socket(path: Path) -> None:
  here = os.getcwd()
  os.chdir(path.parent)  # the path of a socket has 108 bytes at most
  try:
    with socket.socket(socket.AF_UNIX) as listener:
      listener.bind(path.name)
  finally:
    os.chdir(here)


def _sparse(path: Path) -> None:
  with path.open('wb') as file:
    file.truncate(2**41)


def _nested(path: Path) -> None:
  """1,500 directories, each in the one before."""
  here = os.getcwd()
  try:
    os.chdir(path)
    for _ in range(1500):
      os.mkdir('d')
      os.chdir('d')
  finally:
    os.chdir(here)


CONTENTS = {
  'empty': b'',
  'null': b'null',
  'list': b'[]',
  'text': b'"text"',
  'number': b'5',
  'not JSON': b'{"step": }',
  'cut': b'{"step": 100, "env": "a',
  'deep lists': b'[' * 100_000,
  'deep lists that end': b'[' * 900 + b']' * 900,
  'deep objects': b'{"a":' * 50_000 + b'1' + b'}' * 50_000,
  'deep member': json.dumps(CONFIG).encode()[:-1] + b', "x": ' + b'[' * 500 + b']' * 500 + b'}',
  'a mark of byte order': b'\xef\xbb\xbf' + json.dumps(CONFIG).encode(),
  'UTF-16': json.dumps(CONFIG).encode('utf-16'),
  'not UTF-8': b'\xff\xfe\xfd\n{"step": "\xff"}\n',
  'a NUL': b'\0',
  'many NULs': bytes(2**16),
  'a name twice': json.dumps(CONFIG).encode()[:-1] + b', "env": "other", "step": 1, "step": 2}\n',
  'long': b' ' * 2**23,
  'escapes': ESCAPES.encode(),
}
NODES: dict[str, Callable[[Path], object]] = {
  'a pipe': os.mkfifo,
  'a socket': _socket,
  'a directory': Path.mkdir,
  'a link to an endless device': lambda path: path.symlink_to('/dev/zero'),
  'a link to a terminal': lambda path: path.symlink_to('/dev/tty'),
  'a link to nothing': lambda path: path.symlink_to('nowhere'),
  'a link to itself': lambda path: path.symlink_to(path.name),
  'a link to a file': lambda path: path.symlink_to('/etc/hostname'),
  'a link to a process': lambda path: path.symlink_to('/proc/self/environ'),
  'a sparse file': _sparse,
}
BAD_COUNTS = {
  'negative': -5, 'zero': 0, 'true': True, 'text': '5', 'list': [5], 'object': {}, 'half': 0.5, 'long': 10**30,
  '300 digits': 10**300, '4,000 digits': 10**4000, 'null': None, 'infinite': float('inf'), 'NaN': float('nan'),
}  # fmt: skip
BAD_NUMBERS = {
  'text': 'fast', 'list': [1], 'object': {'a': 1}, 'true': True, 'NaN': float('nan'), 'infinite': float('-inf'),
  'large': 1e308, '400 digits': 10**400,
}  # fmt: skip
BAD_TEXTS = {
  'number': 5, 'null': None, 'list': ['a'], 'object': {}, 'escapes': ESCAPES, 'page': PAGE, 'lines': 'a\nb\n' * 50, 'surrogate': '\ud800',
  'NUL': 'a\0b', 'long': 'x' * 10**5, 'dollars': '$\\frac{1}{0}$ $', 'empty': '',
}  # fmt: skip


def _all() -> dict[str, Damage]:
  found: dict[str, Damage] = {'none': lambda path: None}
  for name in FILES:
    found |= {
      f'{name}: {kind}': _replaced(name, x) for kind, x in CONTENTS.items() if name != 'lock'
    }
    found |= {f'{name}: {kind}': _node(name, make) for kind, make in NODES.items()}
  for member in ('total_steps', 'num_envs', 'unroll_length'):
    found |= {
      f'config.json: {member} {kind}': _members('config.json', CONFIG, **{member: x})
      for kind, x in BAD_COUNTS.items()
    }
  for member in ('widths', 'agents', 'agent_updates'):
    found |= {
      f'config.json: discover, {member} {kind}': _members('config.json', DISCOVER, **{member: x})
      for kind, x in BAD_COUNTS.items()
    }
  for member in ('env', 'agent', 'architecture', 'command', 'version', 'seed', 'other'):
    found |= {
      f'config.json: {member} {kind}': _members('config.json', CONFIG, **{member: x})
      for kind, x in BAD_TEXTS.items()
    }
  for kind, x in BAD_TEXTS.items():
    found[f'config.json: agent name {kind}'] = _members('config.json', CONFIG, agent={'name': x})
    found[f'config.json: name of a member {kind}'] = _members('config.json', CONFIG, **{str(x): x})
    found[f'summary.json: ended {kind}'] = _members('summary.json', SUMMARY, ended=x)
    found[f'summary.json: machine {kind}'] = _members('summary.json', SUMMARY, machine=x)
    found[f'end.json: state {kind}'] = _members('end.json', END, state=x)
    found[f'end.json: why {kind}'] = _members('end.json', END, why=x)
    found[f'metrics.jsonl: a member {kind}'] = _lines(
      *(line(s, **{str(x): 1.0, 'loss': x}) for s in (1, 2))
    )
  varied = {'name': 'podrace.agents.population:Varied'}
  found |= {
    f'config.json: swept agent {kind}': _members(
      'config.json', CONFIG, agent={**varied, 'agent': {'class': x}}
    )
    for kind, x in BAD_TEXTS.items()
  }
  for kind, x in BAD_COUNTS.items():
    found[f'summary.json: step {kind}'] = _members('summary.json', SUMMARY, step=x)
    found[f'metrics.jsonl: step {kind}'] = _lines(line(10), {**line(20), 'step': x})
    found[f'metrics.jsonl: first step {kind}'] = _lines({**line(20), 'step': x}, line(30))
  for member in ('episode_return', 'steps_per_s', 'compile_s'):
    found |= {
      f'summary.json: {member} {kind}': _members('summary.json', SUMMARY, **{member: x})
      for kind, x in BAD_NUMBERS.items()
    }
  members = (
    'episode_return',
    'wall_s',
    'steps_per_s',
    'episodes',
    'gradient_steps',
    'loss',
    'env_restarts',
  )
  for member in members:
    found |= {
      f'metrics.jsonl: {member} {kind}': _lines(
        line(10, **{member: x}), line(20), line(30, **{member: x})
      )
      for kind, x in BAD_NUMBERS.items()
    }
  seeds = 'episode_return_by_seed'
  found |= {
    'config.json: 1e999': lambda path: (path / 'config.json').write_text(
      json.dumps(CONFIG).replace('1000', '1e999')
    ),
    'config.json: 5,000 digits': lambda path: (path / 'config.json').write_text(
      json.dumps(CONFIG).replace('1000', '9' * 5000)
    ),
    'metrics.jsonl: 1e999': _lines('{"step": 1, "loss": 1e999}', line(10)),
    'metrics.jsonl: large numbers that differ in sign': _lines(line(1, loss=-9e99), line(2, loss=9e99)),
    'metrics.jsonl: the smallest numbers': _lines(*(line(s, episode_return=5e-324 * s) for s in range(5))),
    'metrics.jsonl: numbers that hardly differ': _lines(
      line(1, episode_return=1e50), line(2, episode_return=1e50 * (1 + 2**-52))
    ),
    'metrics.jsonl: the last line cut': _lines(line(1), line(2), '{"step": 3, "ep'),
    'metrics.jsonl: a line in the middle': _lines(line(1), '{"step": 3, "ep', line(2)),
    'metrics.jsonl: no names but step': _lines({'step': 1}, {'step': 2}),
    'metrics.jsonl: steps go back': _lines(line(100), line(50), line(70)),
    'metrics.jsonl: ragged seeds': _lines(line(1, **{seeds: [1.0, 2.0]}), line(2, **{seeds: [1.0]}), line(3, **{seeds: [1, 2, 3]})),
    'metrics.jsonl: seeds of text': _lines(line(1, **{seeds: ['a', None]}), line(2, **{seeds: 'ab'})),
    'metrics.jsonl: seeds in seeds': _lines(line(1, **{seeds: [[1.0], [2.0]]})),
    'metrics.jsonl: many lines': _lines(*['{"step":1}'] * 1_000_000),
    'metrics.jsonl: empty lines': _replaced('metrics.jsonl', b'\n' * 3_000_000),
    'metrics.jsonl: a long line': _lines(line(1), {**line(2), 'x': 'y' * 10**6}),
    'metrics.jsonl: names of objects in scripts': _lines(line(1, __proto__=1.0, constructor=2.0, toString=3.0)),
    'checkpoints: a file': _node('checkpoints', Path.touch),
    'checkpoints: a pipe': _node('checkpoints', os.mkfifo),
    'checkpoints: a superscript': lambda path: (path / 'checkpoints' / '²').mkdir(),
    'checkpoints: 200 digits': lambda path: (path / 'checkpoints' / ('9' * 200)).mkdir(),
    'checkpoints: another script': lambda path: (path / 'checkpoints' / '٣').mkdir(),
    'logs: a file': _node('logs', Path.touch),
    'logs: a pipe as lock': _node('logs/lock', os.mkfifo),
    'videos: a file': _node('videos', Path.touch),
    'videos: a pipe': _node('videos/a.mp4', os.mkfifo),
    'videos: a device': _node('videos/a.mp4', lambda path: path.symlink_to('/dev/zero')),
    'videos: a sparse file': _node('videos/a.gif', _sparse),
    'videos: a name': _node(f'videos/{ESCAPES.replace("/", "")}.mp4', Path.touch),
    'damaged: a file': _node('damaged', Path.touch),
    'nested directories': _nested,
  }  # fmt: skip
  if os.getuid():  # root may read all files
    found |= {
      f'{name}: no permission': (lambda path, name=name: (path / name).chmod(0)) for name in FILES
    }  # type: ignore[misc]
  return found


DAMAGES = _all()
NAMES = (
  ESCAPES.replace('/', '|'), 'two\nlines', '\ttab', '\x9b2J', '\u202eltr', os.fsdecode(b'\xff\xfe'),
  '[bold red]x[|bold red]', ' ', '$x$', '%s{0}', '-h', 'x' * 255, PAGE.replace('/', '|'),
)  # fmt: skip
