"""Training: runs that resume and explain themselves, and finished runs on other slides.

`train.train`, `predict.predict` and `evaluate.evaluate` are functions of `gated_srp`; nothing is imported before it is used.
"""
