"""Model families, built from shared decoder parts."""
