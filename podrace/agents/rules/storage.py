"""Files of rules: .npz of float32 arrays, as google-deepmind/disco_rl's released weights."""

from __future__ import annotations

import functools
import hashlib
import io
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from podrace.agents.rules.layers import RuleParams
from podrace.errors import UnreadableFile, UsageError
from podrace.system.files import save_arrays, write_whole
from podrace.system.files.reading import read_bytes, read_npz

FILE_BYTES, UNPACKED_BYTES = 2**26, 2**28  # largest rule, packed or not; Disco103 has 3 MB
KNOWN = {  # sha256 -> name of the release
  'dac840a15b81e8805326363458c33979626172618f620d9e6e170315388530aa': 'Disco103',
}


class Sizes(Protocol):
  """Widths of a rule's layers. The defaults have all names of the arrays, and their axes."""

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The shape of each array, by its name in the file."""
    ...

  @classmethod
  def of(cls, params: RuleParams) -> Self:
    """The widths that a rule has."""
    ...


def sha256(path: str) -> str:
  """Return the sha256 of a file, in hexadecimal.

  Raises:
    UsageError: if it cannot be read.
  """
  return hashlib.sha256(_read(path)).hexdigest()


def pin(agent: Any) -> None:
  """Set an agent's `rule_sha256` to the hash of its file `rule`, unless the user has set it.

  Raises:
    UsageError: for a hash without a file.
  """
  if agent.rule_sha256 and not agent.rule:
    raise UsageError(
      f'--agent.rule-sha256 {agent.rule_sha256:.100} is of the file --agent.rule, which is not '
      'given'
    )
  if agent.rule and not agent.rule_sha256:
    object.__setattr__(agent, 'rule_sha256', sha256(agent.rule))


def _read(path: str) -> bytes:
  try:
    return read_bytes(path, FILE_BYTES, follow=True)
  except FileNotFoundError as e:
    raise UsageError(f'cannot read the rule {path}: {e.strerror}') from e
  except UnreadableFile as e:
    raise UsageError(f'cannot read the rule {path}: it {e.reason}') from e


@functools.lru_cache(maxsize=8)
def load(path: str, expected: str, kind: type[Sizes]) -> dict[str, np.ndarray]:
  """The arrays of a rule's file of this sha256, of this kind.

  Raises:
    UsageError: if it can't be read, is another file, or is no rule of the kind.
  """
  content = _read(path)
  if (actual := hashlib.sha256(content).hexdigest()) != expected:
    raise UsageError(
      f'the rule {path} is not the file that was asked for: its sha256 is {actual}, expected '
      f'{expected}'
    )
  try:
    params = read_npz(content, UNPACKED_BYTES)
  except ValueError as e:
    raise UsageError(f'{path} is no rule: an .npz of arrays is expected; {e}') from e
  check(params, path, kind)
  return params


def _agent_of(params: RuleParams, kind: type[Sizes]) -> str:
  """The other agent that learns by such arrays; '' if none does."""
  from podrace.agents.rules import disco, lpg

  others = {'disco': disco.Sizes, 'lpg': lpg.Sizes}
  return next(
    (k for k, x in others.items() if x is not kind and x().shapes().keys() == params.keys()), ''
  )


def check(params: RuleParams, path: str, kind: type[Sizes]) -> None:
  """Raise UsageError unless these arrays make a rule of the kind."""
  names = kind().shapes()
  if other := _agent_of(params, kind):
    raise UsageError(f'{path} is a rule of {other}; give --agent {other}, or another rule')
  if params.keys() != names.keys():
    missing, extra = sorted(names.keys() - params.keys()), sorted(params.keys() - names.keys())
    differences = [
      f'{what} {_some(x)}' for what, x in (('it lacks', missing), ('it has', extra)) if x
    ]
    raise UsageError(
      f'{path} is no rule of this version: {len(names)} arrays are expected; '
      f'{", and ".join(differences)}'
    )
  for name, x in params.items():
    if x.ndim != len(names[name]):
      raise UsageError(
        f'{path} is no rule: {name} has shape {list(x.shape)}, expected {len(names[name])} axes'
      )
  for name, shape in kind.of(params).shapes().items():
    x = params[name]
    if x.dtype != np.float32 or x.shape != shape:
      raise UsageError(
        f'{path} is no rule: {name} is {x.dtype}{list(x.shape)}, expected float32{list(shape)}'
      )
    if not np.isfinite(x).all():
      raise UsageError(f'{path} is no rule: {name} has numbers that are NaN or infinite')


def _some(names: list[str]) -> str:
  return ', '.join(names[:3]) + (f' and {len(names) - 3} more' if len(names) > 3 else '')


def params_of(agent: Any, kind: type[Sizes], usage: str) -> dict[str, np.ndarray]:
  """Return the arrays of the rule of an agent.

  Raises:
    UsageError: if there is no rule, or it does not fit the agent.
  """
  if not agent.rule:
    raise UsageError(usage)
  params = load(agent.rule, agent.rule_sha256, kind)
  check_fits(agent.rule, agent.fits(kind.of(params)))
  return params


def check_fits(path: str, ours: dict[str, tuple[int, int]]) -> None:
  """Raise UsageError for the first option -> (agent's value, needed value) that differs."""
  for option, (has, needed) in ours.items():
    if has != needed:
      raise UsageError(f'the rule {path} needs {option} {needed}, not {has}')


def save(path: str | Path, params: RuleParams) -> None:
  """Write a rule as `load` reads it, whole or not at all."""
  arrays: Any = {name: np.asarray(x) for name, x in params.items()}
  content = io.BytesIO()
  save_arrays(content, arrays)
  write_whole(Path(path), content.getvalue())


def opening(agent: Any) -> str:
  """Return the line about its rule that a run of an agent prints; '' without a file."""
  if not agent.rule:
    return ''
  name = KNOWN.get(agent.rule_sha256, 'which is not a released one')
  return f'learning by the rule {agent.rule}, {name} (sha256 {agent.rule_sha256})'
