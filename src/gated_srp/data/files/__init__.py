"""One feature file of any tool, or one image -> `Bag`."""
