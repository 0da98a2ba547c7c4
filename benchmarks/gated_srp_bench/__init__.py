"""`gated-srp bench`: ours against the textbook on one generated slide, in one process run, alternating, best of several.

Each memory figure comes from a fresh subprocess: peak resident size above the input and the model. Seconds are this machine's;
what counts are the ratios of one run.
"""
