"""Acting, replay and learning in separate processes: the arrangements of Ape-X and IMPALA.

Ape-X is by Horgan et al. 2018 (arXiv 1803.00933), IMPALA by Espeholt et al. 2018 (arXiv
1802.01561). Acting processes (`podrace act`) have environments and their own inference. They write
to a replay service (`podrace replay`) and read the parameters that the learner (`podrace train ...
--replay service`) publishes. Agents with replay write windows, which the learner samples and sets
priorities of. Agents without replay write whole unrolls to a queue, from which the learner takes
each once. Each process may end and come back. Its peers wait for it, and log which one is missing.
"""
