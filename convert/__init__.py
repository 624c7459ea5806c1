"""From a checkpoint to a bundle: sources, recipes, export, quantisation. Runs on the host only."""
