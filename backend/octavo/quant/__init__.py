"""How a linear layer stores and multiplies its weight."""
