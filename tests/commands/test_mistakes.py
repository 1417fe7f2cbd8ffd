"""Mistakes on the command line: exit code 2, at most three lines, and the name that was meant."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podrace import cli
from podrace.commands import rm, train, watch
from podrace.commands.configure import agent_settings
from podrace.errors import UsageError

# Arguments of `podrace train` -> texts that the message has.
OTHER_NAMES = {
  '--lr 3e-4': '--agent.learning-rate',
  '--learning-rate 3e-4': '--agent.learning-rate',
  '--learning_rate 3e-4': '--agent.learning-rate',
  '--LR 3e-4': '--agent.learning-rate',
  '--agent.lr 3e-4': '--agent.learning-rate',
  '--gamma 0.99': '--agent.discount',
  '--agent.gamma 0.99': '--agent.discount',
  '--GAMMA 0.99': '--agent.discount',
  '--system.gamma 0.99': '--agent.discount',
  '--discounting 0.99': '--agent.discount',
  '--discount 0.99': '--agent.discount',
  '--gae_lambda 0.95': '--agent.lambda',
  '--gae-lambda 0.95': '--agent.lambda',
  '--ent_coef 0.01': '--agent.entropy-cost',
  '--ent-coef=0.01': '--agent.entropy-cost',
  '--ENT_COEF 0.01': '--agent.entropy-cost',
  '--entropy_coef 0.01': '--agent.entropy-cost',
  '--vf_coef 0.5': '--agent.value-cost',
  '--baseline_cost 0.5': '--agent.value-cost',
  '--max_grad_norm 1': '--agent.max-grad-norm',
  '--clip_norm 1': '--agent.max-grad-norm',
  '--clip_range 0.2': '--agent.clip',
  '--clip_coef 0.2': '--agent.clip',
  '--n_steps 128': '--unroll-length',
  '--num_steps 128': '--unroll-length',
  '--rollout_length 128': '--unroll-length',
  '--n_envs 8': '--num-envs',
  '--n-envs 8': '--num-envs',
  '--num_workers 8': '--num-envs',
  '--batch_size 64': '--agent.buffer.batch-size',
  '--batch-size=64': '--agent.minibatches',
  '--minibatch_size 64': '--agent.minibatches',
  '--num_minibatches 4': '--agent.minibatches',
  '--n_epochs 4': '--agent.epochs',
  '--update_epochs 4': '--agent.epochs',
  '--total_timesteps 1e6': '--total-steps',
  '--timesteps 1e6': '--total-steps',
  '--steps 1e6': '--total-steps',
  '--total_environment_frames 1e6': '--total-steps',
  '--resume': '--run-dir',
  '--resume runs/x': '--run-dir',
  '--load runs/x': '--init-from',
  '--logdir runs/x': '--run-dir',
  '--log_dir runs/x': '--run-dir',
  '--exp_name x': '--run-dir',
  '--save_freq 10': '--checkpoint-every',
  '--eval_freq 10': '--eval-every',
  '--n_eval_episodes 10': '--eval-episodes',
  '--log_interval 10': '--log-every',
  '--device cpu': 'JAX_PLATFORMS=cpu',
  '--cuda': 'JAX_PLATFORMS=cpu',
  '--track': '--sinks wandb',
  '--tensorboard_log x': '--sinks tensorboard',
  '--env_id CartPole-v1': '--env',
  '--env_name CartPole-v1': '--env',
  '--algo ppo': '--agent',
  '--buffer_size 1e6': '--agent.buffer.capacity',
  '--learning_starts 1000': '--agent.buffer.min-size',
  '--tau 0.005': '--agent.target-rate',
  '--target_update_interval 10': '--agent.target-period',
  '--net_arch 64': '--agent.network.hidden',
  '--hidden_size 64': '--agent.network.hidden',
  '--use_lstm': '--agent.network.core',
  '--num_seeds 4': '--seeds',
  '--verbose 1': '--quiet',
  '--norm_obs': '--agent.normalize-observations',
  '--norm_reward': '--agent.normalize-rewards',
  '--anneal_lr': '--agent.anneal-learning-rate',
  '--capture_video': 'podrace watch',
  '--exploration_final_eps 0.05': '--agent.epsilon',
  '--agent dqn --exploration_final_eps 0.05': '--agent.epsilon',
  '--agent sac --env gymnax:Pendulum-v1 --lr 3e-4': '--agent.actor-learning-rate',
  '--agent PPO': 'ppo',
  '--agent Impala': 'impala',
  '--agent DQN': 'dqn',
  '--agent a2c': 'impala',
  '--agent rainbow': 'dqn',
  '--agent my_agent.MyAgent': 'my_agent:MyAgent',
  'PPO': '--agent ppo',
  'dqn': '--agent dqn',
  'CartPole-v1': '--env',
  'CartPole-v1 --total-steps 1e5': 'gymnax:CartPole-v1',
  'PongNoFrameskip-v4': 'ale:pong',
  'ALE/Pong-v5': 'ale:pong',
  'ale:pong': '--env ale:pong',
  'Breakout-MinAtar': 'gymnax:Breakout-MinAtar',
  'my_agent:MyAgent': '--agent my_agent:MyAgent',
  '--env PongNoFrameskip-v4': 'ale:pong',
  '--env ALE/Breakout-v5': 'ale:breakout',
  '--env CartPole-v1': 'gymnax:CartPole-v1',
  '--env gymnax:CartPole': 'CartPole-v1',
  '--env HalfCheetah-v4': 'HalfCheetah-v4',
}
MORE_NAMES = {  # of stable-baselines3, CleanRL, RLlib and Stoix
  '--policy_kwargs {}': '--agent.network.hidden',
  '--n_stack 4': 'ale:NAME,stack=4',
  '--use_sde': 'there is none',
  '--target_kl 0.01': 'there is none',
  '--agent ppo --norm_adv': '--agent.normalize-advantages',
  '--agent ppo --clip_vloss': '--agent.clip-value',
  '--torch_deterministic': 'equal to the bit',
  '--framework torch': 'JAX',
  '--wandb_project_name x': '--sinks wandb',
  '--agent dqn --train_frequency 4': '--agent.buffer.samples-per-insert',
  '--agent dqn --end_e 0.05': '--agent.epsilon',
  '--agent dqn --start_e 1': '--agent.epsilon',
  '--agent dqn --target_network_frequency 500': '--agent.target-period',
  '--agent sac --q_lr 1e-3': '--agent.critic-learning-rate',
  '--agent sac --policy_lr 1e-3': '--agent.actor-learning-rate',
  '--agent sac --autotune': '--agent.learn-temperature',
  '--num_rollout_workers 4': '--num-envs',
  '--num_env_runners 4': '--num-envs',
  '--num_gpus 1': '--devices',
  '--train_batch_size 4000': '--unroll-length',
  '--agent ppo --sgd_minibatch_size 128': '--agent.minibatches',
  '--agent ppo --num_sgd_iter 10': '--agent.epochs',
  '--stop_timesteps 100000': '--total-steps',
  '--num_updates 100': '--total-steps',
  '--episodes 100': '--total-steps',
  '--max_episode_steps 200': 'max_episode_steps=N',
  '--reward_scale 0.1': '--agent.normalize-rewards',
  '--run_name x': '--run-dir',
  '--agent dqn --prioritized_replay_alpha 0.6': '--agent.buffer.priority-exponent',
  '--agent dqn --double_dqn': '--agent.double',
  '--double_dqn': 'impala has no such setting',
  '--agent dqn --dueling': '--agent.network.dueling',
  '--agent dqn --v_min 0': '--agent.network.v-min',
  '--num_threads 4': '--env-threads',
  'arch.total_num_envs=64': '--num-envs',
  'system.gamma=0.99': '--agent.discount',
  'env=gymnax/cartpole': '--env',
  '--nothing-near-this 1': '--help-all',
  '--agent ppo --agent.core gru': 'use --agent.network.core',
  '--agent sac --env gymnax:Pendulum-v1 --agent.core gru': 'use --agent.actor.core or --agent.critic.core',
  '--agent dqn --capacity 1e5': 'use --agent.buffer.capacity',
}
OTHER_COMMANDS = {
  'eval x --n_eval_episodes 10': '--episodes',
  'eval x --deterministic': '--greedy',
  'eval x --render': 'podrace watch',
  'eval --model x': 'podrace eval DIR',
  'eval x --device cpu': 'JAX_PLATFORMS=cpu',
  'watch x --output x.mp4': '--out',
  'watch --env CartPole-v1': 'podrace watch RUN',
  'export x --format onnx': 'podrace export RUN DIR',
  'export x --onnx': 'podrace export RUN DIR',
  'sweep cartpole --n_trials 10': '--trials',
  'sweep cartpole --sampler tpe': '--method',
  'sweep cartpole --vary gamma=0.9,0.99': '--agent.discount',
  'launch cartpole --as impala --workers 4': '--actors',
  'launch cartpole --as ppo': 'impala',
  'runs --format json': '--json',
  'report x --html': '--out',
  'plot x --metrics loss': '--metric',
  'replay --port 8000': '--listen tcp://HOST:PORT',
  'replay --listen localhost:8000': 'tcp://HOST:PORT',
  'test x': 'podrace eval',
  'tune cartpole': 'podrace sweep',
  'enjoy x': 'podrace watch',
  'tensorboard runs': 'podrace report',
  'version': 'podrace --version',
}
BAD_VALUES = {
  '--seed abc': '--seed',
  '--seed 1.5': '--seed',
  '--seed': '--seed',
  '--num-envs -5': '--num-envs',
  '--num-envs 0': '--num-envs',
  '--num-envs many': '--num-envs',
  '--total-steps': '--total-steps',
  '--total-steps 1e': '--total-steps',
  '--total-steps=': '--total-steps',
  '--seeds two': '--seeds',
  '--devices all': '--devices',
  '--architecture gpu': 'anakin',
  '--architecture': '--architecture',
  '--replay disk': 'service',
  '--lag 7': 'async',
  '--agent.learning-rate fast': '--agent.learning-rate',
  '--agent.learning-rate': '--agent.learning-rate',
  '--agent.learning-rate 1e-3 1e-4': '1e-4',
  '--agent.anneal-learning-rate maybe': '--agent.no-anneal-learning-rate',
  '--agent.network.core transformr': 'transformer',
  '--agent.network.hidden a b': '--agent.network.hidden',
  '--agent.network.activation sine': 'tanh',
  '--agent.network.hiden 64': '--agent.network.hidden',
  '--agent.entropy-cots 1': '--agent.entropy-cost',
  '--agent.buffer.capacity 10': 'dqn',
  '--agent': '--agent',
  '--run-dir': '--run-dir',
  '--sinks wandbb': 'wandb',
  'cartpole extra': 'extra',
  'cartpol': 'cartpole',
  '--env podrace:catsch': 'catch',
  '--env nolib:catch': 'podrace',
  '--total-steps 1,000,000': "not '1,000,000'",
  '--agent.learning-rate 0': '--agent.learning-rate must be more than 0',
  '--agent.discount 1.5': '--agent.discount must be within',
  '--agent.network.hidden [64,64]': "not '[64,64]'",
}
TRAIN = OTHER_NAMES | MORE_NAMES | BAD_VALUES
MISTAKES = {f'train {words}': text for words, text in TRAIN.items()} | OTHER_COMMANDS


def test_there_are_120_mistakes() -> None:
  assert len(MISTAKES) >= 120


@pytest.mark.parametrize('arguments', MISTAKES)
def test_a_mistake(
  arguments: str,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as exit_:
    cli.main(arguments.split(' '))
  message = capsys.readouterr().err
  assert exit_.value.code == 2
  assert MISTAKES[arguments] in message
  assert message.startswith('podrace: ') and message.count('\n') <= 3 and len(message) < 600
  assert list(tmp_path.iterdir()) == []


def test_a_setting_without_a_type_is_named(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / 'untyped_agent.py').write_text(
    'import dataclasses\nfrom podrace.agents.impala import Impala\n'
    '@dataclasses.dataclass(frozen=True)\nclass Mine(Impala):\n  warmth = 0.5\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  for words, text in (
    ('--agent.warmth', 'warmth: float = 0.5'),
    ('--discount', '--agent.discount'),
  ):
    with pytest.raises(SystemExit) as exit_:
      cli.main(['train', '--agent', 'untyped_agent:Mine', words, '1'])
    message = capsys.readouterr().err
    assert exit_.value.code == 2 and text in message and message.count('\n') == 1


def test_a_narrow_terminal_cuts_no_message(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  messages = []
  for columns in ('20', '200'):
    monkeypatch.setenv('COLUMNS', columns)
    with pytest.raises(SystemExit) as end:
      cli.main(['train', '--agent.network.hidden', '64', 'x'])
    messages.append(capsys.readouterr().err)
    assert end.value.code == 2 and os.environ['COLUMNS'] == columns
  assert messages[0] == messages[1]


def test_options_may_have_underscores(tmp_path: Path) -> None:
  words = ['--total_steps', '512', '--eval_every', '0', '--save_config', str(tmp_path / 'a.toml')]
  with pytest.raises(SystemExit) as end:
    cli.main(['train', 'muzero-tictactoe', *words])
  assert end.value.code == 0
  saved = tomllib.loads((tmp_path / 'a.toml').read_text())
  assert (saved['total_steps'], saved['eval_env']) == (512, '')  # which needs evaluations


def test_settings_of_the_agent_may_come_before_the_run() -> None:
  for words in (['--agent.normalize-observations'], ['--agent.no-anneal-learning-rate'],
                ['--agent.discount', '0.9'], ['--agent.network.hidden', '8', '8']):  # fmt: skip
    assert agent_settings([*words, 'runs/a', '--seed', '3']) == (words, ['runs/a', '--seed', '3'])


def test_ctrl_d_at_the_question_deletes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
  def end(question: str) -> str:
    raise EOFError

  monkeypatch.setattr('builtins.input', end)
  monkeypatch.setattr(sys, 'stdin', SimpleNamespace(isatty=lambda: True))
  assert rm._ask(1, 10) is False


def test_a_display_that_is_gone_is_named(monkeypatch: Any) -> None:
  monkeypatch.setenv('DISPLAY', ':9999')
  with pytest.raises(UsageError, match='--live'):
    watch.window(30)


def test_a_run_without_a_speed_is_described(tmp_path: Path, capsys: Any) -> None:
  train.print_summary(tmp_path, {'step': 7, 'episode_return': 1.0, 'steps_per_s': None})
  assert 'step 7' in capsys.readouterr().out


def test_settings_nested_too_deep_are_refused(tmp_path: Path, capsys: Any) -> None:
  (tmp_path / 'a.toml').write_text('.'.join('a' * 3_000) + ' = 1')
  with pytest.raises(SystemExit) as end:
    cli.main(['train', '--config', str(tmp_path / 'a.toml')])
  assert end.value.code == 2 and 'nested' in capsys.readouterr().err
