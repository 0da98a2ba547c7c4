"""Fast forms of what the model classes compute plainly."""
