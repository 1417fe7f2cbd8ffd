"""Environments on other machines, inference at the learner (SEED RL, arXiv 1910.06591).

The learner has the `server`, a `pool` for each actor thread and the `groups` of its clients.
Machines with environments run the `client`, without JAX. `environment_messages` has the messages
between them (docs/protocol.md).
"""
