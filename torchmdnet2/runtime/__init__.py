"""What the Evaluator runs: frozen weights, static buffers, one step of launches, captured CUDA graphs."""
