"""Training loops and the jitted programs that they call."""
