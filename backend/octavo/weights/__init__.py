"""Reading checkpoints: GGUF files and Hugging Face folders."""
