"""Agents by name: their classes, defaults and binding to an environment."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

from podrace import hooks
from podrace.agents import AGENTS, RELATED, agents_for
from podrace.errors import UsageError, unknown
from podrace.settings.config import Basics
from podrace.system import importing
from podrace.system.jax_settings import check_jax


def unknown_agent(came: str) -> UsageError:
  """Likewise, of an agent; many algorithms have another name here, or one that does their work."""
  if near := RELATED.get(came.lower().replace('_', '-')):
    return UsageError(
      f"unknown agent '{came}': the nearest here is {' or '.join(near)}; MODULE:CLASS names your own"
    )
  module, _, name = came.rpartition('.')
  if module:
    hint = f'{module}:{name}' if name != 'py' else f'{module}:CLASS'
    raise UsageError(f'unknown agent {came!r}: your own is named MODULE:CLASS; write {hint}')
  return unknown('agent', came, AGENTS)


def agent_class(name: str) -> Any:
  """The class of an agent: one of ours by its name, anybody's by `module:Class`."""
  module, _, attribute = name.partition(':')
  if module.endswith('.py'):
    module = module.removesuffix('.py').replace('/', '.')
    raise UsageError(
      f'no agent {name!r}: your own is named MODULE:CLASS; write {module}:{attribute}'
    )
  if attribute:
    return importing.import_attribute(f'no agent {name!r}', module, attribute)
  if name not in AGENTS:
    raise unknown_agent(name)
  module, attribute = AGENTS[name]
  return getattr(importlib.import_module(module), attribute)


def default_agent(name: str) -> Any:
  """An agent with its class' defaults; raises UsageError if it is none that has them."""
  cls = agent_class(name)
  if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
    raise UsageError(f'{name} is no agent: it is no dataclass; see docs/own.md')
  if not getattr(cls, '__dataclass_params__').frozen:  # noqa: B009 (which mypy does not know)
    raise UsageError(f'{name} must be frozen: @dataclasses.dataclass(frozen=True)')
  if needed := [f.name for f in dataclasses.fields(cls) if f.init and _has_no_default(f)]:
    raise UsageError(f'{name} needs defaults for its fields: {", ".join(needed)}')
  return cls()


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
  return field.default is field.default_factory is dataclasses.MISSING


def agent_name(agent: Any) -> str:
  """What `agent_class` takes."""
  where = (type(agent).__module__, type(agent).__qualname__)
  names = [name for name, known in AGENTS.items() if known == where]
  return names[0] if names else ':'.join(where)


def bind_run(config: Basics, env: Any) -> Any:
  """The agent of a run, for the spaces of its environment and the sizes of the run.

  Raises:
    UsageError: if it is one of ours that can't act there, or no agent.
    ValueError: if a network can't be built for those spaces.
  """
  from podrace.envs.states import takes_turns

  check_jax()  # again: a module of the user's may have changed JAX's settings
  name = agent_name(hooks.innermost(config.agent))
  fit = agents_for(env.action_space)
  if name in AGENTS and name not in fit:
    raise UsageError(
      f'{name} cannot act in {config.env}, whose action space is {env.action_space}: '
      f'take --agent {", ".join(fit[:-1])} or {fit[-1]}'
    )
  agent = hooks.innermost(config.agent)
  if takes_turns(env) and 'environment' not in {f.name for f in dataclasses.fields(agent)}:
    raise UsageError(
      f'in {config.env} two players take turns, and {name} would take what is good for the other as its own; '
      'take --agent muzero, or another opponent, as opponent=random'
    )
  return bind(config.agent, env, config.total_updates, config.num_envs)


def bind(agent: Any, env: Any, total_updates: int = 0, total_envs: int = 0) -> Any:
  """`agent` for the spaces of `env` and the sizes of the run, where it has fields for them.

  Raises:
    UsageError: if it is no agent.
    ValueError: if a network can't be built for those spaces.
  """
  lacks = hooks.lacks(agent)
  if lacks or not dataclasses.is_dataclass(agent):
    what = f'has no {" and no ".join(lacks)}' if lacks else 'is no dataclass'
    raise UsageError(f'{agent_name(agent)} is no agent: it {what}; see docs/own.md')
  for field, value in _untyped(agent):
    if hasattr(value, 'bind'):
      raise UsageError(f'{agent_name(agent)}: {no_field(field, value)}')
  return hooks.bind(agent, env, total_updates, total_envs)


def _untyped(agent: Any) -> Iterator[tuple[str, Any]]:
  """What the user's classes of an agent have that is no field, as it has no type."""
  fields = {f.name for f in dataclasses.fields(agent)}
  for cls in type(agent).__mro__:
    if cls is not object and not cls.__module__.startswith('podrace.'):
      yield from ((k, v) for k, v in vars(cls).items() if k not in fields and not k.startswith('_'))


def no_field(name: str, value: Any) -> str:
  """What to say of a setting that has no type."""
  kind = type(value).__name__
  simple = isinstance(value, bool | int | float | str)
  what = '' if simple else 'has bind but '
  return f'`{name}` {what}{"has " * simple}no type, so it is no field: write `{name}: {kind} = {value if simple else "..."}`'
