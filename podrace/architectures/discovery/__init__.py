"""Meta-training: a population of agents learns by one rule, and the rule learns from how they fare.

`members` is one agent with its environments and its lifetime, as pure functions; `program` is the population on a mesh,
compiled; `objective` says how good an agent became; `config` and `presets` are what the command line takes.
Importing this does not import jax.
"""
