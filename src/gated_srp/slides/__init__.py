"""From a raw slide to a feature file: reading, tissue, tiles, encoders, extraction (extra ``slides``)."""
