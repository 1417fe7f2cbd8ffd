"""In PyTorch's virtual environment: updates of the shallow IMPALA network, in frames/s.

The same network and batch as `learner` in benchmarks/sebulba.py's pong-impala: V-trace is left out, which costs
the peer nothing; policy-gradient, value and entropy terms with given targets, Adam, clipped norm.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
  import torch
  from torch import nn

  frames, seconds, layout = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
  torch.manual_seed(0)
  torso = nn.Sequential(
    nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(),
    nn.Linear(32 * 81, 256), nn.ReLU(),
  )  # fmt: skip
  net = nn.ModuleDict(dict(torso=torso, policy=nn.Linear(256, 6), value=nn.Linear(256, 1)))
  form = torch.channels_last if layout == 'channels_last' else torch.contiguous_format
  net = net.to(memory_format=form)
  optimizer = torch.optim.Adam(net.parameters(), lr=6e-4, eps=1e-5)
  frame = torch.randint(0, 255, (frames, 4, 84, 84), dtype=torch.uint8)
  action, target = torch.randint(0, 6, (frames,)), torch.randn(frames)

  def update() -> None:
    x = (frame.float() / 255).contiguous(memory_format=form)
    features = torso(x)
    log_p = torch.log_softmax(net['policy'](features), -1)
    value = net['value'](features)[:, 0]
    chosen = log_p.gather(1, action[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    advantage = (target - value).detach()
    loss = -(advantage * chosen).mean() + 0.25 * (target - value).square().mean() - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 40.0)
    optimizer.step()

  for _ in range(3):
    update()
  start, count = time.perf_counter(), 0
  while time.perf_counter() < start + seconds:
    update()
    count += 1
  rate = count * frames / (time.perf_counter() - start)
  about = dict(torch=torch.__version__, threads=torch.get_num_threads())
  print(json.dumps(dict(frames_per_s=rate, **about)))


if __name__ == '__main__':
  main()
