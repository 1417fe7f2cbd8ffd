"""Rules of learning: networks that make targets of an agent's predictions, and their files.

One file for each kind of rule: `disco` (Oh et al. 2025, Nature) and `lpg` (Oh et al. 2020, arXiv
2007.08794). Each has `Sizes`, the widths of its layers and so the shapes of its arrays; `init`, a
rule before it is trained; and pure functions of the arrays. `storage` reads, checks and writes the
files. `layers` are shared by the networks.
"""
