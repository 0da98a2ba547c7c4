"""What a cohort holds and what is wrong with it, before it is trained on."""
