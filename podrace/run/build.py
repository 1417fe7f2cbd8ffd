"""Assembles the program of a configuration: the one place that knows both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from podrace import envs, hooks
from podrace.architectures.agreement import AllReduce, Gossip
from podrace.architectures.anakin import Anakin, AnakinDriver
from podrace.architectures.protocol import Architecture
from podrace.architectures.sebulba import (
  ActorSource,
  HostReplaySource,
  LearningProgram,
  SebulbaDriver,
  example_trajectory,
  make_program,
)
from podrace.envs.check import check_environment
from podrace.envs.host.base import HostSpec
from podrace.errors import UsageError
from podrace.replay import Buffer, windows
from podrace.replay.host_labels import HostLabels
from podrace.replay.layout import Layout
from podrace.run.check_agent import check_run
from podrace.settings.agents import bind_run
from podrace.settings.config import Config
from podrace.settings.resolved import Resolved, resolve
from podrace.topology import Topology, learner_mesh, share, split_devices
from podrace.types import Replay

if TYPE_CHECKING:
  from podrace.architectures.discovery.members import Kind
  from podrace.architectures.discovery.program import MetaTraining
  from podrace.distributed.environments.server import Server
  from podrace.distributed.net.listener import Listen
  from podrace.distributed.run_identity import Addresses
  from podrace.settings.discovery import Discovery


def build(config: Config) -> Architecture:
  """Return the program that a config describes, after checking the config.

  Raises:
    UsageError, ValueError: if settings are wrong or do not fit each other.
  """
  return assemble(resolve(config))


def assemble(
  resolved: Resolved,
  server: Server | None = None,
  addresses: Addresses | None = None,
  run_dir: Path | None = None,
) -> Architecture:
  """Return the program of a run.

  Args:
    resolved: the configuration of the run.
    server: accepts remote environments, for `config.envs` remote.
    addresses: of a replay service and for acting processes, for `config.replay` service.
    run_dir: records which tables of the service are the run's.

  Raises:
    ValueError: if sizes do not fit each other, with the numbers.
  """
  config = resolved.config
  if config.model_devices > 1 and jax.process_count() > 1:
    raise UsageError(f'--model-devices {config.model_devices} is for runs of one process')
  if (config.replay == 'service') != (addresses is not None):
    raise UsageError(
      '--replay service and --connect-replay go together, as in --connect-replay '
      'tcp://127.0.0.1:5560 --listen tcp://127.0.0.1:5561'
    )
  if addresses is not None:
    if run_dir is None:
      raise UsageError('--replay service needs a run directory')
    from podrace.distributed.learner import DistributedSource

    learning = build_learner(resolved)
    source = DistributedSource(learning, resolved.env, addresses, config, run_dir)
    return SebulbaDriver(learning, source, source.publish)
  if config.architecture == 'sebulba':
    return build_sebulba(resolved, server)
  mesh = learner_mesh(config.devices, config.model_devices)
  parts, sizes = (resolved.agent, resolved.env, resolved.replay, mesh), _sizes(config)
  program = Anakin(*parts, *sizes, config.seeds, agreement(config))
  check_run(*parts, *sizes)
  return AnakinDriver(program)


def _sizes(config: Config) -> tuple[int, int]:
  return config.num_envs, config.unroll_length


def agreement(config: Config) -> AllReduce:
  """Return the way in which the learning devices agree on parameters."""
  if config.agree == 'all-reduce':
    return AllReduce()
  return Gossip(config.gossip_graph, config.gossip_staleness)  # type: ignore[arg-type]


def build_discovery(config: Discovery) -> AnakinDriver:
  """Return `meta_training` as an `Architecture`."""
  return AnakinDriver(meta_training(config))


def meta_training(config: Discovery) -> MetaTraining:
  """Return the population of agents that a config describes, and the rule that they learn by.

  Raises:
    ValueError: if sizes do not fit each other, with the numbers.
  """
  from podrace.architectures.discovery.program import MetaOptimizer, MetaTraining
  from podrace.settings import discovery as settings

  settings.validate(config)
  meta = MetaOptimizer(config.meta_learning_rate, config.meta_optimizer, config.max_meta_update)
  return MetaTraining(
    tuple(_kind(config, env, width) for env, width in config.groups),
    config.agents,
    settings.first_rule(config),
    meta,
    learner_mesh(config.devices),
  )


def _kind(config: Discovery, name: str, width: int | None) -> Kind:
  """Return the settings that the agents of a group share."""
  from podrace.architectures.discovery.members import Kind
  from podrace.settings.discovery import rules_of

  env, agent = envs.make(name), config.agent
  if width is not None:
    hidden = (width,) * len(agent.network.hidden)
    agent = dataclasses.replace(agent, network=dataclasses.replace(agent.network, hidden=hidden))
  check_environment(env)
  agent = bind_run(dataclasses.replace(config, agent=agent, env=name), env)
  weights = rules_of(config.agent).REGULARISERS
  return Kind(
    agent=agent,
    env=env,
    value=config.value.bind(env.observation_space, env.action_space),
    num_envs=config.num_envs,
    unroll_length=config.unroll_length,
    updates=config.agent_updates,
    lifetime=config.lifetime,
    replay=_past(config, getattr(env, 'frame_stack', 0)),
    entropy_cost=config.entropy_cost,
    regularisers={name: config.regularization * w for name, w in weights.items()},
  )


def _past(config: Discovery, stack: int) -> Replay | None:
  """Return the replay of past unrolls of each agent in a population; None if there is none."""
  if not config.replayed:
    return None
  buffer = Buffer(config.capacity, config.replayed, min_size=1)
  sizes = config.unroll_length, config.num_envs, config.unroll_length
  return windows(buffer, *sizes, keep_state=True, stack=stack)


def build_sebulba(resolved: Resolved, server: Server | None = None) -> SebulbaDriver:
  """Return the Sebulba of a run; `server` accepts remote environments."""
  config, spec = resolved.config, resolved.env
  if config.envs == 'remote':
    if server is None:
      raise UsageError('--envs remote is for `podrace train`, with --listen')
    spec = server.spec(spec)
  devices = config.actor_devices, config.learner_devices, config.devices
  topology = split_devices(*devices, config.model_devices)
  return sebulba(
    resolved.agent,
    spec,
    resolved.replay,
    topology,
    *_sizes(config),
    host_replay=config.replay == 'host',
    threads=config.actor_threads,
    groups=config.actor_groups,
    lag=config.lag,
    max_lag=config.max_lag,
    batch_size=config.env_batch_size,
    env_threads=config.env_threads,
    deadline=config.env_deadline,
    seed=config.seed,
    check=True,
  )


def describe_devices(config: Any, mesh: Any) -> str:
  """Return the numbers of devices in words, also of acting ones if they are of this process."""
  if not isinstance(config, Config) or config.architecture != 'sebulba':
    return f'{mesh.size} device(s)'
  if config.replay == 'service':
    return f'{mesh.size} learning device(s)'
  devices = config.actor_devices, config.learner_devices, config.devices
  return str(split_devices(*devices, config.model_devices))


def sebulba(
  agent: Any,
  spec: HostSpec,
  replay: Replay,
  topology: Topology,
  num_envs: int,
  unroll_length: int,
  host_replay: bool = False,
  check: bool = False,
  **acting: Any,
) -> SebulbaDriver:
  """Return a driver that acts and learns in one process, from bound parts.

  Args:
    agent: bound to the spaces of `spec`.
    spec: the environments.
    replay: of the agent.
    topology: the actor and learner devices.
    num_envs: over all processes.
    unroll_length: steps of an unroll.
    host_replay: replay is on the host, not on the learner's devices.
    check: check the agent and the environment, which may be a user's.
    acting: settings of `ActingProgram`. groups=0: as `make_program`.

  Raises:
    ValueError: if sizes do not fit each other, with the numbers.
  """
  if host_replay and replay.windows is None:
    raise ValueError('--replay host: the agent learns from the newest trajectory; leave it out')
  mesh, destinations = topology.learners, topology.destinations
  in_turn = replay.windows is not None and not host_replay
  has_share = in_turn and replay.windows.buffer.online_share is not None  # sampled on each device
  parts = dict(in_turn=in_turn, part_multiple=replay.windows.logged[1] if has_share else 1)
  program = make_program(
    agent, spec, topology.actors, destinations, num_envs, unroll_length, **parts, **acting
  )
  if check:  # once the sizes fit, and before the agent is traced for anything else
    if spec.try_out is not None:
      spec.try_out(program.deadline)
    check_run(agent, spec, replay, mesh, num_envs, unroll_length)
  example = example_trajectory(agent, spec, num_envs, unroll_length)
  previous, actors = program.lag == '1', ActorSource(program, mesh)
  if host_replay:
    layout = Layout(replay.windows, example)
    learning = LearningProgram(agent, mesh, layout, example, keeps_previous=previous)
    labels = _host_labels(agent, layout, topology) if hooks.labels_elsewhere(agent) else None
    source = HostReplaySource(actors, layout, mesh, program.seed, labels)
    return SebulbaDriver(learning, source, source.publish)
  learning = LearningProgram(agent, mesh, replay, example, program.local_groups, previous)
  return SebulbaDriver(learning, actors, actors.publish)


def _host_labels(agent: Any, layout: Layout, topology: Topology) -> HostLabels:
  """Return the stage of a process, on a device that neither acts nor learns if there is one."""
  used = {*topology.actors, *topology.destinations}
  spare = [device for device in jax.local_devices() if device not in used]
  return HostLabels(agent, layout, (spare or topology.destinations)[0])


def build_learner(resolved: Resolved) -> LearningProgram:
  """Return the learning half, by default on all devices; acting is in other processes."""
  config = resolved.config
  if config.actor_devices:
    raise UsageError(
      f'--actor-devices {config.actor_devices}: with --replay service nobody acts in this process; '
      'give it to `podrace act`'
    )
  agent, spec, replay = resolved.agent, resolved.env, resolved.replay
  every = range(config.devices or jax.local_device_count())
  devices = config.learner_devices or ','.join(map(str, every))
  mesh = split_devices(devices, devices, config.devices, config.model_devices).learners
  check_run(agent, spec, replay, mesh, *_sizes(config))
  example = example_trajectory(agent, spec, *_sizes(config))
  layout = replay if replay.windows is None else Layout(replay.windows, example)
  return LearningProgram(agent, mesh, layout, example)


def make_server(config: Config, listen: Listen | None) -> Server | None:
  """Return the server for remote environments, or None if they are local.

  Each learner process has its own server. It does not listen before it is entered.
  """
  if config.envs == 'local':
    if listen is not None:
      raise UsageError('--listen is for --envs remote and for --replay service')
    return None
  if listen is None:
    raise UsageError(
      '--envs remote needs --listen, as --listen tcp://127.0.0.1:5555, also to resume a run: '
      'clients look for it at the address that they were started with'
    )
  from podrace.distributed.environments.server import Server

  wait, on_cores = config.max_wait_ms / 1000, jax.default_backend() == 'cpu'
  return Server(listen, share(config.num_envs), wait, config.env_deadline, on_cores)
