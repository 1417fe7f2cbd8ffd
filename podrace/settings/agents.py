"""Agents by name: their classes, defaults and binding to an environment."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from podrace import hooks
from podrace.agents import AGENTS, FROM_LOGS, RELATED, agents_for
from podrace.errors import UsageError, unknown
from podrace.settings.config import Basics
from podrace.system import importing
from podrace.system.jax_settings import check_jax

NAME = 'name'  # the key under which config.json has the class of the agent


def unknown_agent(name: str) -> UsageError:
  """Return the error for an unknown agent, with the nearest names or related algorithms."""
  if near := RELATED.get(name.lower().replace('_', '-')):
    return UsageError(
      f"unknown agent '{name}': the nearest is {' or '.join(near)}; MODULE:CLASS names your own"
    )
  if name.lower() in AGENTS:
    return UsageError(f'unknown agent {name!r}: write {name.lower()}')
  module, _, attribute = name.rpartition('.')
  if module:
    path = f'{module}:{attribute}' if attribute != 'py' else f'{module}:CLASS'
    return UsageError(f'unknown agent {name!r}: your own is named MODULE:CLASS; write {path}')
  return unknown('agent', name, AGENTS)


def agent_class(name: str) -> Any:
  """Return the class of an agent, by a name of AGENTS or by `module:Class`."""
  module, _, attribute = name.partition(':')
  if module.endswith('.py'):
    module = module.removesuffix('.py').replace('/', '.')
    raise UsageError(
      f'no agent {name!r}: your own is named MODULE:CLASS; write {module}:{attribute or "CLASS"}'
    )
  if attribute:
    return importing.import_attribute(f'no agent {name!r}', module, attribute)
  if name not in AGENTS:
    raise unknown_agent(name)
  module, attribute = AGENTS[name]
  return getattr(importlib.import_module(module), attribute)


def default_agent(name: str) -> Any:
  """Return an agent with the defaults of its class.

  Raises:
    UsageError: if the class is no frozen dataclass, or a field has no default.
  """
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
  """Return the name of an agent's class, as `agent_class` takes it."""
  path = (type(agent).__module__, type(agent).__qualname__)
  names = [name for name, known in AGENTS.items() if known == path]
  return names[0] if names else ':'.join(path)


def bind_run(config: Basics, env: Any) -> Any:
  """Bind the agent of a run to the spaces of its environment and the sizes of the run.

  Raises:
    UsageError: if it is no agent, or one of podrace's that cannot act in the environment.
    ValueError: if a network cannot be built for the spaces.
  """
  from podrace.agents.search import check_discount
  from podrace.envs.states import takes_turns

  check_jax()  # again: a module of the user may have changed JAX's settings
  name = agent_name(hooks.innermost(config.agent))
  where = config.env or f'--log {getattr(config, "log", "")}'
  fit = agents_for(env.action_space)
  if name in AGENTS and name not in fit:
    fit = [x for x in fit if (x != 'bc' if config.env else x in FROM_LOGS)]  # bc needs a log
    raise UsageError(
      f'{name} cannot act in {where}, whose action space is {env.action_space}: '
      f'take --agent {" or ".join([*([", ".join(fit[:-1])] if fit[1:] else []), fit[-1]])}'
    )
  agent = hooks.innermost(config.agent)
  plans = 'environment' in {f.name for f in dataclasses.fields(agent)}
  if plans and hasattr(agent, 'discount'):
    check_discount(agent.discount, env)
  if takes_turns(env) and not plans:
    raise UsageError(
      f'in {config.env} two players take turns, and {name} would learn from both as one: '
      'take --agent muzero, or another opponent, such as opponent=random'
    )
  return bind(config.agent, env, config.total_updates, config.num_envs)


def bind(agent: Any, env: Any, total_updates: int = 0, total_envs: int = 0) -> Any:
  """Return `agent` with the spaces of `env` and the sizes of the run, if it has fields for them.

  Raises:
    UsageError: if it is no agent.
    ValueError: if a network cannot be built for the spaces.
  """
  lacks = hooks.lacks(agent)
  if lacks or not dataclasses.is_dataclass(agent):
    reason = f'has no {" and no ".join(lacks)}' if lacks else 'is no dataclass'
    raise UsageError(f'{agent_name(agent)} is no agent: it {reason}; see docs/own.md')
  _check_fields(agent)
  return hooks.bind(agent, env, total_updates, total_envs)


def _check_fields(agent: Any) -> None:
  """Refuse a field that config.json cannot record, and attributes that would be ignored."""
  if NAME in {f.name for f in dataclasses.fields(agent)}:
    raise UsageError(
      f'{agent_name(agent)} has a field `{NAME}`, under which config.json records the class of the '
      'agent: give the field another name'
    )
  inner = hooks.innermost(agent)
  for name, value in untyped_attributes(inner):
    if hasattr(value, 'bind') or name in hooks.FIELDS:
      raise UsageError(f'{agent_name(inner)}: {explain_untyped(name, value)}')
  for part in (inner, *(getattr(inner, f.name) for f in dataclasses.fields(inner))):
    if dataclasses.is_dataclass(part) and (field := _overridden(part)):
      raise UsageError(
        f'{agent_name(part)}: `{field}` is no field of this class, so the inherited default '
        f'stays: write `{field}: TYPE = ...` under @dataclasses.dataclass(frozen=True)'
      )


def _overridden(part: Any) -> str | None:
  """Return the name of a field that a subclass gives another default without a type, or None."""
  for field in dataclasses.fields(part):
    value = inspect.getattr_static(type(part), field.name, field.default)
    is_slot = isinstance(value, types.MemberDescriptorType)
    if field.default is not dataclasses.MISSING and value is not field.default and not is_slot:
      return field.name
  return None


def untyped_attributes(agent: Any) -> Iterator[tuple[str, Any]]:
  """Yield the attributes of the user's classes that are no fields, since they have no type."""
  fields = {f.name for f in dataclasses.fields(agent)}
  for cls in type(agent).__mro__:
    if cls is not object and not cls.__module__.startswith('podrace.'):
      yield from ((k, v) for k, v in vars(cls).items() if k not in fields and not k.startswith('_'))


def explain_untyped(name: str, value: Any) -> str:
  """Return the message about an attribute without a type."""
  simple = isinstance(value, bool | int | float | str)
  reason = 'has bind but no type' if hasattr(value, 'bind') else 'has no type'
  kind = f'{type(value).__name__} = {value if simple else "..."}'
  declaration = f'{name}: {hooks.FIELDS.get(name, kind)}'
  return f'`{name}` {reason}, so it is no field: write `{declaration}`'
