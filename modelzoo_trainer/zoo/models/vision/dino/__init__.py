"""Self-supervised image models of several parts: trunks, heads and losses (DINO, iBOT)."""
