"""What makes a training step fast: optimizers, number formats, CUDA graphs."""
