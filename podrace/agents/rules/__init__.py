"""Rules of learning: networks that say where an agent's predictions should move, and the files they come in.

One file for each kind of rule: `disco` (Oh et al. 2025, Nature) and `lpg` (Oh et al. 2020, arXiv
2007.08794). Each has `Sizes`, the widths of its layers and so the shapes of its arrays; `init`, a
rule before it is trained; and pure functions of the arrays. `files` reads, checks and writes them;
`layers` is what the networks share.
"""
