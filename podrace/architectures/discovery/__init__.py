"""Meta-training: a population of agents learns by one rule, and the rule from their returns.

`members` is one agent with its environments and its lifetime, as pure functions. `program` is the
population on a mesh, compiled. `objective` measures an agent's progress. Importing this does not
import jax.
"""
