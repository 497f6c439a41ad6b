"""The hooks: what one is, who is called, and in which order; also without a trainer."""
