"""The record of a run that an acting process compares with its learner's, and parameters."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podrace import errors
from podrace.distributed.net import keys
from podrace.distributed.net.address import check_address
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.listener import Listen
from podrace.distributed.net.safe_text import plain
from podrace.distributed.net.session_messages import SILENCE
from podrace.errors import UsageError
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import argument, changes, option, to_json, words
from podrace.system.files import write_json
from podrace.system.files.reading import parse_json, read_json
from podrace.topology import on_host

RECORD, FINISHED = '.run', '.finished'  # names of the arrays that are published besides parameters
HIGHEST = '.highest'  # likewise, [] f64: the highest priority so far
RUN = 'run'  # the key of the run's name in the record; tables have that name, too
OF_LOG = ('log', 'log_share')  # fields about a log; copies of it may be in other places
DIFFERENCES = 10  # the most that are listed
COMMON = ('agent', 'env', 'num_envs', 'unroll_length')  # fields on which both sides must agree


@dataclasses.dataclass(frozen=True)
class Addresses:
  """The addresses of a run's processes, and the security of connections.

  Attributes:
    replay: the addresses of the replay service's shards.
    parameters: the address at which the learner publishes parameters.
    keys: a directory of keys, None for connections without.
    insecure: whether connections without keys may leave the machine.
    peer_timeout: seconds of silence after which the learner drops an acting process.
    announce: the learner's announcement, made once it listens.
  """

  replay: tuple[str, ...]
  parameters: str
  keys: Path | None = None
  insecure: bool = False
  peer_timeout: float = SILENCE
  announce: Announcement | None = None


def check(addresses: Addresses, listens: bool = True) -> None:
  """Raise SecurityError for addresses and keys with which a learner cannot connect or listen."""
  a = addresses
  Listen(a.parameters, a.keys, a.insecure, a.peer_timeout)
  for address in a.replay:
    check_address(address, a.keys, a.insecure, '--connect-replay')
  if a.keys is not None:
    if listens:
      keys.server_context(a.keys)
      keys.Allowed(a.keys / keys.ALLOWED)
    try:
      keys.client_context(a.keys)
    except errors.SecurityError as e:
      raise errors.SecurityError(f'{e}; a learner is a client of its replay service') from e


def run_name(run_dir: Path) -> str:
  """Return the name of a run. It is kept in the run directory, so a resumed run has the same name.

  Raises:
    UsageError: if the file in the directory has no name.
  """
  path = run_dir / 'name.json'
  if (name := read_json(path)) is None:
    name = f'{plain(run_dir.resolve().name)[:100]}-{os.urandom(4).hex()}'
    write_json(path, name)
  if not isinstance(name, str) or not 0 < len(name) <= 200 or plain(name) != name:
    raise UsageError(f'{path} is not the name of a run')
  return name


def record(config: Config) -> dict[str, Any]:
  """Return the part of a config on which both sides must agree."""
  common = (*COMMON, 'log_share') if config.log else COMMON
  return {k: v for k, v in to_json(config, whole=True).items() if k in common}


def read_record(document: np.ndarray | None) -> tuple[str, dict[str, Any]]:
  """Read the name of a run and its `record` from a published document, empty without one.

  Raises:
    UsageError: if the document is no record of a run.
  """
  if document is None:
    return '', {}
  try:
    content = json.loads(document.tobytes())
  except (ValueError, RecursionError) as e:
    raise UsageError(f'the learner publishes no record of a run: it is not JSON ({e})') from e
  if not isinstance(content, dict) or not isinstance(content.get(RUN, ''), str):
    raise UsageError(f'the learner publishes no record of a run, but {plain(repr(content)[:200])}')
  return content.pop(RUN, ''), content


def describe_differences(learner: dict[str, Any], here: dict[str, Any]) -> list[str]:
  """Describe in a few lines how the `record` of an acting process differs from its learner's."""
  agents = [x.get('agent') for x in (learner, here)]
  lines, names = [], [x.get('name') if isinstance(x, dict) else None for x in agents]
  if names[0] != names[1]:  # then all settings of the agents differ
    lines = [f'the learner runs {names[0]}, this process {names[1]}']
    learner, here = ({k: v for k, v in x.items() if k != 'agent'} for x in (learner, here))
  lines += [
    f'{option(path)}: the learner has {argument(a)}, this process {argument(b)}'
    for path, a, b in changes(learner, here)
  ]
  more = len(lines) - DIFFERENCES
  return [plain(x) for x in lines[:DIFFERENCES]] + ([f'and {more} more'] if more > 0 else [])


def differences(learner: dict[str, Any], text: str) -> list[str]:
  """Describe how the record of a client differs, which has come from it as JSON."""
  try:
    there = parse_json(text.encode())
  except ValueError as e:
    return [f'its record {e}']
  if not isinstance(there, dict):
    return ['its record is no object']
  return describe_differences(learner, there)


def worker_command(command: str, config: Config, addresses: Addresses) -> str:
  """Return a command of a process that works for the learner, from the preset nearest to `config`.

  Args:
    command: its name, such as act.
    config: the config of the run.
    addresses: the addresses of the run's processes.
  """
  wanted, name = record(config), agent_name(config.agent)
  bases: dict[tuple[str, ...], Config] = {(preset,): make() for preset, make in PRESETS.items()}
  near = {words: base for words, base in bases.items() if agent_name(base.agent) == name}
  if not near:  # the user's own agent, with the default preset
    agent = dataclasses.replace(config.agent, **_defaults(type(config.agent)))
    near = {('--agent', name): dataclasses.replace(bases['catch',], agent=agent)}
  different = {words: list(changes(record(base), wanted)) for words, base in near.items()}
  nearest = min(different, key=lambda words: len(different[words]))
  options = [quote(words(path, value)) for path, _, value in different[nearest]]
  if config.log:
    options.append(f'--log {quote(config.log)}')
  a = addresses
  where = f'--connect-replay {",".join(a.replay)} --params {a.parameters}'
  keys = ['--keys DIR'] if a.keys else ['--insecure'] if a.insecure else []
  return ' '.join([f'podrace {command}', *nearest, *options, where, *keys])


def quote(value: Any) -> str:
  """Return a record's value as words for a shell."""
  return ' '.join(map(quote, value)) if isinstance(value, list) else shlex.quote(str(value))


def _defaults(cls: Any) -> dict[str, Any]:
  fields = [f for f in dataclasses.fields(cls) if f.init]
  return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} | {
    f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING
  }


def to_leaves(params: Any) -> list[tuple[str, np.ndarray]]:
  """Return the name and the array of each leaf of parameters, as they are published."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return [(jax.tree_util.keystr(path), on_host(x)) for path, x in leaves]


def from_leaves(like: Any, leaves: dict[str, np.ndarray]) -> Any:
  """Return parameters of the structure of `like` from published leaves.

  Raises:
    UsageError: if names, dtypes or shapes differ; the message has both sides.
  """
  paths = jax.tree_util.tree_leaves_with_path(like)
  expected = {jax.tree_util.keystr(path): x for path, x in paths}
  different = [
    f'{path}: the learner has {_kind(leaves.get(path))}, this process {_kind(expected.get(path))}'
    for path in {**expected, **leaves}
    if _kind(leaves.get(path)) != _kind(expected.get(path))
  ]
  if different:
    raise UsageError('the learner publishes other parameters:\n  ' + '\n  '.join(different))
  return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in expected])


def _kind(x: Any) -> str:
  return 'none' if x is None else f'{x.dtype}{list(x.shape)}'
