"""Environments on other machines, inference with the learner (SEED RL, arXiv 1910.06591).

`server` belongs to the learner, with the `pool` of each actor thread and the `groups` of its clients; `client` to
the machines with environments, which have no JAX; `wire` is what they say to each other (docs/protocol.md).
"""
