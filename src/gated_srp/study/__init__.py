"""Studies: runs paired, compared and put beside the published numbers."""
