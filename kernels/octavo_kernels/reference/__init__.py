"""Plain torch twins of every kernel: the definition of right."""
