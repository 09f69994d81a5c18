"""What a traced step costs on a machine: seconds and bytes of a rank.

The model is that of Oyama et al. 2020, section III-C, on a simulated clock (`step`), with the
overlap that was measured (`lanes`) and what the paper neglects: small operators, overhead, the
optimizer, input (`feed`). `memory` says what a rank needs.
"""
